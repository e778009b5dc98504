"""Nothing leaves at full resolution: what a float64 model shows of its noise is a public grid, and no more."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpis
from dpis import noise
from dpis.mechanism.mechanism import APPLIED_NOISE
from tests.dropin.loops import mlp, private

from .systems import Small, config, rows

LATTICE = 2.0**-20


def off_grid(values: Tensor, spacing: float) -> bool:
    """Whether some of the values lie between the points of a grid."""
    cells = values / spacing
    return bool((cells - cells.round()).abs().max() > 1e-4)


def released_sum() -> tuple[Tensor, float]:
    """A released sum, in units of a record's largest contribution, and the spacing of its grid."""
    system = Small(config(), rows(0.2, 0.4, 0.6))
    terms = system.begin()
    value = system.step() * terms.equivalent_batch / terms.clip_norm
    std = APPLIED_NOISE * terms.noise_multiplier
    return value, 2.0 ** math.floor(math.log2(std)) * LATTICE


def test_a_released_sum_lies_on_the_grid() -> None:
    assert not off_grid(*released_sum())


def test_without_the_grid_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "on_grid", lambda noisy, _: noisy)
    assert off_grid(*released_sum())


def weights_of_a_run(folder: Path) -> tuple[Tensor, float]:
    """The change of a float64 model by one step of SGD at learning rate 1, from its file alone."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.ones(16, 3, dtype=torch.float64), torch.ones(16).long())
    result = dpis.train(
        model, data, nn.CrossEntropyLoss(), epsilon=1.0, delta=1e-3, n_public=16, batch_size=16,
        epochs=1, lr=1.0, privacy=dpis.Privacy(method="dp-sgd"), out=folder,
    )  # fmt: skip
    std = APPLIED_NOISE * result.summary.history[0]["noise_multiplier"]
    grid = 2.0 ** math.floor(math.log2(std)) * LATTICE / 16
    return load_file(folder / "model.safetensors")["weight"], grid


def weights_of_a_loop() -> tuple[Tensor, float]:
    loop = private(mlp(), noise_multiplier=1.0, method="dp-sgd", seed=None)
    before = loop.weights.clone()
    loop.train(steps=1)
    scale = 0.1 / loop.optimizer.expected_batch_size
    return before - loop.weights, scale * LATTICE


def test_a_float64_model_file_shows_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not off_grid(*weights_of_a_run(tmp_path / "real"))
    monkeypatch.setattr(noise, "on_grid", lambda noisy, _: noisy)
    assert off_grid(*weights_of_a_run(tmp_path / "broken"))


def test_a_float64_model_of_the_drop_in_shows_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not off_grid(*weights_of_a_loop())
    monkeypatch.setattr(noise, "on_grid", lambda noisy, _: noisy)
    assert off_grid(*weights_of_a_loop())
