"""Gradients whose terms all but cancel: a contribution is as long as its norm says, however little is left of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dpis.gradients import tape as tape_module
from dpis.gradients.factors import Dense, Factor, Lookup, Outer, Sum
from dpis.gradients.factors.correlation import Correlation, convolution_factor
from dpis.gradients.factors.geometry import Geometry
from dpis.gradients.factors.outer import smallest
from dpis.gradients.factors.phases import Phases
from dpis.gradients.parts import Part, Place
from dpis.gradients.tape import Tape

RECORDS = 4
MOST = 1.001
LEFT = 0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2
"""What single positions are off by from cancelling, relative to themselves."""


def alike(positions: int, features: int) -> Tensor:
    """Inputs that are the same at every position."""
    return torch.randn(RECORDS, 1, features).expand(-1, positions, -1).clone()


def undone(positions: int, features: int, left: float) -> Tensor:
    """Output gradients of one sign, then of the other: sums grow as far as they can before they cancel."""
    first = torch.rand(RECORDS, positions // 2, features, dtype=torch.float64) + 0.5
    return torch.cat([first, -first.flip(1) + left * torch.randn_like(first)], dim=1).float()


def outer(positions: int, inputs: int, outputs: int, left: float) -> Outer:
    return Outer(alike(positions, inputs), undone(positions, outputs, left))


def images(positions: Tensor) -> Tensor:
    side = round(positions.shape[1] ** 0.5)
    return positions.mT.reshape(RECORDS, -1, side, side).contiguous()


def geometry(stride: int = 1, padding: int = 0) -> Geometry:
    return Geometry(
        kernel=(3, 3), stride=(stride,) * 2, padding=(padding,) * 2, dilation=(1, 1), groups=1
    )


def convolution(
    make: Callable[[Tensor, Tensor, Geometry], Factor],
    sizes: tuple[int, int],
    channels: tuple[int, int],
    left: float,
    stride: int = 1,
) -> Factor:
    seen, sent = (size**2 for size in sizes)
    inputs, grads = images(alike(seen, channels[0])), images(undone(sent, channels[1], left))
    return make(inputs, grads, geometry(stride, padding=int(stride > 1)))


def by_phases(inputs: Tensor, grads: Tensor, geometry: Geometry) -> Factor:
    return Phases.of(inputs, geometry).gradients(grads)


def tied(positions: int, left: float) -> Sum:
    """A table and an output layer that share their weights, and undo each other."""
    words = torch.randint(0, 5, (RECORDS, positions))
    grads = torch.randn(RECORDS, positions, 16, dtype=torch.float64)
    other = grads + left * torch.randn_like(grads)
    return Sum((Lookup(words, grads.float(), 5), Outer(other.float(), -one_hot(words, 5).float())))


KINDS: dict[str, Callable[[float], Factor]] = {
    "outer-gram": lambda left: outer(8, 70, 90, left),
    "outer-gram-long": lambda left: outer(300, 700, 700, left),
    "outer-explicit": lambda left: outer(600, 3, 5, left),
    "outer-kept": lambda left: smallest(outer(600, 3, 5, left)),
    "lookup": lambda left: Lookup(
        torch.zeros(RECORDS, 60, dtype=torch.int64), undone(60, 16, left), 5
    ),
    "lookup-long": lambda left: Lookup(
        torch.zeros(RECORDS, 4000, dtype=torch.int64), undone(4000, 16, left), 5
    ),
    "sum-tied": lambda left: tied(6, left),
    "sum-tied-long": lambda left: tied(60, left),
    "sum-with-table": lambda left: Sum(
        (Lookup(torch.zeros(RECORDS, 1, dtype=torch.int64), torch.zeros(RECORDS, 1, 16), 5),
         outer(60, 16, 5, left))
    ),
    "sum-with-dense": lambda left: Sum(
        (Dense(torch.zeros(RECORDS, 5, 16)), outer(60, 16, 5, left))
    ),
    "convolution-gram": lambda left: convolution(Correlation, (8, 6), (64, 64), left),
    "convolution-explicit": lambda left: convolution(Correlation, (20, 18), (2, 3), left),
    "convolution-by-element": lambda left: convolution(Correlation, (20, 18), (12, 6), left),
    "convolution-kept": lambda left: convolution(convolution_factor, (20, 18), (2, 3), left),
    "convolution-phases": lambda left: convolution(by_phases, (8, 4), (81, 16), left, stride=2),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


def longest_contribution(kind: str) -> float:
    """Of single records, each in a sum by itself that is weighted by the inverse of its norm."""
    longest = 0.0
    for left in LEFT:
        factor = KINDS[kind](left)
        parameter = torch.zeros(factor.shape)
        parts = (Part(Place.of(parameter, parameter), factor),)
        tape = Tape({"weight": parameter}, {"weight": parts}, RECORDS)
        norms = tape.norms()
        for only in torch.diag(torch.where(norms > 0, 1 / norms, 0.0)):
            total = tape.weighted_sum(only)["weight"]
            assert total.shape == factor.shape
            longest = max(longest, float(total.double().norm()))
    return longest


@every_kind
def test_a_contribution_is_as_long_as_its_norm_says(kind: str) -> None:
    torch.manual_seed(0)
    assert 0.999 < longest_contribution(kind) <= MOST


@every_kind
def test_the_sum_of_all_is_that_of_float64(kind: str) -> None:
    """Records that are summed by themselves are not forgotten, nor counted twice."""
    torch.manual_seed(0)
    with_rest = KINDS[kind](1e-5)
    parameter = torch.zeros(with_rest.shape)
    parts = (Part(Place.of(parameter, parameter), with_rest),)
    tape, weights = (
        Tape({"w": parameter}, {"w": parts}, RECORDS),
        torch.tensor([0.5, 0.0, 2.0, 1.0]),
    )
    weights = torch.where(weights > 0, weights / tape.norms(), 0.0)
    found, exact = tape.weighted_sum(weights)["w"], with_rest.double().quick_sum(weights)
    assert (found - exact).norm() <= MOST - 1


@pytest.mark.parametrize("kind", ["outer-explicit", "convolution-explicit", "sum-with-dense"])
def test_added_up_in_float32_it_is_longer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tape_module.squared_norms_and_doubts
    monkeypatch.setattr(
        tape_module, "squared_norms_and_doubts", lambda *given: (real(*given)[0], None)
    )
    torch.manual_seed(0)
    assert longest_contribution(kind) > MOST
