"""The real drop-in loop with and without a canary: what the released weights tell stays below the claim.

Two attacks that once passed it: masks that go by place under a public seed, and the lattice of the noise in float64. A
false alarm has probability 1e-3 or less in each test of the real code; seeds are fixed.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpis import noise, randomness
from dpis.dropin import session
from dpis.mechanism.mechanism import APPLIED_NOISE
from tests.mechanism.two_worlds import lower_bound_of

from .loops import Loop, private

pytestmark = pytest.mark.statistical

DELTA, NOISE, RECORDS, WIDTH = 0.05, 4.0, 64, 24
SURE = {"n_public": RECORDS, "loader": {"batch_size": RECORDS}, "method": "dp-sgd"}  # one step


def records(canary: bool) -> TensorDataset:
    """The canary stands first, so that the places of all others are shifted by one."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(RECORDS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.arange(RECORDS) % 2
    start = 1 - canary
    return TensorDataset(inputs[start:], targets[start:])


def released(canary: bool, seed: int, noise_multiplier: float = NOISE) -> tuple[Tensor, Loop]:
    """The sum that the weights show after one step, in units of a record's largest contribution."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 2, bias=False)).double()
    nn.init.zeros_(model[1].weight)
    options = {"noise_multiplier": noise_multiplier, "max_grad_norm": 0.1, "seed": seed}
    loop = private(
        model, records(canary), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **options, **SURE
    )
    torch.manual_seed(0)  # as scripts do, and the adversary knows
    loop.train()
    return -loop.weights * RECORDS / 0.1, loop


# ── masks by place ───────────────────────────────────────────────────────────────────────────────────


def public_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "seeded_generators", lambda _: contextlib.nullcontext())


def direction() -> Tensor:
    """Where the masks of a public seed would move the sum."""
    with pytest.MonkeyPatch.context() as patch:
        public_masks(patch)
        without, with_canary = (released(canary, 1, 0.01)[0] for canary in (False, True))
    moved = with_canary - without
    assert moved.norm() > 4.0
    return moved / moved.norm()


def bound_by_masks(runs: int) -> tuple[float, float]:
    """What can be told at least, and the claim."""
    towards, claim = direction(), released(True, 1)[1].engine.get_epsilon(DELTA)

    def observe(runs: int, first_seed: int) -> tuple[np.ndarray, np.ndarray]:
        def score(canary: bool, number: int) -> list[float]:
            return [float(released(canary, first_seed + 2 * number + canary)[0] @ towards)]

        without, with_canary = (
            np.array([score(canary, number) for number in range(runs)]) for canary in (False, True)
        )
        return without, with_canary

    return lower_bound_of(observe, runs, DELTA), claim


def test_masks_do_not_contradict_the_claim() -> None:
    found, claim = bound_by_masks(runs=90)
    assert found <= claim


def test_masks_of_a_public_seed_do(monkeypatch: pytest.MonkeyPatch) -> None:
    public_masks(monkeypatch)
    found, claim = bound_by_masks(runs=180)
    assert found > 5 * claim


# ── the lattice of float64 ───────────────────────────────────────────────────────────────────────────

WIDE = 3000


def on_lattice(values: Tensor) -> float:
    """How many noises in the tails of Box and Muller come from a uniform on the lattice of 2**52 cells."""
    half = len(values) // 2
    uniforms = torch.exp(-(values[:half].square() + values[half:].square()) / 2)
    cells = uniforms[uniforms < 2.0**-5] * 2.0**52
    return float(((cells - cells.floor() - 0.5).abs() < 0.1).double().mean())


def told_apart(worlds: int) -> int:
    """How often the true sum is told from another by the lattice, in the weights of a float64 model."""
    right = 0
    for seed in range(worlds):
        model = nn.Linear(WIDE, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        data = TensorDataset(torch.ones(1, WIDE).double(), torch.full((1, 1), seed % 2).double())
        loop = private(
            model, data, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), seed=seed, n_public=1,
            loader={"batch_size": 1}, method="dp-sgd", max_grad_norm=1.0,
        )  # fmt: skip
        for rows, targets in loop.loader:
            loop.optimizer.zero_grad()
            nn.functional.mse_loss(loop.model(rows), targets).backward()
            loop.optimizer.step()
        weights = -loop.weights  # a record with target 0 has no gradient, one with 1 has norm 1
        shift = -torch.ones(WIDE, dtype=torch.float64) / math.sqrt(WIDE)
        scores = [on_lattice((weights - k * shift) / APPLIED_NOISE) for k in (0, 1)]
        right += int(scores[1] > scores[0]) == seed % 2
    return right


def box_muller_on_a_coarse_lattice(
    words: Any, numbers: Any, normals: Any, _real: Any = randomness._box_muller
) -> None:
    """Radii from uniforms of 52 bits: those that we use have 63, and the lattice shows in rarer tails."""
    radii = words[: len(words) // 2]
    radii >>= 11
    radii <<= 11
    radii += 1 << 10
    _real(words, numbers, normals)


def test_the_lattice_tells_no_worlds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fourteen or more right guesses of 16 would have probability 2e-3."""
    monkeypatch.setattr(randomness, "_box_muller", box_muller_on_a_coarse_lattice)
    assert told_apart(16) < 15


def test_without_the_grid_it_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_box_muller", box_muller_on_a_coarse_lattice)
    monkeypatch.setattr(noise, "on_grid", lambda noisy, _: noisy)
    assert told_apart(16) == 16
