"""The comparison with plain autograd: what is rounding, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpis.errors import GradientError
from dpis.gradients import RecordGradients, SlowGradientsWarning
from dpis.gradients.tape import Tape


def labelled(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.arange(count) % 4


def ones(norms: Tensor, _: Tensor) -> Tensor:
    return torch.ones_like(norms)


class Rounding(nn.Module):
    """One record by itself is computed a little otherwise, as where rounding decides which of two maxima is taken.

    Args:
        everywhere: in float64 too, so that it is no rounding.
    """

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.linear, self.everywhere = nn.Linear(6, 4), everywhere

    def forward(self, x: Tensor) -> Tensor:
        alone = len(x) == 1 and (self.everywhere or x.dtype == torch.float32)
        return self.linear(x * 1.05 if alone else x)


def test_what_differs_in_float32_alone_is_rounding() -> None:
    RecordGradients(Rounding(everywhere=False), nn.CrossEntropyLoss())(labelled(8), ones)
    with pytest.warns(SlowGradientsWarning, match=r"the fast gradient differed"):
        RecordGradients(Rounding(everywhere=True), nn.CrossEntropyLoss())(labelled(8), ones)


def test_rounding_is_no_excuse_for_norms_of_other_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norms = Tape.norms
    monkeypatch.setattr(Tape, "norms", lambda tape: 0.9 * norms(tape))
    with pytest.raises(GradientError, match=r"even by torch\.func"):
        RecordGradients(Rounding(everywhere=False), nn.CrossEntropyLoss())(labelled(8), ones)
