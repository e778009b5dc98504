"""A problem small enough to train in a blink, and ways to look at what came out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpis.accounting import Ledger, read_ledger, verify_ledger
from dpis.options import Method, Privacy, Training, knobs
from dpis.training import Result, train
from dpis.training.progress import Silent, Standing

RELEASED = ("ledger.jsonl", "model.py", "model.safetensors", "summary.json")
N = 64


def points(n: int = N, seed: int = 0) -> TensorDataset:
    """Two classes, told apart by the sign of the first of four coordinates."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def linear(seed: int = 1) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(4, 2)


def mlp(dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def fit(out: Path, model: nn.Module | None = None, dataset: Any = None, **settings: Any) -> Result:
    """Train with settings that are quick to plan; seeded, so that it can be repeated."""
    defaults: dict[str, Any] = {
        "epsilon": 4.0,
        "epochs": 2,
        "batch_size": 16,
        "n_public": N,
        "accountant": "rdp",
        "seed": 7,
        "out": out,
    }
    if "loss" not in settings and "objective" not in settings:
        settings["loss"] = nn.CrossEntropyLoss()
    model = linear() if model is None else model
    method = settings.get("method", Method.DPIS)
    unused = {name for name, knob in knobs(Privacy).items() if method not in knob.used_by}
    asked = {name: value for name, value in defaults.items() if name not in unused} | settings
    privacy = Privacy(**{name: asked.pop(name) for name in knobs(Privacy) if name in asked})
    training = Training(**{name: asked.pop(name) for name in knobs(Training) if name in asked})
    dataset = points() if dataset is None else dataset
    return train(model, dataset, privacy=privacy, training=training, **asked)


def released(folder: Path) -> dict[str, bytes]:
    """Every file of a finished run; there is nothing but what is released."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) <= set(RELEASED), "only released files stay"
    return files


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def ledger(folder: Path) -> Ledger:
    return read_ledger(folder / "ledger.jsonl")


def assert_verifies(folder: Path) -> None:
    verdict = verify_ledger(folder / "ledger.jsonl", folder / "model.safetensors")
    assert verdict.problem is None, verdict.problem


class Each(Silent):
    """Calls a function after every step."""

    def __init__(self, function: Callable[[Standing], object]) -> None:
        self._function = function

    def step_done(self, standing: Standing) -> None:
        self._function(standing)


class Crash(BaseException):
    """The process is gone: not an error that anybody handles."""


def crash_at(step: int) -> Each:
    """A reporter that crashes the run once so many steps are done."""

    def crash(standing: Standing) -> None:
        if standing.step == step:
            raise Crash

    return Each(crash)
