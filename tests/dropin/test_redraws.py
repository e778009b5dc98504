"""A draw that reached the loop is released, or delivered again as it was: nobody chooses who is sampled (rule 26)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.dropin.session import MisuseError
from dpis.mechanism import Mechanism

from .loops import Loop, data, private

RARE = {"n_public": 400, "dataset": data(400), "loader": {"batch_size": 4}, "method": "dp-sgd"}
WANTED = data(400).tensors[0][7]


def has(inputs: Tensor) -> bool:
    return bool((inputs == WANTED).all(1).any())


def steps_with_the_wanted(loop: Loop, steps: int, looks: int) -> int:
    """How often a loop steps with one record, that leaves every batch without it up to so many times."""
    found = 0
    for _ in range(steps):
        for _ in range(looks):
            inputs, targets = next(iter(loop.loader))
            if has(inputs):
                break
        loop.step(inputs, targets)
        found += has(inputs)
    return found


@pytest.mark.parametrize(
    "plan", [{}, {"epochs": 40, "target_epsilon": 1.0}], ids=["open", "planned"]
)
def test_leaving_the_loop_brings_no_other_draw(plan: dict[str, Any]) -> None:
    """A loop drew one record into 20 of 20 steps at rate .01, and paid for 20 steps."""
    assert steps_with_the_wanted(private(**RARE, **plan), steps=12, looks=60) <= 3


def test_with_fresh_coins_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Mechanism.draw_of
    monkeypatch.setattr(
        Mechanism, "draw_of", lambda self, step: (self._outstanding.clear(), drawn(self, step))[1]
    )
    assert steps_with_the_wanted(private(**RARE), steps=3, looks=2000) == 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_left_comes_again_as_it_was(workers: int) -> None:
    loop = private(loader={"batch_size": 4, "num_workers": workers})
    for _ in range(3):
        batches = iter(loop.loader)
        loop.step(*next(batches))
        left = next(batches)
        again = next(iter(loop.loader))
        assert all(map(torch.equal, left, again))
        loop.step(*again)


def test_parts_that_were_left_come_again() -> None:
    from dpis import BatchMemoryManager

    loop = private(loader={"batch_size": 16}, method="dp-sgd")
    settings = {"data_loader": loop.loader, "max_physical_batch_size": 4}
    with BatchMemoryManager(optimizer=loop.optimizer, **settings) as parts:
        batches = iter(parts)
        first = next(batches)
        loop.step(*first)
        second = next(batches)
    whole, targets = next(iter(loop.loader))
    assert torch.equal(whole[: len(first[0]) + len(second[0])], torch.cat([first[0], second[0]]))
    loop.step(whole, targets)
    assert len(loop.engine.accountant) == 1


def test_what_was_left_comes_again_after_a_checkpoint(tmp_path: Path) -> None:
    """Also without a seed, where all later coins are fresh."""
    loop = private(seed=None)
    left = next(iter(loop.loader))
    loop.engine.save_checkpoint(path=tmp_path / "c", module=loop.model, optimizer=loop.optimizer)
    for _ in range(2):
        other = private(seed=None)
        other.engine.load_checkpoint(path=tmp_path / "c", module=other.model)
        assert all(map(torch.equal, left, next(iter(other.loader))))


def test_terms_that_change_are_paid_for_and_drawn_anew() -> None:
    loop = private(epochs=2, kappa="1:0.5", target_epsilon=5.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    next(batches)
    loop.train()
    assert len(loop.engine.accountant) == 2 * len(loop.loader)


# ── draws that were taken past the loader ────────────────────────────────────────────────────────────


def test_a_loader_rebuilt_from_the_draws_is_refused() -> None:
    loop = private()
    rebuilt = torch.utils.data.DataLoader(data(), batch_sampler=loop.loader.batch_sampler)
    with pytest.raises(MisuseError, match="Iterate the loader that make_private returned"):
        next(iter(rebuilt))


@pytest.mark.slow
def test_accelerate_trains_what_it_is_given() -> None:
    """It rebuilt the loader, which then had no batches: nothing was trained, and nothing was said."""
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(4, 3).double()
    loop = private(model, data())
    prepared = accelerate.Accelerator(cpu=True).prepare(loop.model, loop.optimizer, loop.loader)
    private_model, optimizer, loader = prepared
    before = loop.weights.clone()
    for inputs, targets in loader:
        optimizer.zero_grad()
        functional.cross_entropy(private_model(inputs), targets).backward()
        optimizer.step()
    assert len(loop.engine.accountant) == len(loader) > 0
    assert not torch.equal(before, loop.weights)
