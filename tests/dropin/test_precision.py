"""Half precision with a mean is refused: it rounds by how many were drawn, so that one moves all (rule 19)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from dpis.dropin.session import MisuseError, Session
from dpis.errors import InputError
from dpis.mechanism import mechanism as mechanism_module

from .loops import first_batch, private

RECORDS = 701  # no power of two: a mean over those rounds nothing
WIDTH = 64


def deep() -> nn.Module:
    torch.manual_seed(0)
    hidden = [part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 3))


def moved_by_one_more(
    monkeypatch: pytest.MonkeyPatch,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
) -> float:
    """How far one record moves the sum of many that are alike."""
    sums, real = list[Tensor](), mechanism_module.add_noise

    def add_noise(values: dict[str, Tensor], std: float, normals: Any) -> dict[str, Tensor]:
        sums.append(torch.cat([value.double().flatten() for value in values.values()]))
        return real(values, std, normals)

    monkeypatch.setattr(mechanism_module, "add_noise", add_noise)
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
                loss = functional.cross_entropy(outputs, targets, reduction=reduction)
            loss.backward()
            loop.optimizer.step()
    one, other = sums
    return float((one - other).norm())


def test_one_record_more_among_many_alike_moves_the_sum_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert moved_by_one_more(monkeypatch) <= 1.001


@pytest.mark.parametrize("half", [{"autocast": True}, {"dtype": torch.bfloat16}], ids=str)
def test_a_sum_in_half_precision_moves_by_one(
    half: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert moved_by_one_more(monkeypatch, reduction="sum", **half) <= 1.001


def test_a_mean_under_autocast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisuseError, match=r"required for a mean, found autocast.*loss_reduction"):
        moved_by_one_more(monkeypatch, autocast=True)


def test_with_autocast_one_record_would_move_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_require_full_precision", lambda self: None)
    assert moved_by_one_more(monkeypatch, autocast=True) > 1.5


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halved_parameters_and_a_mean_are_refused_before_anything_is_private(
    kind: torch.dtype,
) -> None:
    with pytest.raises(InputError, match=f"float32 or float64 for a mean, found {kind}"):
        private(nn.Linear(4, 3, dtype=kind))
    private(nn.Linear(4, 3, dtype=kind), loss_reduction="sum")


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="found complex"):
        private(nn.Linear(4, 3, dtype=torch.complex64), loss_reduction="sum")


def test_frozen_parameters_may_have_any_type() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3).half(), requires_grad=False))
    private(model).train(steps=1)


def test_a_model_that_is_halved_later_is_refused() -> None:
    loop = private()
    _, inputs, _ = first_batch(loop)
    loop.plain_model.bfloat16()
    with pytest.raises(MisuseError, match="a model in half precision"):
        loop.model(inputs.bfloat16())
    loop.plain_model.double()
    loop.train(steps=1)
