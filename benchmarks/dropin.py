"""One training loop, made private by Opacus and by dpis: time of an epoch and peak memory, as ratios in one run.

    python benchmarks/dropin.py                          # every model, every engine, a table
    python benchmarks/dropin.py --json --models cnn-256  # one JSON object a row
    python benchmarks/dropin.py --threads 1 --clock cpu  # on a machine with other work

The loop is the one of Opacus's examples: zero_grad, forward, loss, backward, step over a DataLoader. The epochs of
all engines take turns. Everything counts: drawing, collating, gradients, noise, the step.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engines import UnsupportedError, first_line, fixed
from meters import CLOCKS, describe_machine, median_milliseconds, peak_bytes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from workloads import Encoder

from dpis.models.paper import scatter_cnn_mnist

Epoch = Callable[[], None]

WARM_UP = 16
"""Steps of dpis before the clock runs: it compares itself with autograd at steps 1, 2, 4, 8, 16 and so on."""


@dataclass(frozen=True)
class Case:
    """A model, its data set, a batch size that divides it."""

    name: str
    description: str
    build: Callable[[], nn.Module]
    records: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    steps: int = 4


class Images(nn.Module):
    """The network of Opacus's MNIST example, with the shapes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.third, self.last = nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of ten classes."""
        hidden = functional.max_pool2d(functional.relu(self.first(images)), 2, 1)
        hidden = functional.max_pool2d(functional.relu(self.second(hidden)), 2, 1)
        return self.last(functional.relu(self.third(hidden.flatten(1))))


class Names(nn.Module):
    """The network of Opacus's char-LSTM example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(259, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.last = nn.Linear(128, 18)

    def forward(self, characters: Tensor) -> Tensor:
        """The logits of 18 languages."""
        return self.last(self.lstm(self.embedding(characters))[0][:, -1])


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 28, 28), torch.randint(10, (count,))


def scattered(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 81, 7, 7), torch.randint(10, (count,))


def names(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(259, (count, 20)), torch.randint(18, (count,))


def sentences(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (count, 64)), torch.randint(10, (count,))


CASES = {
    case.name: case
    for case in (
        Case("cnn-64", "Opacus's MNIST network, batch 64", Images, images, 64, steps=8),
        Case("cnn-256", "the same, batch 256", Images, images, 256),
        Case("cnn-512", "the same, batch 512", Images, images, 512),
        Case("scatter-cnn", "81x7x7, the paper's, batch 512", scatter_cnn_mnist, scattered, 512),
        Case("lstm", "Opacus's char-LSTM, 20 characters, batch 256", Names, names, 256, steps=1),
        Case("lstm-800", "the same, batch 800, its default", Names, names, 800, steps=1),
        Case("transformer", "4 layers, 64 words, batch 64", Encoder, sentences, 64, steps=1),
    )
}


def opacus(mode: str) -> Callable[[Case, nn.Module, DataLoader[Any]], Epoch]:
    def made(case: Case, model: nn.Module, loader: DataLoader[Any]) -> Epoch:
        from opacus import PrivacyEngine

        model = fixed(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        parts = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        if mode == "ghost":
            return epoch_of(parts[0], parts[1], parts[3], parts[2])
        return epoch_of(*parts, nn.CrossEntropyLoss())

    return made


def ours(method: str) -> Callable[[Case, nn.Module, DataLoader[Any]], Epoch]:
    def made(case: Case, model: nn.Module, loader: DataLoader[Any]) -> Epoch:
        from dpis import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        parts = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=method,
            n_public=case.batch * case.steps,
        )
        return epoch_of(*parts, nn.CrossEntropyLoss())

    return made


def plain(case: Case, model: nn.Module, loader: DataLoader[Any]) -> Epoch:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return epoch_of(model, optimizer, loader, nn.CrossEntropyLoss())


def epoch_of(model: nn.Module, optimizer: Any, loader: Any, criterion: Any) -> Epoch:
    """The loop that is timed; the same for all."""

    def epoch() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return epoch


ENGINES = {
    "sgd": plain,
    "opacus hooks": opacus("hooks"),
    "opacus functorch": opacus("functorch"),
    "opacus ghost": opacus("ghost"),
    "dpis uniform": ours("dp-sgd"),
    "dpis importance": ours("dpis"),
}


def measure(case: Case, repeats: int, clock: str, memory_too: bool) -> list[dict[str, Any]]:
    """A row for every engine."""
    torch.manual_seed(0)
    model = case.build()
    loader = DataLoader(
        TensorDataset(*case.records(case.batch * case.steps)), batch_size=case.batch
    )
    epochs: dict[str, Epoch] = {}
    failures: dict[str, str] = {}
    for name, make in ENGINES.items():
        try:
            epochs[name] = make(case, copy.deepcopy(model), loader)
            for _ in range(WARM_UP // case.steps + 1 if name.startswith("dpis") else 1):
                epochs[name]()
        except (ModuleNotFoundError, UnsupportedError) as error:
            failures[name] = first_line(error)
            epochs.pop(name, None)
        except Exception as error:
            if name.startswith("dpis"):
                raise
            failures[name] = first_line(error)
            epochs.pop(name, None)
    times = median_milliseconds(epochs, repeats, CLOCKS[clock])
    memory = {name: peak_bytes(epoch) for name, epoch in epochs.items()} if memory_too else {}
    theirs = [name for name in times if name.startswith("opacus")]
    fastest = min(theirs, key=times.__getitem__, default=None)
    rows = []
    for name in ENGINES:
        row: dict[str, Any] = {"model": case.name, "batch": case.batch, "engine": name}
        if name in failures:
            rows.append(row | {"failed": failures[name]})
            continue
        row["epoch_ms"] = round(times[name], 2)
        if "opacus hooks" in times:
            row["times_faster_than_default"] = round(times["opacus hooks"] / times[name], 2)
        if memory:
            row["peak_mib"] = round(memory[name] / 2**20, 1)
            row["memory_of_default"] = round(memory[name] / memory.get("opacus hooks", 1), 2)
        if fastest is not None:
            row["times_faster_than_fastest"] = round(times[fastest] / times[name], 2)
            row["fastest"] = fastest
        rows.append(row)
    return rows


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    print(f"\n{case.name}: {case.description}, {case.steps} steps")
    print(f"{'':18}{'ms':>9}{'MiB':>8}{'vs hooks':>10}{'vs fastest':>12}{'memory':>9}")
    for row in rows:
        if "failed" in row:
            print(f"{row['engine']:18} {row['failed']}")
            continue
        keys = ("peak_mib", "times_faster_than_default", "times_faster_than_fastest")
        mib, default, fastest = (row.get(key, float("nan")) for key in keys)
        print(
            f"{row['engine']:18}{row['epoch_ms']:9.1f}{mib:8.1f}{default:9.2f}x{fastest:11.2f}x"
            f"{row.get('memory_of_default', float('nan')):9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument(
        "--no-memory", action="store_true", help="times alone; the profiler is slow"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if not options.json:
        print(describe_machine(options.clock))
    for name in options.models:
        rows = measure(CASES[name], options.repeats, options.clock, not options.no_memory)
        if options.json:
            for row in rows:
                print(json.dumps(row), flush=True)
        else:
            show(CASES[name], rows)


if __name__ == "__main__":
    main()
