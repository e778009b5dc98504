"""Imports go down only: docs/design/0007-house.md. Every import in the source is read, lazy ones too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpis

TOP = Path(__file__).parents[1]

LAYERS = (
    {"errors", "layers", "schedulers"},
    {"randomness", "options", "stored_rows", "private_files"},
    {"noise", "generators", "batches", "group"},
    {"accounting"},
    {"coupling", "sampling", "files", "datasets", "runs"},
    {"gradients", "features"},
    {"models"},
    {"mechanism"},
    {"training", "dropin"},
    {"auditing"},
    {"app", "distributed"},
)
"""Rooms from the ground up: packages, or modules beside them. Those of one layer do not know each other."""

WITHOUT_TORCH = ("dpis.accounting", "dpis.runs")
"""Not even when a function is called."""

START_WITHOUT_TORCH = (
    *WITHOUT_TORCH,
    "dpis.options",
    "dpis.app.page",
    "dpis.app.commands.plan",
    "dpis.app.commands.report",
    "dpis.app.commands.verify",
)
"""Not while they are imported."""


@dataclass(frozen=True)
class Import:
    """An import in a file; ``at_start``: the file's own import carries it out."""

    module: str
    at_start: bool


def _modules(folder: Path, prefix: str) -> dict[str, Path]:
    files = {file: file.relative_to(folder).with_suffix("").parts for file in folder.rglob("*.py")}
    return {
        ".".join((prefix, *(part for part in parts if part != "__init__"))): file
        for file, parts in files.items()
    }


MODULES = _modules(TOP / "src" / "dpis", "dpis")


@cache
def _imports(file: Path) -> tuple[Import, ...]:
    return tuple(_within(ast.parse(file.read_bytes()), at_start=True))


def _within(node: ast.AST, *, at_start: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(name.name, at_start) for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the room"
        module = node.module or ""
        inner = [f"{module}.{name.name}" for name in node.names]
        yield from (Import(name if name in MODULES else module, at_start) for name in inner)
    lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    never = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _within(child, at_start=at_start and not lazy and not never)


def _room(module: str) -> str:
    return module.split(".")[1]


def _height(module: str) -> int:
    return next(height for height, rooms in enumerate(LAYERS) if _room(module) in rooms)


def _arrows_up(file: Path, module: str) -> Iterator[tuple[str, str]]:
    for found in {found.module for found in _imports(file)}:
        other = found.startswith("dpis.") and _room(found) != _room(module)
        if other and _height(found) >= _height(module):
            yield module, found


def test_every_room_has_a_layer() -> None:
    rooms = {_room(name) for name in MODULES if name not in ("dpis", "dpis.__main__")}
    placed = [room for layer in LAYERS for room in layer]
    assert rooms == set(placed)
    assert len(placed) == len(set(placed))


def test_imports_go_down_only() -> None:
    inside = {name: file for name, file in MODULES.items() if name not in ("dpis", "dpis.__main__")}
    found = {arrow for name, file in inside.items() for arrow in _arrows_up(file, name)}
    assert not found, "these imports go up, or to a sibling"


def test_inside_nothing_is_taken_from_the_front_door_but_the_version() -> None:
    for name, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module == "dpis":
                taken = {f"dpis.{name.name}" for name in node.names}
                assert taken <= {*MODULES, "dpis.__version__"}, name


def test_the_library_does_not_know_the_reproduction() -> None:
    for name, file in MODULES.items():
        assert not any(i.module.split(".")[0] == "reproduction" for i in _imports(file)), name


# ── torch ────────────────────────────────────────────────────────────────────────────────────────────


def _is_torch(module: str) -> bool:
    return "torch" in module.split(".")


def _way_to_torch(module: str, seen: set[str]) -> list[str]:
    """The chain of imports, at the start of each file, by which a module comes to torch; empty if it does not."""
    seen.add(module)
    for found in _imports(MODULES[module]):
        if found.at_start and _is_torch(found.module):
            return [module, found.module]
        parts = found.module.split(".")
        packages = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        for inner in packages if found.at_start else ():
            if inner in MODULES and inner not in seen and (way := _way_to_torch(inner, seen)):
                return [module, *way]
    return []


def _of(rooms: tuple[str, ...]) -> list[str]:
    return [m for m in sorted(MODULES) if any(m == r or m.startswith(f"{r}.") for r in rooms)]


def test_some_rooms_never_import_torch() -> None:
    for module in _of(WITHOUT_TORCH):
        assert not [i for i in _imports(MODULES[module]) if _is_torch(i.module)], module


@pytest.mark.parametrize("module", _of(START_WITHOUT_TORCH))
def test_what_reads_and_plans_starts_without_torch(module: str) -> None:
    assert not _way_to_torch(module, set())


def test_the_search_for_torch_finds_it() -> None:
    """So that the tests above cannot pass by looking at nothing."""
    assert _way_to_torch("dpis.noise", set())[-1] == "torch"
    assert _way_to_torch("dpis.training.api", set())
    assert not _way_to_torch("dpis", set())


HEAVY = {"torch", "numpy", "scipy", "dp_accounting", "rich"}


def _loaded(code: str) -> set[str]:
    """Which of the heavy packages a process has that ran this."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return HEAVY.intersection(done.stdout.splitlines()[-1].split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "run"
    data = TensorDataset(torch.randn(60, 3), torch.randint(2, (60,)))
    loss = nn.CrossEntropyLoss()
    dpis.train(nn.Linear(3, 2), data, loss, epochs=1, batch_size=20, n_public=60, out=folder)
    return folder


def _running(*commands: list[str]) -> str:
    lines = [f"assert main({command}) == 0" for command in commands]
    return "\n".join(["from dpis.app import main", *lines])


def test_reading_and_planning_run_without_torch(finished: Path) -> None:
    assert "torch" not in _loaded("import dpis.accounting, dpis.runs.summary, dpis.app.page")
    plan = ["plan", "--epsilon", "1", "--n-public", "60", "--batch-size", "20", "--epochs", "1"]
    verify, report = ["verify", str(finished / "ledger.jsonl")], ["report", str(finished)]
    assert _loaded(_running(plan, verify, report)) == HEAVY - {"torch"}
    assert (finished / "report.html").is_file()


def test_help_starts_at_once() -> None:
    assert not _loaded(_running(["--help"], ["--version"], ["train", "--help"], ["plan", "--help"]))
