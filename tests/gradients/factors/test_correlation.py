"""The convolution factors against per-record gradients by torch.func, over one list of problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dpis.errors import CouplingError
from dpis.gradients.factors.correlation import (
    Correlation,
    convolution_factor,
    explicit_norms,
    gram_norms,
)
from dpis.gradients.factors.factor import Factor
from dpis.gradients.factors.geometry import Geometry
from dpis.gradients.factors.kernels import KernelGradients
from dpis.gradients.factors.phases import (
    PhaseGradients,
    Phases,
    channels_last,
    worth_splitting,
)
from dpis.gradients.layout import Layout
from dpis.gradients.rules.convolution import RULES
from dpis.gradients.rules.rule import Call, WatchedGradient

CONVOLUTIONS = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


@dataclass(frozen=True)
class Problem:
    """One convolution: ``sizes`` of the input image, and the settings of the torch function."""

    name: str
    sizes: tuple[int, ...]
    channels: tuple[int, int] = (3, 4)
    kernel: tuple[int, ...] = (3, 3)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def geometry(self) -> Geometry:
        def each(name: str, default: int) -> tuple[int, ...]:
            value = self.settings.get(name, default)
            return value if isinstance(value, tuple) else (value,) * len(self.kernel)

        return Geometry(
            kernel=self.kernel,
            stride=each("stride", 1),
            padding=each("padding", 0),
            dilation=each("dilation", 1),
            groups=self.settings.get("groups", 1),
        )


PROBLEMS = [
    Problem("1d", (9,), kernel=(3,)),
    Problem(
        "1d-stride-dilation-padding",
        (16,),
        (9, 4),
        (4,),
        {"stride": 3, "dilation": 2, "padding": 3},
    ),
    Problem("2d", (6, 5)),
    Problem("2d-padded", (5, 5), (9, 4), settings={"padding": 1}),
    Problem("2d-pointwise", (4, 4), (9, 5), (1, 1)),
    Problem("2d-stride-2", (7, 7), (10, 4), settings={"stride": 2, "padding": 1}),
    Problem("2d-stride-beyond-kernel", (9, 8), (9, 4), (2, 1), {"stride": 3}),
    Problem(
        "2d-everything-uneven",
        (9, 12),
        (9, 2),
        (3, 2),
        {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 3)},
    ),
    Problem("2d-groups", (6, 6), (18, 4), settings={"groups": 2, "padding": 1}),
    Problem(
        "2d-dilation-and-groups",
        (8, 8),
        (6, 4),
        settings={"groups": 2, "dilation": 2, "padding": 2},
    ),
    Problem("2d-depthwise", (6, 6), (4, 8), settings={"groups": 4, "padding": 1}),
    Problem("2d-kernel-covers-image", (4, 4), (9, 3), (4, 4)),
    Problem(
        "2d-more-padding-than-image",
        (2, 2),
        (9, 3),
        (3, 3),
        {"stride": 4, "padding": 6, "dilation": 6},
    ),
    Problem("2d-wide-kernel", (10, 10), (1, 4), (8, 8), {"stride": 2, "padding": 2}),
    Problem("3d", (4, 5, 4), (9, 3), (2, 3, 2), {"stride": (1, 2, 1), "padding": (1, 1, 0)}),
    Problem("3d-groups-dilation", (5, 5, 5), (4, 4), (2, 2, 2), {"groups": 2, "dilation": 2}),
]
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)


def tensors(
    problem: Problem, rows: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(
        rows, problem.channels[0], *problem.sizes, generator=generator, dtype=dtype
    )
    output = convolve(problem, inputs, weight(problem, dtype))
    return inputs, torch.randn(output.shape, generator=generator, dtype=dtype)


def weight(problem: Problem, dtype: torch.dtype) -> Tensor:
    groups = problem.settings.get("groups", 1)
    return torch.zeros(problem.channels[1], problem.channels[0] // groups, *problem.kernel).to(
        dtype
    )


def convolve(problem: Problem, inputs: Tensor, weights: Tensor) -> Tensor:
    return CONVOLUTIONS[len(problem.kernel)](inputs, weights, **problem.settings)


def oracle(problem: Problem, inputs: Tensor, output_grads: Tensor, rows: int = 1) -> Tensor:
    """Every record's gradient, by torch.func."""

    def loss(weights: Tensor, inputs: Tensor, output_grads: Tensor) -> Tensor:
        return (convolve(problem, inputs, weights) * output_grads).sum()

    per_record = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    start = weight(problem, inputs.dtype)
    return per_record(
        start,
        inputs.view(-1, rows, *inputs.shape[1:]),
        output_grads.view(-1, rows, *output_grads.shape[1:]),
    )


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def keeping_activations(inputs: Tensor, output_grads: Tensor, geometry: Geometry) -> Factor:
    return Correlation(inputs, output_grads, geometry)


def keeping_gradients(inputs: Tensor, output_grads: Tensor, geometry: Geometry) -> Factor:
    kept = Correlation(inputs, output_grads, geometry).channels_last_gradients()
    return KernelGradients(kept)


def keeping_phases(inputs: Tensor, output_grads: Tensor, geometry: Geometry) -> Factor:
    if geometry.groups > 1:
        pytest.skip("groups are not split into phases")
    if inputs.dtype == torch.bfloat16:
        pytest.skip("half precision is left to the convolution kernels")
    return Phases.of(inputs, geometry).gradients(output_grads)


every_factor = pytest.mark.parametrize(
    "make",
    [keeping_activations, keeping_gradients, keeping_phases, convolution_factor],
    ids=lambda make: make.__name__,
)
MakeFactor = Callable[[Tensor, Tensor, Geometry], Factor]


@every_factor
@every_problem
class TestAgainstOracle:
    @pytest.mark.parametrize("rows", [1, 3], ids=["one-row", "three-rows"])
    def test_norms_and_gradients(self, problem: Problem, make: MakeFactor, rows: int) -> None:
        inputs, output_grads = tensors(problem)
        expected = oracle(problem, inputs, output_grads, rows)
        factor = make(inputs, output_grads, problem.geometry).fold(rows)
        assert factor.records == 6 // rows
        assert factor.shape == expected.shape[1:]
        assert relative(factor.explicit(), expected) < 1e-12
        assert relative(factor.squared_norms(), expected.flatten(1).square().sum(1)) < 1e-12

    @pytest.mark.parametrize("rows", [1, 2], ids=["one-row", "two-rows"])
    def test_weighted_sum_with_some_zeros(
        self, problem: Problem, make: MakeFactor, rows: int
    ) -> None:
        inputs, output_grads = tensors(problem)
        weights = torch.tensor([0.5, 0.0, -2.0, 1.0, 0.0, 3.0], dtype=torch.float64)[: 6 // rows]
        expected = torch.tensordot(weights, oracle(problem, inputs, output_grads, rows), dims=1)
        factor = make(inputs, output_grads, problem.geometry).fold(rows)
        assert relative(factor.weighted_sum(weights), expected) < 1e-12

    def test_float32(self, problem: Problem, make: MakeFactor) -> None:
        inputs, output_grads = tensors(problem, dtype=torch.float32)
        expected = oracle(problem, inputs.double(), output_grads.double())
        factor = make(inputs, output_grads, problem.geometry)
        weights = torch.linspace(0.1, 1.0, 6)
        summed = torch.tensordot(weights.double(), expected, dims=1)
        assert relative(factor.squared_norms(), expected.flatten(1).square().sum(1)) < 1e-5
        assert relative(factor.weighted_sum(weights), summed) < 1e-5

    def test_selected_records(self, problem: Problem, make: MakeFactor) -> None:
        inputs, output_grads = tensors(problem)
        kept = torch.tensor([2, 0])
        factor = make(inputs, output_grads, problem.geometry).fold(2)
        assert relative(factor.select(kept).explicit(), factor.explicit()[kept]) < 1e-12


@every_problem
def test_both_ways_to_the_norms_agree(problem: Problem) -> None:
    inputs, output_grads = tensors(problem)
    factor = Correlation(inputs, output_grads, problem.geometry, rows=2)
    ways = [
        lambda *given: gram_norms(*given)[:, :2],
        explicit_norms,
    ]
    by_gram, by_kernels = (factor._over_groups(way).view(3, -1, 2).sum(1) for way in ways)
    assert relative(by_gram, by_kernels) < 1e-12  # norms, and what single positions would give


@every_factor
class TestEdges:
    problem = PROBLEMS[5]

    def test_no_records(self, make: MakeFactor) -> None:
        inputs, output_grads = tensors(self.problem, rows=0)
        factor = make(inputs, output_grads, self.problem.geometry)
        assert factor.squared_norms().shape == (0,)
        assert factor.explicit().shape == (0, *factor.shape)
        nothing = factor.weighted_sum(torch.zeros(0, dtype=torch.float64))
        assert nothing.shape == factor.shape
        assert not nothing.any()

    def test_one_record(self, make: MakeFactor) -> None:
        inputs, output_grads = tensors(self.problem, rows=1)
        expected = oracle(self.problem, inputs, output_grads)
        factor = make(inputs, output_grads, self.problem.geometry)
        assert relative(factor.explicit(), expected) < 1e-12

    def test_all_weights_zero(self, make: MakeFactor) -> None:
        factor = make(*tensors(self.problem), self.problem.geometry)
        nothing = factor.weighted_sum(torch.zeros(6, dtype=torch.float64))
        assert nothing.shape == factor.shape
        assert not nothing.any()

    def test_half_precision_is_widened(self, make: MakeFactor) -> None:
        inputs, output_grads = tensors(self.problem, dtype=torch.bfloat16)
        expected = oracle(self.problem, inputs.double(), output_grads.double())
        factor = make(inputs, output_grads, self.problem.geometry)
        assert relative(factor.squared_norms(), expected.flatten(1).square().sum(1)) < 1e-5
        summed = factor.weighted_sum(torch.ones(6))
        assert summed.dtype == torch.float32
        assert relative(summed, expected.sum(0)) < 1e-5

    def test_channels_last_inputs(self, make: MakeFactor) -> None:
        inputs, output_grads = tensors(self.problem)
        expected = oracle(self.problem, inputs, output_grads)
        last = [
            each.contiguous(memory_format=torch.channels_last) for each in (inputs, output_grads)
        ]
        factor = make(*last, self.problem.geometry)
        assert relative(factor.squared_norms(), expected.flatten(1).square().sum(1)) < 1e-12


SHAPES = [
    Problem("gram", (7, 7), (81, 16), settings={"stride": 2, "padding": 1}),
    Problem("gram-odd-channels-out", (3, 3), (27, 33), settings={"padding": 1}),
    Problem("gram-in-blocks", (8, 8), (243, 17), settings={"padding": 1}),
    Problem("kernels", (20, 20), (16, 9), settings={"padding": 1}),
    Problem("kernels-odd-channels", (15, 15), (9, 5), settings={"padding": 1}),
    Problem("unfolded", (20, 20), (3, 16), settings={"padding": 1}),
    Problem("several-blocks", (32, 32), (32, 16), settings={"padding": 1}),
]


@pytest.mark.parametrize("problem", SHAPES, ids=lambda problem: problem.name)
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
def test_a_norm_does_not_depend_on_the_neighbours(problem: Problem, last: bool) -> None:
    inputs, output_grads = tensors(problem, rows=37, dtype=torch.float32)
    layout = torch.channels_last if last else torch.contiguous_format

    def norms(order: Tensor) -> Tensor:
        chosen = (each[order].contiguous(memory_format=layout) for each in (inputs, output_grads))
        return convolution_factor(*chosen, problem.geometry).squared_norms()

    at_home = norms(torch.arange(37))
    for seed in range(3):
        moved = torch.randperm(37, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(norms(moved), at_home[moved])
        beside_others = torch.where(torch.arange(37) % 5 == seed, torch.arange(37), moved)
        stayed = torch.arange(37)[torch.arange(37) % 5 == seed]
        assert torch.equal(norms(beside_others)[stayed], at_home[stayed])


FEW_OUTPUTS = [
    Problem("scatter", (7, 7), (81, 16), settings={"stride": 2, "padding": 1}),
    Problem("odd-channels-out", (6, 6), (45, 3), settings={"stride": 2}),
    Problem("unit-stride", (5, 5), (50, 5), settings={"padding": 1}),
    Problem("not-square", (9, 6), (33, 4), (3, 2), {"stride": (2, 3), "padding": (1, 0)}),
]


@pytest.mark.parametrize("problem", FEW_OUTPUTS, ids=lambda problem: problem.name)
class TestByPhases:
    """Many channels, few outputs: the forward pass, norms and sums all from the inputs split into phases."""

    def test_norms_and_outputs_do_not_depend_on_the_neighbours(self, problem: Problem) -> None:
        inputs, output_grads = tensors(problem, rows=64, dtype=torch.float32)
        kernel = torch.randn_like(weight(problem, torch.float32))
        assert worth_splitting(inputs, kernel, problem.geometry)

        def found(order: Tensor) -> tuple[Tensor, Tensor]:
            phases = Phases.of(inputs[order], problem.geometry)
            norms = phases.gradients(output_grads[order]).squared_norms()
            return phases.convolved(kernel, None), norms

        at_home = found(torch.arange(64))
        for seed in range(5):
            moved = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
            for there, here in zip(found(moved), at_home, strict=True):
                assert torch.equal(there, here[moved])

    def test_the_convolution_and_its_gradients_are_those_of_torch(self, problem: Problem) -> None:
        inputs, output_grads = tensors(problem)
        kernel = torch.randn_like(weight(problem, torch.float64)).requires_grad_()
        bias = torch.randn(problem.channels[1], dtype=torch.float64, requires_grad=True)
        ways = (
            Phases.of(inputs, problem.geometry).convolved(kernel, bias),
            CONVOLUTIONS[2](inputs, kernel, bias, **problem.settings),
        )
        assert relative(*ways) < 1e-12
        ours, theirs = (torch.autograd.grad(way, (kernel, bias), output_grads) for way in ways)
        for found, expected in zip(ours, theirs, strict=True):
            assert relative(found, expected) < 1e-12

    def test_the_rule_takes_this_way(self, problem: Problem) -> None:
        settings = {"padding": 0, **problem.settings}
        layer = torch.nn.Conv2d(*problem.channels, problem.kernel, **settings)
        call = call_of(layer, torch.randn(4, problem.channels[0], *problem.sizes))
        ran = RULES[call.function].run(call)
        factors = RULES[call.function].factors(ran.saved, [WatchedGradient(ran.result, Layout(0))])
        assert isinstance(dict(factors)[layer.weight], PhaseGradients)

    def test_rows_of_a_record_may_lie_apart(self, problem: Problem) -> None:
        """Two rows a record, ``[row, record]`` in one dimension."""
        settings = {"padding": 0, **problem.settings}
        layer = torch.nn.Conv2d(*problem.channels, problem.kernel, **settings).double()
        inputs = torch.randn(6, problem.channels[0], *problem.sizes, dtype=torch.float64)
        call = call_of(layer, inputs)
        ran = RULES[call.function].run(call)
        grads = torch.randn_like(ran.result)
        apart = Layout(0, per_record=2, record_major=False)
        found = dict(RULES[call.function].factors(ran.saved, [WatchedGradient(grads, apart)]))[
            layer.weight
        ]
        together = [0, 3, 1, 4, 2, 5]
        expected = oracle(problem, inputs[together], grads[together], rows=2)
        assert relative(found.fold(2).explicit(), expected) < 1e-12


def test_channels_last_is_the_same_whatever_the_way() -> None:
    for sizes in ((7, 7), (7, 5), (1, 1)):
        images = torch.randn(3, 10, *sizes)
        last = channels_last(images)
        assert torch.equal(last, images)
        assert last.is_contiguous(memory_format=torch.channels_last)


def test_the_choice_follows_the_sizes() -> None:
    few_positions = tensors(Problem("", (4, 4), (16, 32), settings={"padding": 1}))
    many_positions = tensors(Problem("", (32, 32), (4, 4), settings={"padding": 1}))
    padded = Geometry(kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    assert isinstance(convolution_factor(*few_positions, padded), Correlation)
    assert isinstance(convolution_factor(*many_positions, padded), KernelGradients)


def call_of(layer: torch.nn.Module, inputs: Tensor) -> Call:
    """The call of the torch function that the layer ends in."""
    seen: list[Call] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function in RULES:
                seen.append(Call(function, args, kwargs or {}, tuple(layer.parameters())))
            return function(*args, **(kwargs or {}))

    with Watch():
        layer(inputs)
    return seen[0]


LAYERS = {
    "same": (torch.nn.Conv2d(3, 4, 3, padding="same"), (3, 6, 5)),
    "same-uneven": (torch.nn.Conv2d(3, 4, (2, 4), padding="same", dilation=(3, 1)), (3, 7, 8)),
    "valid": (torch.nn.Conv1d(3, 4, 3, padding="valid"), (3, 9)),
    "reflect": (torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (3, 5, 5)),
    "circular-stride": (
        torch.nn.Conv1d(3, 4, 3, padding=2, stride=2, padding_mode="circular"),
        (3, 8),
    ),
    "replicate-3d": (
        torch.nn.Conv3d(2, 4, 2, padding=1, padding_mode="replicate", groups=2),
        (2, 3, 4, 3),
    ),
    "by-phases": (torch.nn.Conv2d(41, 4, 3, stride=2, padding=1), (41, 7, 7)),
    "by-phases-same": (torch.nn.Conv2d(80, 4, (2, 4), padding="same"), (80, 4, 5)),
    "channels-last-data": (torch.nn.Conv2d(17, 4, 3, stride=2, padding=1), (17, 7, 7)),
    "no-bias": (torch.nn.Conv2d(3, 4, 3, bias=False), (3, 5, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_the_rule_gives_every_parameter_its_factor(name: str) -> None:
    layer, shape = LAYERS[name]
    layer = layer.double()
    inputs = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).double()
    call = call_of(layer, inputs)
    rule = RULES[call.function]
    assert rule.accepts(call)
    ran = rule.run(call)
    assert torch.allclose(ran.result, layer(inputs), atol=1e-12)
    assert ran.result.is_contiguous()
    (grad,) = torch.autograd.grad(ran.result.sin().sum(), ran.watched)
    factors = list(rule.factors(ran.saved, [WatchedGradient(grad, Layout(0))]))
    assert len(factors) == len(list(layer.parameters()))
    for parameter, factor in factors:
        for record in range(5):
            loss = layer(inputs[record : record + 1]).sin().sum()
            (expected,) = torch.autograd.grad(loss, parameter)
            assert relative(factor.explicit()[record], expected) < 1e-10


def test_an_unbatched_image_has_no_rule() -> None:
    layer = torch.nn.Conv2d(3, 4, 3)
    call = call_of(layer, torch.randn(3, 6, 6))
    assert not RULES[call.function].accepts(call)


def test_records_among_positions_are_refused() -> None:
    layer = torch.nn.Conv1d(3, 4, 1)
    call = call_of(layer, torch.randn(1, 3, 6))
    among_positions = WatchedGradient(torch.randn(1, 4, 6), Layout(2))
    with pytest.raises(CouplingError, match=r"\[records, channels, \.\.\.\]"):
        list(RULES[call.function].factors(call, [among_positions]))
