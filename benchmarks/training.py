"""DPIS against DP-SGD at the same guarantee: accuracy, gradients computed, time, memory.

    python benchmarks/training.py --results training.jsonl            # everything that is missing, then the table
    python benchmarks/training.py --results training.jsonl --report   # the table alone

Every cell is a process of its own (so its peak memory is its own) and one line of the results file; a cell
that is there is not run again. Cells are interleaved: all systems with one seed, then with the next. Learning
rates come from one grid, each system's own, chosen on a validation split of the training data (a tenth, never
the test set) with one seed; the test set is read once a cell, after the last epoch. These are research runs:
seeded, with diagnostics.

The setting fixes a large batch B and a smaller b = B/4. All systems take floor(n/b) steps an epoch. `dp-sgd
b` samples at rate b/n; `dp-sgd B` and every DPIS at rate B/n: these have the same privacy and the same noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

DELTA = 1e-5


@dataclass(frozen=True)
class Setting:
    """Data, model and budget; public numbers of the comparison."""

    data: str
    model: str
    epsilon: float
    batch: int
    large_batch: int
    epochs: int
    grid: tuple[float, ...]
    one_lr: bool = False  # every system at B takes the learning rate of the cheapest of them


SETTINGS = (
    Setting("fmnist", "scatter-linear", 3.0, 2048, 8192, 10, (4.0, 8.0, 16.0)),
    Setting("mnist", "scatter-linear", 1.0, 1024, 4096, 10, (2.0, 4.0, 8.0)),
    Setting("fmnist", "scatter-cnn", 1.0, 2048, 8192, 12, (4.0, 2.0, 8.0), one_lr=True),
    Setting("mnist", "scatter-cnn", 1.0, 1024, 4096, 10, (2.0, 4.0), one_lr=True),
)


@dataclass(frozen=True)
class System:
    """A way to train."""

    name: str
    method: str
    k: float = 1.0
    contribution: str = "weight"
    large: bool = True


SYSTEMS = (
    System("dp-sgd b", "dp-sgd", large=False),
    System("dp-sgd B", "dp-sgd"),
    System("dpis weight k=1.2", "dpis", k=1.2),
    System("dpis weight k=1.5", "dpis", k=1.5),
    System("dpis weight k=2", "dpis", k=2.0),
    System("dpis weight k=3", "dpis", k=3.0),
    System("dpis weight k=5", "dpis", k=5.0),
    System("dpis reject k=2", "dpis", k=2.0, contribution="reject"),
    System("dpis reject k=5", "dpis", k=5.0, contribution="reject"),
    System("opacus B", "opacus"),
)


@dataclass(frozen=True)
class Cell:
    """One run: a setting, a system, a learning rate, a seed, and what it is measured on."""

    setting: Setting
    system: System
    lr: float
    seed: int
    measured_on: str  # "validation" while the learning rate is chosen, then "test"

    @property
    def key(self) -> str:
        """The same for the same run."""
        s, system = self.setting, self.system
        return (
            f"{s.data}/{s.model}/eps{s.epsilon:g}/b{s.batch}/B{s.large_batch}/E{s.epochs}/{system.name}/lr{self.lr:g}"
            f"/seed{self.seed}/{self.measured_on}"
        )


# ── one cell, in its own process ─────────────────────────────────────────────────────────────────────


def load_tensors(setting: Setting, measured_on: str) -> tuple[Any, ...]:
    """Normalised scatter features and labels: to train on, and to measure on."""
    import torch

    from dpis.datasets.named import load
    from dpis.features import group_normalise, scatter_features

    data = load(setting.data)
    train = group_normalise(scatter_features(data.train_images), 27)
    labels = data.train_labels
    if measured_on == "test":
        test = group_normalise(scatter_features(data.test_images), 27)
        return train, labels, test, data.test_labels
    held_out = torch.rand(len(labels), generator=torch.Generator().manual_seed(7)) < 0.1
    return train[~held_out], labels[~held_out], train[held_out], labels[held_out]


def run_dpis(cell: Cell) -> dict[str, Any]:
    """Through `dpis.train`, as a user would."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import dpis
    from dpis.models.kinds import model_kind

    setting, system = cell.setting, cell.system
    train, labels, test, test_labels = load_tensors(setting, cell.measured_on)
    torch.manual_seed(cell.seed)
    model = model_kind(setting.model).build(tuple(train.shape[1:]), 10)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = dpis.train(
            model,
            TensorDataset(train, labels),
            nn.CrossEntropyLoss(),
            epsilon=setting.epsilon,
            delta=DELTA,
            n_public=len(train),
            batch_size=setting.batch,
            epochs=setting.epochs,
            lr=cell.lr,
            privacy=dpis.Privacy(
                method=system.method,
                equivalent_batch=setting.large_batch if system.large else None,
                headroom=system.k,
                contribution=system.contribution,
                clip_norm=0.1,
            ),
            training=dpis.Training(diagnostics=True),
            held_out=TensorDataset(test, test_labels),
            seed=cell.seed,
            out=Path(folder) / "run",
        )
    assert result.diagnostics is not None
    return {
        "accuracy": result.metrics["accuracy"],
        "gradient_evaluations": result.diagnostics.gradient_evaluations,
        "wall_seconds": time.perf_counter() - began,
    }


def run_opacus(cell: Cell) -> dict[str, Any]:
    """Opacus's default mode, a loop as in its examples, at the same rate, steps and noise multiplier."""
    import warnings

    import torch
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from dpis.accounting import Budget, Workload, plan_predeclared
    from dpis.models.kinds import model_kind

    warnings.simplefilter("ignore")
    setting = cell.setting
    train, labels, test, test_labels = load_tensors(setting, cell.measured_on)
    torch.manual_seed(cell.seed)
    model: Any = model_kind(setting.model).build(tuple(train.shape[1:]), 10)
    workload = Workload.create(
        n_public=len(train),
        batch_size=setting.batch,
        epochs=setting.epochs,
        equivalent_batch=setting.large_batch,
    )
    z = plan_predeclared(Budget(setting.epsilon, DELTA), workload).noise_multipliers[0]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=cell.lr, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(train, labels), batch_size=setting.large_batch)
    began = time.perf_counter()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=z, max_grad_norm=0.1
    )
    loss = nn.CrossEntropyLoss()
    evaluations, steps = 0, 0
    while steps < workload.steps:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=512, optimizer=optimizer
        ) as batches:
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                skipped = optimizer._check_skip_next_step(pop_next=False)
                optimizer.step()
                evaluations += len(inputs)
                steps += not skipped
                if steps == workload.steps:
                    break
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in torch.split(test, 1024)])
    return {
        "accuracy": (outputs.argmax(1) == test_labels).double().mean().item(),
        "gradient_evaluations": evaluations,
        "wall_seconds": time.perf_counter() - began,
    }


def run_cell(cell: Cell) -> dict[str, Any]:
    """Measure one cell in this process. What is loaded once a process is loaded before any clock starts."""
    import resource

    import torch

    import dpis.accounting
    import dpis.training.api  # noqa: F401

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    measured = run_opacus(cell) if cell.system.method == "opacus" else run_dpis(cell)
    measured["cpu_seconds"] = time.process_time()  # loading and planning included
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"key": cell.key, **asdict(cell), **measured, "peak_mib": round(peak)}


# ── all cells ────────────────────────────────────────────────────────────────────────────────────────


class Results:
    """Lines of a file, by key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {row["key"]: row for row in map(json.loads, lines)}

    def run(self, cell: Cell, deadline: float) -> dict[str, Any] | None:
        """The cell's line; measured now if it is missing. None once the time is up, or if it failed."""
        if cell.key in self.rows:
            return dict(self.rows[cell.key])
        if time.monotonic() > deadline:
            return None
        print(f"running {cell.key}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--cell", json.dumps(asdict(cell))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr.strip().splitlines()[-1], file=sys.stderr, flush=True)
            return None
        row = json.loads(done.stdout.splitlines()[-1])
        self.rows[cell.key] = row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return dict(row)


def cell_from_json(text: str) -> Cell:
    """The inverse of ``asdict``."""
    values = json.loads(text)
    setting = Setting(**{**values["setting"], "grid": tuple(values["setting"]["grid"])})
    system = System(**values["system"])
    return Cell(setting, system, values["lr"], values["seed"], values["measured_on"])


def chosen_lr(results: Results, setting: Setting, system: System, deadline: float) -> float | None:
    """The learning rate with the best validation accuracy; Opacus takes that of the DP-SGD it equals.

    Systems at B have the same mean and noise of an update, so where a search for each would take hours
    they share the one found with the fewest gradients.
    """
    if setting.one_lr and system.large:
        system = next(s for s in SYSTEMS if s.name == "dpis weight k=1.5")
    elif system.method == "opacus":
        system = next(s for s in SYSTEMS if s.name == "dp-sgd B")
    if len(setting.grid) == 1:
        return setting.grid[0]
    tried = [
        results.run(Cell(setting, system, lr, 100, "validation"), deadline) for lr in setting.grid
    ]
    rows = [row for row in tried if row is not None]
    if len(rows) < len(setting.grid):
        return None
    return float(max(rows, key=lambda row: row["accuracy"])["lr"])


def report(results: Results, settings: list[Setting]) -> list[dict[str, Any]]:
    """One row a system: means over seeds, beside the DP-SGD with the same noise."""
    rows = []
    for setting in settings:
        by_system = {system.name: list(_test_rows(results, setting, system)) for system in SYSTEMS}
        base = by_system["dp-sgd B"]
        for name, found in by_system.items():
            if not found:
                continue
            mean = {field: statistics.mean(row[field] for row in found) for field in _FIELDS}
            accuracies = [row["accuracy"] for row in found]
            rows.append(
                {
                    "data": setting.data,
                    "model": setting.model,
                    "epsilon": setting.epsilon,
                    "system": name,
                    "lr": found[0]["lr"],
                    "seeds": len(found),
                    **mean,
                    "accuracy_spread": max(accuracies) - min(accuracies),
                    "gradients_of_dp_sgd_B": _ratio(mean, base, "gradient_evaluations"),
                    "time_of_dp_sgd_B": _ratio(mean, base, "wall_seconds"),
                }
            )
    return rows


_FIELDS = ("accuracy", "gradient_evaluations", "wall_seconds", "peak_mib")


def _test_rows(results: Results, setting: Setting, system: System) -> Iterator[dict[str, Any]]:
    for row in results.rows.values():
        same = all(row["setting"][f] == getattr(setting, f) for f in ("data", "model", "epochs"))
        if same and row["system"]["name"] == system.name and row["measured_on"] == "test":
            yield row


def _ratio(mean: dict[str, float], base: list[dict[str, Any]], field: str) -> float | None:
    return mean[field] / statistics.mean(row[field] for row in base) if base else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("training.jsonl"))
    parser.add_argument("--data", nargs="*", default=["fmnist", "mnist"])
    parser.add_argument("--models", nargs="*", default=["scatter-linear", "scatter-cnn"])
    parser.add_argument("--systems", nargs="*", default=[system.name for system in SYSTEMS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="instead of the setting's: for times alone")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--report", action="store_true", help="print the table, run nothing")
    parser.add_argument("--json", action="store_true", help="one object a row")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell is not None:
        print(json.dumps(run_cell(cell_from_json(arguments.cell))))
        return
    settings = [s for s in SETTINGS if s.data in arguments.data and s.model in arguments.models]
    if arguments.epochs is not None:  # accuracy does not matter: one learning rate is enough
        settings = [replace(s, epochs=arguments.epochs, grid=s.grid[:1]) for s in settings]
    systems = [s for s in SYSTEMS if s.name in arguments.systems]
    results = Results(arguments.results)
    if not arguments.report:
        deadline = time.monotonic() + 60 * arguments.budget_minutes
        for setting in settings:
            for seed in range(arguments.seeds):
                for system in systems:
                    lr = chosen_lr(results, setting, system, deadline)
                    if lr is not None:
                        results.run(Cell(setting, system, lr, seed, "test"), deadline)
    for row in report(results, settings):
        print(json.dumps(row) if arguments.json else _line(row))


def _line(row: dict[str, Any]) -> str:
    share = row["gradients_of_dp_sgd_B"]
    time_share = row["time_of_dp_sgd_B"]
    return (
        f"{row['data']:7} {row['model']:15} eps {row['epsilon']:<3g} {row['system']:17} lr {row['lr']:<4g} "
        f"{100 * row['accuracy']:.2f} % (spread {100 * row['accuracy_spread']:.2f}, {row['seeds']} seeds)  "
        f"{row['gradient_evaluations'] / 1e6:.2f} M gradients ({_percent(share)})  {row['wall_seconds']:.0f} s "
        f"({_percent(time_share)})  {row['peak_mib']:.0f} MiB"
    )


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.0f} %"


if __name__ == "__main__":
    main()
