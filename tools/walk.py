"""How far is the walk through the house? Lines, signatures, what one step crosses, what it costs.

    python tools/walk.py                  # this checkout
    python tools/walk.py FOLDER --json    # another one, say an old commit: `git worktree add FOLDER COMMIT`

Steps are those of `dpis.train` and of a loop with `PrivacyEngine`, over a linear layer of 20 inputs and 2 outputs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

RECORDS, BATCH, EPOCHS = 6400, 64, 3
WARM = 20
"""Steps before the one that is followed. The library looks more closely at steps 1, 2, 4, 8, ...: the 21st is quiet."""


# ── what is written ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Room:
    """A package of the library, or the reproduction beside it."""

    files: int = 0
    code_lines: int = 0


@dataclass
class Signature:
    """A function, and how many arguments it takes beside `self`."""

    where: str
    arguments: int


@dataclass
class Written:
    """What a reader of the source meets."""

    rooms: dict[str, Room]
    longest_signatures: list[Signature]


def written_in(checkout: Path, signatures: int = 10) -> Written:
    """Count files, code lines and arguments."""
    rooms: dict[str, Room] = {}
    found: list[Signature] = []
    for file, room in _files_of(checkout):
        tree = ast.parse(file.read_bytes())
        rooms.setdefault(room, Room()).files += 1
        rooms[room].code_lines += len(_code_lines(file, tree))
        found += _signatures(tree, str(file.relative_to(checkout)))
    found.sort(key=lambda signature: -signature.arguments)
    return Written(dict(sorted(rooms.items())), found[:signatures])


def _files_of(checkout: Path) -> Iterator[tuple[Path, str]]:
    library = checkout / "src" / "dpis"
    for file in sorted(library.rglob("*.py")):
        inside = file.relative_to(library).parts
        yield file, inside[0] if len(inside) > 1 else "(top level)"
    for file in sorted((checkout / "reproduction").rglob("*.py")):
        yield file, "reproduction/"


def _code_lines(file: Path, tree: ast.AST) -> set[int]:
    """Lines that are not blank, not a comment and not a docstring, of a module or of what stands above it."""
    beside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    beside |= {tokenize.ENCODING, tokenize.ENDMARKER}
    with tokenize.open(file) as text:
        tokens = [t for t in tokenize.generate_tokens(text.readline) if t.type not in beside]
    lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _signatures(tree: ast.AST, file: str) -> Iterator[Signature]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            of = node.args
            named = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
            arguments = [name for name in named if name not in ("self", "cls")]
            others = (of.vararg is not None) + (of.kwarg is not None)
            yield Signature(f"{file}:{node.lineno} {node.name}", len(arguments) + others)


# ── what a step crosses and costs ────────────────────────────────────────────────────────────────────


@dataclass
class Step:
    """One step of an entry.

    Attributes:
        modules: of dpis whose functions it calls, with how many of them.
        milliseconds: of CPU, the median.
        over_plain: the same over a step of plain SGD on a batch at hand, measured in turns.
    """

    modules: dict[str, int] = field(default_factory=dict)
    milliseconds: float = 0.0
    over_plain: float = 0.0

    @property
    def functions(self) -> int:
        """All that it calls."""
        return sum(self.modules.values())


class Walker:
    """Is told when a step is done: follows one of them, and times all later ones in turns with a plain step."""

    def __init__(self, library: Path, plain: Callable[[], None]) -> None:
        self._library, self._plain = str(library) + os.sep, plain
        self._called: set[tuple[str, str]] = set()
        self._private_times: list[float] = []
        self._plain_times: list[float] = []
        self._steps, self._since = 0, 0.0

    def step_done(self, _: object = None) -> None:
        """Between two calls lies one step."""
        now = time.process_time()
        sys.setprofile(None)
        self._steps += 1
        if self._steps == WARM:
            sys.setprofile(self._see)
        elif self._steps > WARM + 1:
            self._private_times.append(now - self._since)
            began = time.process_time()
            self._plain()
            self._plain_times.append(time.process_time() - began)
        self._since = time.process_time()

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(self._library) and not code.co_name.startswith("<")
        if event == "call" and inside:
            self._called.add((code.co_filename.removeprefix(self._library), code.co_qualname))

    @property
    def step(self) -> Step:
        """What was found."""
        modules = Counter(module for module, _ in self._called)
        private, plain = map(statistics.median, (self._private_times, self._plain_times))
        return Step(dict(sorted(modules.items())), round(1000 * private, 3), private / plain)

    # A reporter of `dpis.train`:

    def __enter__(self) -> Walker:
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def epoch_done(self, _: object) -> None:
        """What lies between two epochs belongs to no step."""
        self._since = time.process_time()

    def note(self, _: str) -> None:
        """Nothing."""


def steps_of(checkout: Path) -> dict[str, Step]:
    """Follow and time both entries."""
    library = checkout / "src" / "dpis"
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import dpis

    if Path(dpis.__file__).parent != library:
        raise SystemExit(f"dpis was imported from {dpis.__file__}, not from {library}")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    inputs, targets = torch.randn(RECORDS, 20), torch.randint(2, (RECORDS,))
    dataset = TensorDataset(inputs, targets)

    def step_on(model: Any, optimizer: Any, inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def model_and_optimizer() -> tuple[Any, Any]:
        model = nn.Linear(20, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain_model, plain_optimizer = model_and_optimizer()

    def plain() -> None:
        step_on(plain_model, plain_optimizer, inputs[:BATCH], targets[:BATCH])

    train = Walker(library, plain)
    told: dict[str, Any] = {"progress": train}  # as older versions were told
    if hasattr(dpis, "Training"):
        told = {"training": dpis.Training(progress=train)}
    with tempfile.TemporaryDirectory() as folder:
        dpis.train(
            nn.Linear(20, 2),
            dataset,
            nn.CrossEntropyLoss(),
            epsilon=1.0,
            epochs=EPOCHS,
            batch_size=BATCH,
            n_public=RECORDS,
            seed=1,
            out=Path(folder) / "run",
            **told,
        )
    dropin = Walker(library, plain)
    model, optimizer = model_and_optimizer()
    model, optimizer, loader = dpis.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(dataset, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        n_public=RECORDS,
        seed=1,
    )
    for _ in range(EPOCHS):
        for batch in loader:
            step_on(model, optimizer, *batch)
            dropin.step_done()
        dropin.epoch_done(None)
    return {"dpis.train": train.step, "PrivacyEngine": dropin.step}


# ── what a start costs ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Start:
    """`dpis --help`, the best of several."""

    wall_seconds: float
    cpu_seconds: float


def start_of(checkout: Path, repetitions: int = 5) -> Start:
    """Start the command and throw away what it prints."""
    paths = os.pathsep.join([str(checkout / "src"), str(checkout)])
    command = [sys.executable, "-m", "dpis", "--help"]
    walls, cpus = [], []
    for _ in range(repetitions):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - began)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return Start(round(min(walls), 3), round(min(cpus), 3))


# ── the table ────────────────────────────────────────────────────────────────────────────────────────


def table(written: Written, steps: dict[str, Step], start: Start) -> str:
    """For a person."""
    rooms = written.rooms.values()
    total = Room(sum(room.files for room in rooms), sum(room.code_lines for room in rooms))
    lines = [f"{'room':<16}{'files':>8}{'code lines':>12}"]
    for name, room in {**written.rooms, "all": total}.items():
        lines.append(f"{name:<16}{room.files:>8,}{room.code_lines:>12,}")
    lines += ["", "arguments  longest signatures"]
    lines += [f"{s.arguments:>9}  {s.where}" for s in written.longest_signatures]
    lines += ["", f"{'one step of':<16}{'modules':>8}{'functions':>12}{'ms':>8}{'over SGD':>10}"]
    for name, step in steps.items():
        figures = f"{step.functions:>12}{step.milliseconds:>8.2f}{step.over_plain:>9.1f}x"
        lines.append(f"{name:<16}{len(step.modules):>8}{figures}")
    for name, step in steps.items():
        crossed = [f"{module} {functions}" for module, functions in step.modules.items()]
        lines += ["", f"functions called by a step of {name}:", "  " + "\n  ".join(crossed)]
    lines += ["", f"dpis --help: {start.wall_seconds:.2f} s, {start.cpu_seconds:.2f} s of CPU"]
    return "\n".join(lines)


def main() -> None:
    """Count, follow, time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    written, start, steps = written_in(checkout), start_of(checkout), steps_of(checkout)
    if options.json:
        found = {name: asdict(step) for name, step in steps.items()}
        print(json.dumps({**asdict(written), "steps": found, "start": asdict(start)}, indent=1))
    else:
        print(table(written, steps, start))


if __name__ == "__main__":
    main()
