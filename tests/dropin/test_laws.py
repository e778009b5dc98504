"""The rules of the mechanism, where somebody else drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from dpis.errors import BudgetExceededError
from dpis.mechanism import EventCounter, noisy_update
from dpis.randomness import Key

from .loops import RECORDS, Loop, data, mlp, private


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was summed up, before its noise; none is added."""
    seen: list[Tensor] = []

    def add_noise(values: dict[str, Tensor], std: float, normals: Any) -> dict[str, Tensor]:
        assert std > 0
        seen.append(torch.cat([value.double().flatten() for value in values.values()]))
        return {name: value.double() for name, value in values.items()}

    monkeypatch.setattr(noisy_update, "add_noise", add_noise)
    return seen


def test_an_event_is_spent_before_its_noise_is_drawn(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []
    spend, noise = EventCounter.spend, noisy_update.add_noise
    monkeypatch.setattr(
        EventCounter, "spend", lambda self, entries: (log.append("spent"), spend(self, entries))[1]
    )
    monkeypatch.setattr(noisy_update, "add_noise", lambda *a: (log.append("noise"), noise(*a))[1])
    private().train()
    assert log == ["spent", "noise"] * 5


def test_a_refused_event_releases_nothing(sums: list[Tensor]):
    loop = private()
    before = loop.weights

    def refuse(event: object) -> None:
        raise BudgetExceededError("no")

    loop.engine.accountant.journal._guard = type("Guard", (), {"admit": staticmethod(refuse)})()
    batches = iter(loop.loader)
    inputs, targets = next(batches)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    with pytest.raises(BudgetExceededError):
        loop.optimizer.step()
    assert not sums
    assert torch.equal(loop.weights, before)
    assert len(loop.engine.accountant) == 0


def coins_and_noise(loop: Loop, epochs: Sequence[int | None]) -> list[tuple[str, int]]:
    """Which streams were opened while epochs of so many steps were trained; masks may be made again."""
    opened, real = list[tuple[str, int]](), Key._derived

    def derived(key: Key, purpose: str, step: int) -> bytes:
        if not purpose.startswith("chance:"):
            opened.append((purpose, step))
        return real(key, purpose, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Key, "_derived", derived)
        for steps in epochs:
            loop.train(steps=steps)
    return opened


def test_no_coin_and_no_noise_is_used_twice():
    opened = coins_and_noise(private(loader={"batch_size": 4}), (1, 3, None))  # two are broken off
    assert len(opened) == len(set(opened)) > 0


@pytest.mark.slow
def test_draws_made_ahead_are_released_once_each(sums: list[Tensor]):
    loop = private(loader={"num_workers": 2, "prefetch_factor": 2})
    mechanism, released = loop.session.mechanism, []
    release = mechanism.release_sum
    mechanism.release_sum = lambda total: (released.append(total.draw), release(total))[1]
    opened = coins_and_noise(loop, (1, 2, None))
    assert len(released) == len({id(draw) for draw in released}) == 1 + 2 + len(loop.loader)
    assert len(opened) == len(set(opened))
    assert mechanism._draws == mechanism.step  # none was made for nothing


@pytest.mark.parametrize("method", ["dp-sgd", "dpis"])
@pytest.mark.parametrize("scale", [1.0, 1e6, float("inf"), float("nan")])
def test_one_record_moves_the_sum_by_one_at_most(method: str, scale: float, sums: list[Tensor]):
    records, labels = data()[:]
    for change in (1.0, scale):
        changed = records.clone()
        changed[7] *= change
        loop = private(
            mlp(),
            TensorDataset(changed, labels),
            method=method,
            kappa=1.0,
            n_public=RECORDS,
            loader={"batch_size": RECORDS},
            max_grad_norm=0.3,
        )
        for inputs, targets in loop.loader:  # one step, everybody is drawn
            assert len(inputs) == RECORDS
            loop.step(inputs, targets)
        assert loop.weights.isfinite().all()
    assert sums[-1].isfinite().all()
    assert (sums[0] - sums[-1]).norm() <= 2.0 + 1e-9
    if not torch.isfinite(torch.tensor(scale)):
        assert (sums[0] - sums[-1]).norm() <= 1.0 + 1e-9  # it adds nothing


def test_a_sum_over_one_record_has_norm_one_at_most(sums: list[Tensor]):
    one = TensorDataset(*(t[None] * s for t, s in zip(data()[3], (1e4, 1), strict=True)))
    loop = private(dataset=one, n_public=4, loader={"batch_size": 4}, max_grad_norm=1e-3)
    loop.train(3)
    assert len(sums) == 3
    assert all(total.norm() <= 1 + 1e-9 for total in sums)
    assert sums[0].norm() > 0.999


def test_a_sum_does_not_depend_on_how_losses_are_scaled_by_the_batch(sums: list[Tensor]):
    """The mean divides by a private number of rows, which is undone before anything is clipped."""
    records, labels = data()[:]
    for rows in (slice(0, 1), slice(0, 2), slice(1, 2)):
        some = TensorDataset(records[rows], labels[rows])
        private(dataset=some, n_public=len(some), loader={"batch_size": len(some)}).train()
    assert torch.allclose(sums[1], sums[0] + sums[2], rtol=0, atol=1e-12)


def test_norms_are_learned_for_the_records_they_belong_to(sums: list[Tensor]):
    loop = private(loader={"batch_size": RECORDS})
    records, labels = data()[:]
    model = mlp()
    loop.train()
    for record in range(RECORDS):
        loss = functional.cross_entropy(model(records[record : record + 1]), labels[record][None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert loop.session.mechanism.sampler.last_norms[record] == pytest.approx(float(norm), 1e-6)


def test_between_steps_parameters_hold_the_gradient_that_was_released():
    loop = private()
    for inputs, targets in loop.loader:
        before = loop.weights
        loop.step(inputs, targets)
        assert torch.allclose(loop.weights, before - 0.1 * loop.gradient, rtol=0, atol=1e-12)
        loop.optimizer.zero_grad()
        assert all(p.grad is None for p in loop.plain_model.parameters())


def test_frozen_parameters_stay():
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = {"optimizer": lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=1.0)}
    private(model, **optimizer).train()
    assert torch.equal(model[0].weight, before)


def test_dropout_has_its_own_coins_for_every_step():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    loop = private(model).train()
    assert loop.weights.isfinite().all()
