"""Laws that every factor keeps, and norms that stay exact where sums cancel or are long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpis.gradients.factors import Dense, Factor, Lookup, Outer, norms
from dpis.gradients.factors.correlation import Correlation
from dpis.gradients.factors.geometry import Geometry
from dpis.gradients.factors.norms import quick_squares
from dpis.gradients.factors.sum import Sum, inner_products

RECORDS = 6


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def lookup(positions: int) -> Lookup:
    return Lookup(torch.randint(0, 5, (RECORDS, positions)), randn(RECORDS, positions, 3), 5)


FACTORS = {
    "dense": lambda: Dense(randn(RECORDS, 5, 3)),
    "dense-scalar": lambda: Dense(randn(RECORDS)),
    "outer-one-position": lambda: Outer(randn(RECORDS, 1, 3), randn(RECORDS, 1, 5)),
    "outer-gram": lambda: Outer(randn(RECORDS, 2, 30), randn(RECORDS, 2, 50)),
    "outer-explicit": lambda: Outer(randn(RECORDS, 20, 3), randn(RECORDS, 20, 5)),
    "lookup-one-position": lambda: lookup(1),
    "lookup": lambda: lookup(4),
    "lookup-many-positions": lambda: lookup(200),
    "sum": lambda: Sum((lookup(4), Outer(randn(RECORDS, 2, 3), randn(RECORDS, 2, 5)))),
}


@pytest.fixture(params=FACTORS.values(), ids=FACTORS.keys())
def factor(request: pytest.FixtureRequest) -> Factor:
    torch.manual_seed(0)
    return request.param()


def test_norms_are_those_of_the_gradients(factor: Factor) -> None:
    flat = factor.explicit().reshape(RECORDS, -1)
    torch.testing.assert_close(factor.squared_norms(), flat.square().sum(1))


def test_sums_are_those_of_the_gradients(factor: Factor) -> None:
    weights = randn(RECORDS)
    weights[2] = 0
    expected = torch.tensordot(weights, factor.explicit(), dims=1)
    torch.testing.assert_close(factor.weighted_sum(weights), expected)
    assert factor.weighted_sum(weights).shape == factor.shape


def test_no_weight_no_sum(factor: Factor) -> None:
    none = factor.weighted_sum(torch.zeros(RECORDS))
    assert none.shape == factor.shape
    assert not none.any()


def test_folding_adds_gradients(factor: Factor) -> None:
    expected = factor.explicit().reshape(2, 3, *factor.shape).sum(1)
    folded = factor.fold(3)
    assert folded.records == 2
    torch.testing.assert_close(folded.explicit(), expected)
    flat = expected.reshape(2, -1)
    torch.testing.assert_close(folded.squared_norms(), flat.square().sum(1))


def test_selecting_keeps_gradients(factor: Factor) -> None:
    kept = torch.tensor([4, 1])
    torch.testing.assert_close(factor.select(kept).explicit(), factor.explicit()[kept])


def test_inner_products_of_unlike_factors() -> None:
    table, product = lookup(4), Outer(randn(RECORDS, 2, 3), randn(RECORDS, 2, 5))
    expected = (table.explicit() * product.explicit()).sum((1, 2))
    torch.testing.assert_close(inner_products(table, product)[0], expected)


@pytest.mark.parametrize("offset", [0, 30, 1000])
def test_gram_norms_that_cancel(offset: float) -> None:
    """Inputs with a large mean, output gradients that sum to zero: keys of an attention, say."""
    torch.manual_seed(0)
    inputs, grads = randn(8, 8, 64) + offset, randn(8, 8, 64)
    inputs, grads = inputs.float(), (grads - grads.mean(1, keepdim=True)).float()
    exact = Outer(inputs.double(), grads.double()).explicit().flatten(1).square().sum(1)
    found = Outer(inputs, grads).squared_norms().double()
    torch.testing.assert_close(found, exact, rtol=2e-5, atol=0.0)


def law_norms_are_never_too_small(factor: Factor, exact: Tensor) -> None:
    """A norm that is too small would let a clipped gradient through that is too large."""
    found = factor.squared_norms().double()
    torch.testing.assert_close(found, exact.flatten(1).square().sum(1), rtol=5e-4, atol=0.0)


def zero_sum(*shape: int, scale: float = 1.0) -> Tensor:
    """Output gradients that nearly cancel over positions (dimension 1)."""
    values = randn(*shape)
    return values - values.mean(1, keepdim=True) + randn(*shape) / scale


@pytest.mark.parametrize("offset", [0, 30, 1000])
def test_gram_norms_of_convolutions_that_cancel(offset: float) -> None:
    torch.manual_seed(0)
    geometry = Geometry(kernel=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
    inputs = randn(4, 64, 6, 6) + offset
    grads = zero_sum(4, 16, 32, scale=1e4).mT.reshape(4, 32, 4, 4)
    inputs, grads = inputs.float(), grads.float()
    factor = Correlation(inputs, grads, geometry)
    assert factor.by_gram
    exact = Correlation(inputs.double(), grads.double(), geometry).explicit()
    law_norms_are_never_too_small(factor, exact)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_gram_norms_of_lookups_that_cancel(scale: float) -> None:
    """One row looked up at every position, with gradients that add up to little."""
    torch.manual_seed(0)
    grads = zero_sum(4, 32, 16, scale=scale).float()
    indices = torch.zeros(4, 32, dtype=torch.long)
    exact = Lookup(indices, grads.double(), 5).explicit()
    law_norms_are_never_too_small(Lookup(indices, grads, 5), exact)


@pytest.mark.parametrize("positions", [6, 60, 127, 128, 1000])
@pytest.mark.parametrize("left", [1e-5, 1e-7])
def test_a_lookup_whose_positions_cancel_is_as_long_as_its_norm_says(
    positions: int, left: float
) -> None:
    """Added up in float32, one position after the other, it was up to 3.7 times as long."""
    torch.manual_seed(0)
    half = randn(8, positions // 2, 16)
    grads = torch.cat([half, -half + left * randn(*half.shape)], dim=1).float()
    factor = Lookup(torch.zeros(grads.shape[:2], dtype=torch.long), grads, 5)
    for only in torch.diag(factor.squared_norms().rsqrt()):
        assert float(factor.weighted_sum(only).double().norm()) <= 1 + 5e-4


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_norms_of_shared_weights_that_cancel(scale: float) -> None:
    """A tied weight whose two uses nearly undo each other."""
    torch.manual_seed(0)
    indices, grads = torch.randint(0, 5, (4, 6)), randn(4, 6, 16)
    undone = -torch.nn.functional.one_hot(indices, 5).double()
    first = Lookup(indices, grads.float(), 5)
    second = Outer((grads + randn(4, 6, 16) / scale).float(), undone.float())
    doubles = Lookup(indices, first.output_grads.double(), 5).explicit() + (
        Outer(second.inputs.double(), second.output_grads.double()).explicit()
    )
    law_norms_are_never_too_small(Sum((first, second)), doubles)


def test_a_norm_that_is_left_to_cancel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "CANCELLED", 0.0)
    with pytest.raises(AssertionError):
        test_gram_norms_that_cancel(1000)


@pytest.mark.parametrize("length", [1, 1024, 1025, 3_000_001])
def test_squares_of_long_rows(length: int) -> None:
    rows = torch.rand(2, length)
    found = quick_squares(rows)
    torch.testing.assert_close(found, rows.double().square().sum(1), rtol=1e-6, atol=0.0)
