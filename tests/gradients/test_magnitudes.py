"""A contribution has norm at most one, whatever the scale of inputs and gradients; sums keep it so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpis.gradients import RecordGradients
from dpis.gradients.factors import Dense, Factor, Lookup, Outer, Sum
from dpis.gradients.factors.correlation import Correlation, convolution_factor
from dpis.gradients.factors.geometry import Geometry
from dpis.gradients.factors.phases import Phases
from dpis.gradients.parts import Part, Place, without_overlap
from dpis.gradients.tape import Tape
from dpis.mechanism.contribution import contribution_weights
from dpis.mechanism.gradient_sum import GradientSum
from dpis.sampling import Draw

RECORDS = 5
MOST = 1.001


@dataclass(frozen=True)
class Scales:
    """Powers of ten for inputs and output gradients: one for each record, one for each position (modulo 3)."""

    inputs: tuple[int, ...]
    grads: tuple[int, ...]
    input_positions: tuple[int, ...] = (0, 0, 0)
    grad_positions: tuple[int, ...] = (0, 0, 0)

    def input(self, *shape: int, dim: int = 1) -> Tensor:
        return _scaled(shape, self.inputs, self.input_positions, dim)

    def grad(self, *shape: int, dim: int = 1) -> Tensor:
        return _scaled(shape, self.grads, self.grad_positions, dim)


def _scaled(
    shape: tuple[int, ...], records: tuple[int, ...], places: tuple[int, ...], dim: int
) -> Tensor:
    by_place = [places[place % 3] for place in range(shape[dim])]
    powers = torch.tensor(records)[:, None] + torch.tensor(by_place)
    powers = powers.clamp(-30, 30)
    factors = 10.0 ** powers.double()
    whole = factors.view(len(records), *(shape[d] if d == dim else 1 for d in range(1, len(shape))))
    return (torch.randn(shape, dtype=torch.float64) * whole).float()


exponents = st.integers(-30, 30)
by_record = st.lists(exponents, min_size=RECORDS, max_size=RECORDS).map(tuple)
by_place = st.one_of(st.just((0, 0, 0)), st.tuples(exponents, exponents, exponents))
scales = st.builds(Scales, by_record, by_record, by_place, by_place)
opposite = st.builds(  # ordinary gradients from huge and tiny factors
    lambda inputs, places: Scales(
        inputs, tuple(-e for e in inputs), places, tuple(-e for e in places)
    ),
    by_record,
    by_place,
)
at_the_edge = st.lists(st.integers(14, 19), min_size=RECORDS, max_size=RECORDS).map(tuple)
below_the_edge = st.lists(st.integers(-25, -18), min_size=RECORDS, max_size=RECORDS).map(tuple)
edge = st.one_of(
    st.builds(Scales, at_the_edge, below_the_edge), st.builds(Scales, below_the_edge, at_the_edge)
)


def geometry(kernel: int, stride: int = 1, padding: int = 0, groups: int = 1) -> Geometry:
    return Geometry(
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(padding, padding),
        dilation=(1, 1),
        groups=groups,
    )


def convolution(
    s: Scales, make: Callable[..., Factor], channels: tuple[int, int], size: int, g: Geometry
) -> Factor:
    out = (size + 2 * g.padding[0] - g.kernel[0]) // g.stride[0] + 1
    inputs = s.input(RECORDS, channels[0], size, size, dim=3)
    return make(inputs, s.grad(RECORDS, channels[1], out, out, dim=3), g)


def phases(inputs: Tensor, output_grads: Tensor, g: Geometry) -> Factor:
    return Phases.of(inputs, g).gradients(output_grads)


def lookup(s: Scales, positions: int) -> Lookup:
    return Lookup(torch.randint(0, 5, (RECORDS, positions)), s.grad(RECORDS, positions, 3), 5)


def outer(s: Scales, positions: int, inputs: int, outputs: int) -> Outer:
    return Outer(s.input(RECORDS, positions, inputs), s.grad(RECORDS, positions, outputs))


KINDS: dict[str, Callable[[Scales], Factor]] = {
    "dense": lambda s: Dense(s.grad(RECORDS, 3000)),
    "outer-one-position": lambda s: outer(s, 1, 40, 1100),
    "outer-gram": lambda s: outer(s, 6, 40, 50),
    "outer-explicit": lambda s: outer(s, 20, 3, 5),
    "outer-folded": lambda s: Outer(
        s.input(RECORDS, 6, 40).view(3 * RECORDS, 2, 40),
        s.grad(RECORDS, 6, 50).view(3 * RECORDS, 2, 50),
    ).fold(3),
    "lookup-one-position": lambda s: lookup(s, 1),
    "lookup-gram": lambda s: lookup(s, 6),
    "lookup-many": lambda s: lookup(s, 130),
    "convolution-gram": lambda s: convolution(
        s, Correlation, (32, 32), 5, geometry(3, stride=2, padding=1)
    ),
    "convolution-gram-groups": lambda s: convolution(
        s, Correlation, (64, 64), 4, geometry(3, padding=1, groups=2)
    ),
    "convolution-explicit": lambda s: convolution(s, Correlation, (2, 3), 8, geometry(3)),
    "convolution-by-element": lambda s: convolution(s, Correlation, (12, 3), 12, geometry(2)),
    "convolution-kept": lambda s: convolution(s, convolution_factor, (2, 3), 8, geometry(3)),
    "convolution-phases": lambda s: convolution(
        s, phases, (64, 4), 5, geometry(3, stride=2, padding=1)
    ),
    "sum-of-kinds": lambda s: Sum((lookup(s, 4), outer(s, 2, 3, 5))),
    "sum-of-others": lambda s: Sum((Dense(s.grad(RECORDS, 5, 3)), outer(s, 2, 3, 5))),
}


every_kind = pytest.mark.parametrize("kind", KINDS)


def weights_of(norms: Tensor, how: str, clip_norm: float) -> Tensor:
    uniforms = (
        torch.full_like(norms, 1e-12) if how == "reject" else None
    )  # every record is accepted
    importance = torch.full_like(norms, 0.05 * clip_norm)
    return contribution_weights(norms, importance, clip_norm=clip_norm, how=how, uniforms=uniforms)


def largest_contribution(factor: Factor, how: str, clip_norm: float) -> float:
    """Of a single record, as it is made, in a sum by itself.

    Another parameter has a tiny gradient, just enough to count: a norm that is lost here does not save the record.
    """
    squares = factor.squared_norms() + (2e-8 * clip_norm) ** 2
    weights = weights_of(squares.sqrt(), how, clip_norm)
    made = [factor.weighted_sum(only).double() for only in torch.diag(weights)]
    return max(_norm(total) for total in made)


def _norm(total: Tensor) -> float:
    """Not finite is worst of all."""
    assert bool(total.isfinite().all())
    return float(total.norm())


def check_contributions(kind: str, of: Scales, seed: int, how: str, clip_norm: float) -> None:
    torch.manual_seed(seed)
    factor = KINDS[kind](of)
    assert largest_contribution(factor, how, clip_norm) <= MOST


EXAMPLES = 15
HUGE = (19, -25, 30, 0, 12)
STEEP = (0, -25, 25)
LARGE, SMALL = (
    (18, 17, 16, 18, 15),
    (-22, -22, -23, -24, -20),
)  # squares that float32 holds, and does not
cases = {
    "of": st.one_of(scales, opposite, edge),
    "seed": st.integers(0, 2**16),
    "how": st.sampled_from(["weight", "reject"]),
    "clip_norm": st.sampled_from([1.0, 1e-3, 1e3]),
}


def each(max_examples: int) -> Callable[[Any], Any]:
    def decorate(test: Any) -> Any:
        negative = tuple(-e for e in HUGE)
        for of in (
            Scales(HUGE, negative),
            Scales((0,) * RECORDS, (-23,) * RECORDS),
            Scales(LARGE, SMALL),
            Scales(SMALL, LARGE),
            Scales(LARGE, SMALL, (0, -18, -19), (0, 15, 16)),
            Scales(negative, HUGE, STEEP, tuple(-e for e in STEEP)),
        ):
            test = example(of=of, seed=0, how="reject", clip_norm=1.0)(test)
        return settings(max_examples=max_examples, deadline=None)(given(**cases)(test))

    return decorate


@every_kind
@each(EXAMPLES)
def test_contributions_at_every_magnitude(
    kind: str, of: Scales, seed: int, how: str, clip_norm: float
) -> None:
    check_contributions(kind, of, seed, how, clip_norm)


@every_kind
@pytest.mark.slow
@each(600)
def test_contributions_at_many_magnitudes(
    kind: str, of: Scales, seed: int, how: str, clip_norm: float
) -> None:
    check_contributions(kind, of, seed, how, clip_norm)


@every_kind
@pytest.mark.parametrize("power", range(-30, 31, 5))
def test_norms_neither_underflow_nor_overflow(kind: str, power: int) -> None:
    """Gradients of ordinary size from huge inputs and tiny output gradients, or the reverse."""

    def squares(exponent: int) -> Tensor:
        torch.manual_seed(0)
        grads_alone = kind.startswith(("dense", "lookup"))
        inputs, grads = (exponent,) * RECORDS, (exponent if grads_alone else -exponent,) * RECORDS
        factor = KINDS[kind](Scales(inputs, grads)).squared_norms()
        return factor / 100.0**exponent if grads_alone else factor

    if kind.startswith("sum"):
        pytest.skip("its terms scale by different powers")
    torch.testing.assert_close(squares(power), squares(0), rtol=1e-3, atol=0.0)


def test_many_tiny_entries_have_a_norm() -> None:
    norm = float(Dense(torch.full((64, 4096), 2.5e-23)).squared_norms()[0].sqrt())
    assert norm == pytest.approx(1.6e-21, rel=1e-5, abs=0.0)


@pytest.mark.parametrize("kind", ["outer", "convolution"])
def test_sums_whose_scaled_side_float32_does_not_hold(kind: str) -> None:
    """A huge output gradient meets an input of zero; and a gradient so large that its weight is lost."""
    x, g = torch.ones(2, 2, 8), torch.full((2, 2, 8), 1e-9)
    x[0, 0], g[0, 0] = 0.0, 1e33
    x[1], g[1] = 1e25, 1e19
    factor: Factor = Outer(x, g)
    if kind == "convolution":
        x, g = x.mT.contiguous()[..., None], g.mT.contiguous()[..., None]
        factor = Correlation(x, g, geometry(1))
    norms = factor.squared_norms().sqrt()
    for only in torch.diag(1 / norms):
        assert _norm(factor.weighted_sum(only).double()) == pytest.approx(1.0, abs=5e-4)


def test_rows_of_zeros_and_what_is_not_finite() -> None:
    rows = torch.zeros(5, 2000)
    rows[1, 3], rows[2, 4], rows[3, 5] = 1e-30, torch.inf, torch.nan
    found = Dense(rows).squared_norms()
    assert found[0] == 0.0 == found[4]
    assert float(found[1]) == pytest.approx(1e-60, rel=1e-5, abs=0.0)
    assert not found[2:4].isfinite().any()


@every_kind
def test_norms_of_tiny_and_huge_records_do_not_depend_on_their_company(kind: str) -> None:
    torch.manual_seed(0)
    factor = KINDS[kind](Scales(HUGE, tuple(-e for e in HUGE), STEEP, STEEP))
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(
        factor.select(order).squared_norms().nan_to_num(),
        factor.squared_norms()[order].nan_to_num(),
    )


def test_terms_that_cancel_almost_completely() -> None:
    """What is left of them is rounding: the norm must not be smaller than what the sum makes of it."""
    torch.manual_seed(0)
    x, g = torch.randn(RECORDS, 1, 64), torch.randn(RECORDS, 1, 64)
    for left in (1e-3, 1e-5, 1e-7, 0.0):
        inputs = torch.cat(
            [x, x * (1 + left * torch.randn(RECORDS, 1, 64)), 1e-4 * left * x], dim=1
        )
        factor = Outer(inputs, 1e4 * torch.cat([g, -g, g], dim=1))
        assert largest_contribution(factor, "weight", 1e-3) <= MOST


def normed(layer: str) -> nn.Module:
    if layer == "layer":
        return nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    if layer == "layer-positions":
        return nn.Sequential(
            nn.Unflatten(1, (3, 2)),
            nn.Linear(2, 64),
            nn.LayerNorm(64),
            nn.Flatten(),
            nn.Linear(192, 3),
        )
    first = nn.Conv2d(1, 32, 3, padding=1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), first, nn.GroupNorm(4, 32), nn.Flatten(), nn.Linear(192, 3)
    )


@pytest.mark.parametrize("layer", ["layer", "layer-positions", "group"])
@pytest.mark.parametrize("size", [1e19, 1e16, 1e-19, 1.0])
@pytest.mark.parametrize("loss_scale", [1.0, 1e4])
def test_a_record_of_huge_inputs_moves_the_sum_by_one(
    layer: str, size: float, loss_scale: float
) -> None:
    """Behind a normalisation, huge inputs have tiny output gradients, and ordinary gradients of the weights."""
    torch.manual_seed(0)
    model, loss = normed(layer), nn.CrossEntropyLoss(reduction="none")
    gradients = RecordGradients(
        model, objective=lambda m, b: loss_scale * loss(m(b[0]), b[1]), chunk=32, check=False
    )
    inputs, targets = torch.randn(20, 6), torch.arange(20) % 3
    inputs[0] *= size

    def total(first: int) -> Tensor:
        weigh = lambda norms, _: weights_of(norms, "weight", 0.1)  # noqa: E731
        sums = gradients((inputs[first:], targets[first:]), weigh).sums
        return torch.cat([value.double().flatten() for value in sums.values()])

    moved = float((total(0) - total(1)).norm())
    assert moved <= MOST
    if loss_scale > 1.0:  # ordinary gradients: they count
        assert moved > 0.9


BLOCK_RECORDS = 40_000
NOBODY = Draw(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))


def aligned_contributions(kind: str, records: int) -> Factor:
    """All records point the same way."""
    torch.manual_seed(1)
    x, g = torch.rand(2, 1, 1, 16) + 0.5
    if kind == "dense":
        return Dense((x * g.mT).expand(records, 16, 16).contiguous())
    if kind == "lookup":
        return Lookup(torch.zeros(records, 2, dtype=torch.int64), g.repeat(records, 2, 1), 3)
    if kind in ("kernels", "convolution"):
        make = Correlation if kind == "convolution" else convolution_factor
        inputs = x.view(1, 4, 2, 2).repeat(records, 1, 1, 1)
        return make(inputs, g.view(1, 16, 1, 1).repeat(records, 1, 1, 1), geometry(2))
    positions = {"outer": 1, "outer-positions": 3}[kind]
    return Outer(x.repeat(records, positions, 1), g.repeat(records, positions, 1))


ALIGNED = ["dense", "lookup", "kernels", "convolution", "outer", "outer-positions"]


def error_of_one_more(kind: str, records: int, added: int) -> float:
    """By how much one record moves the sum, beyond what it adds by itself."""
    factor = aligned_contributions(kind, records)
    weights = factor.squared_norms().rsqrt() * (
        0.9 + 0.1 * torch.rand(records, dtype=torch.float64)
    )
    alone, without = torch.zeros_like(weights), weights.clone()
    alone[added], without[added] = weights[added], 0.0
    whole, rest, own = (factor.weighted_sum(w).double() for w in (weights, without, alone))
    return float((whole - rest - own).norm())


@pytest.mark.parametrize("kind", ALIGNED)
@pytest.mark.parametrize("records", [512, 30_000, BLOCK_RECORDS])
def test_one_record_among_many_moves_the_sum_by_one(kind: str, records: int) -> None:
    for added in (0, records // 3, records - 1):
        assert error_of_one_more(kind, records, added) < 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALIGNED)
def test_one_record_among_half_a_million_moves_the_sum_by_one(kind: str) -> None:
    """It moved by 1.146 in one sum of float32."""
    for added in (0, 200_000):
        assert error_of_one_more(kind, 524_288, added) < 5e-4


def _tape(records: int) -> Tape:
    parameter = torch.zeros(16, 16)
    place = Place.of(parameter, parameter)
    parts = without_overlap([Part(place, aligned_contributions("outer", records))], parameter)
    return Tape({"w": parameter}, {"w": parts}, records)


def test_one_record_more_in_a_physical_batch_of_the_drop_in() -> None:
    """It comes first in the second of two tapes, and all others are where they were."""
    torch.manual_seed(0)
    sizes = 0.9 + 0.1 * torch.rand(2 * BLOCK_RECORDS, dtype=torch.float64)

    def total(*weights: Tensor) -> Tensor:
        summed = GradientSum(NOBODY, {"w": torch.zeros(16, 16)})
        for own in weights:
            tape = _tape(len(own))
            summed.add(tape.norms(), tape.weighted_sums(own / tape.norms()))
        return summed.take()["w"]

    first, second = sizes.split(BLOCK_RECORDS)
    more = torch.cat([torch.ones(1).double(), second])
    alone = total(torch.ones(1).double())
    assert float((total(first, more) - total(first, second) - alone).norm()) < 5e-4


def test_one_record_more_among_many_chunks() -> None:
    """`RecordGradients` adds chunks up: one record in front moves the sum by what it adds."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    gradients = RecordGradients(
        model, objective=lambda m, b: m(b[0]).sum(1) * b[1], chunk=512, check=False
    )
    records = 60_000
    batch = (torch.rand(8) + 0.5).repeat(records, 1), 1 + torch.rand(records)
    sizes = 0.9 + 0.1 * torch.rand(records, dtype=torch.float64)

    def total(first: int, last: int) -> Tensor:
        weigh = lambda norms, places: sizes[first + places] / norms  # noqa: E731
        return (
            gradients((batch[0][first:last], batch[1][first:last]), weigh).sums["weight"].double()
        )

    assert float((total(0, records) - total(1, records) - total(0, 1)).norm()) < 5e-4
