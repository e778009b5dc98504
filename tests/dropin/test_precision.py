"""In half precision, too, one record more moves nobody else: a mean is differentiated as its sum (rule 19)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from dpis.coupling.loss_watch import LossWatch
from dpis.dropin.session import Session
from dpis.errors import InputError, MisuseError
from dpis.gradients import deferred
from dpis.mechanism import noisy_update

from .loops import data, first_batch, private

RECORDS = 701  # no power of two: a mean over those rounds nothing
WIDTH = 64

Criterion = Callable[..., Tensor]


def deep() -> nn.Module:
    torch.manual_seed(0)
    hidden = [part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 3))


def moved_by_one_more(
    monkeypatch: pytest.MonkeyPatch,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
    criterion: Criterion = functional.cross_entropy,
) -> float:
    """How far one record moves the sum of many that are alike."""
    sums, real = list[Tensor](), noisy_update.add_noise

    def add_noise(values: dict[str, Tensor], std: float, normals: Any) -> dict[str, Tensor]:
        sums.append(torch.cat([value.double().flatten() for value in values.values()]))
        return real(values, std, normals)

    monkeypatch.setattr(noisy_update, "add_noise", add_noise)
    rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs = torch.cat([rows[:1].expand(RECORDS, WIDTH), rows[1:]]).to(dtype)
    for records in (RECORDS, RECORDS + 1):
        loop = private(
            deep().to(dtype),
            TensorDataset(inputs[:records], torch.zeros(records, dtype=torch.long)),
            method="dp-sgd",
            n_public=RECORDS,
            max_grad_norm=0.1,
            loader={"batch_size": RECORDS},
            loss_reduction=reduction,
        )
        for batch, targets in loop.loader:
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = loop.model(batch)
                loss = criterion(outputs, targets, reduction=reduction)
            loss.backward()
            loop.optimizer.step()
    one, other = sums
    return float((one - other).norm())


def test_one_record_more_among_many_alike_moves_the_sum_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert moved_by_one_more(monkeypatch) <= 1.001


HALF: list[dict[str, Any]] = [{"autocast": True}, {"dtype": torch.bfloat16}]
in_half = pytest.mark.parametrize("half", HALF, ids=str)


def squared(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.mse_loss(outputs, functional.one_hot(targets, 3).to(outputs))


def divided(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none").sum() / len(outputs)


@in_half
def test_a_sum_in_half_precision_moves_by_one(
    half: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert moved_by_one_more(monkeypatch, reduction="sum", **half) <= 1.001


@in_half
@pytest.mark.parametrize("criterion", [functional.cross_entropy, squared, divided])
def test_a_mean_in_half_precision_moves_by_one(
    half: dict[str, Any], criterion: Criterion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.5 < moved_by_one_more(monkeypatch, criterion=criterion, **half) <= 1.001


@in_half
def test_begun_with_one_a_record_would_move_all(
    half: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossWatch, "before_backward", lambda self, loss, gradient: gradient)
    monkeypatch.setattr(LossWatch, "differentiating", nullcontext)
    monkeypatch.setattr(Session, "_half", lambda self, passed: False)
    monkeypatch.setattr(deferred, "_full", lambda tensor: tensor)
    monkeypatch.setattr(LossWatch, "refuse_rounded", lambda self, result: None)
    assert moved_by_one_more(monkeypatch, **half) > 1.5


PAST_THE_WATCH: dict[str, Callable[[Tensor], None]] = {
    "backward must be called on the loss itself": lambda loss: torch.autograd.backward(loss),
    "takes no gradient for a mean": lambda loss: loss.backward(torch.tensor(1.0)),
    "a mean must be computed in float32": lambda loss: loss.bfloat16().backward(),
}


@pytest.mark.parametrize("match", PAST_THE_WATCH)
def test_means_that_are_rounded_by_the_number_of_records_are_refused(match: str) -> None:
    loop = private(nn.Linear(4, 3, dtype=torch.bfloat16), data(dtype=torch.bfloat16))
    _, inputs, targets = first_batch(loop)
    loss = functional.cross_entropy(loop.model(inputs), targets)
    with pytest.raises(MisuseError, match=match):
        PAST_THE_WATCH[match](loss)
    loop.train(steps=1)


def test_two_ways_to_begin_backward_are_not_mixed() -> None:
    """In full precision each is right by itself; gradients of both cannot be told apart."""
    way, other = (private(max_grad_norm=20.0) for _ in range(2))
    for loop, backward in ((way, Tensor.backward), (other, torch.autograd.backward)):
        _, inputs, targets = first_batch(loop)
        backward(functional.cross_entropy(loop.model(inputs), targets))
        loop.optimizer.step()
    torch.testing.assert_close(way.weights, other.weights)
    _, inputs, targets = first_batch(way)
    loss = functional.cross_entropy(way.model(inputs), targets)
    loss.backward(retain_graph=True)
    torch.autograd.backward(loss)
    with pytest.raises(MisuseError, match="begun in different ways"):
        way.optimizer.step()


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="found complex"):
        private(nn.Linear(4, 3, dtype=torch.complex64), loss_reduction="sum")


def test_frozen_parameters_may_have_any_type() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3).half(), requires_grad=False))
    private(model).train(steps=1)
