"""The recurrent rules against autograd, one record at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dpis.errors import GradientError
from dpis.gradients.factors import Dense, Outer
from dpis.gradients.rules.recurrent import RULES, layer
from dpis.gradients.rules.rule import Call
from tests.gradients.rules.recurrent_problems import (
    FEATURES,
    HIDDEN,
    PROBLEMS,
    Batch,
    Problem,
    fast_gradients,
    slow_gradients,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative to the size of the whole tensor."""
    assert found.shape == expected.shape
    assert found.dtype == dtype
    error = (found.double() - expected).norm()
    assert error <= TOLERANCE[dtype] * expected.norm(), f"relative error {error / expected.norm()}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@each_problem
def test_agrees_with_autograd(problem: Problem, dtype: torch.dtype) -> None:
    module, batch = problem.make()
    slow = slow_gradients(module, batch)
    fast = fast_gradients(module.to(dtype), batch, dtype)
    assert_close(fast.losses, slow.losses, dtype)
    assert_close(fast.inputs, slow.inputs, dtype)
    for found, expected in zip(fast.state, slow.state, strict=True):
        assert_close(found, expected, dtype)
    weights = torch.linspace(-1, 2, problem.records, dtype=torch.float64)
    weights[0] = 0
    assert fast.factors.keys() == slow.parameters.keys()
    for name, factors in fast.factors.items():
        expected = slow.parameters[name]
        assert_close(sum(factor.explicit() for factor in factors), expected, dtype)
        total = sum(factor.weighted_sum(weights.to(dtype)) for factor in factors)
        assert_close(total, torch.tensordot(weights, expected, 1), dtype)
        for factor in factors if len(factors) == 1 else ():
            squares = factor.squared_norms()
            assert squares.dtype == torch.float64
            assert_close(squares.to(dtype), expected.flatten(1).square().sum(1), dtype)


@each_problem
def test_does_not_depend_on_the_blocks(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = problem.make()
    whole = fast_gradients(module, batch)
    monkeypatch.setattr(layer, "BLOCK_BYTES", 1000)  # two steps or so
    cut = fast_gradients(module, batch)
    assert_close(cut.inputs, whole.inputs, torch.float64)
    for name, factors in cut.factors.items():
        for factor, expected in zip(factors, whole.factors[name], strict=True):
            assert_close(factor.explicit(), expected.explicit(), torch.float64)


def test_small_weights_are_multiplied_out_and_large_ones_are_not() -> None:
    small, batch = Problem("lstm", partial(nn.LSTM, FEATURES, HIDDEN), steps=9).make()
    assert all(isinstance(f, Dense) for (f,) in fast_gradients(small, batch).factors.values())
    large = nn.LSTM(FEATURES, 30).double()
    (factor,) = fast_gradients(large, batch).factors["weight_hh_l0"]
    assert isinstance(factor, Outer)
    (bias,) = fast_gradients(large, batch).factors["bias_hh_l0"]
    assert isinstance(bias, Dense)


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=lambda problem: problem.name)
def test_an_empty_batch(problem: Problem) -> None:
    module, batch = problem.make()
    fast = fast_gradients(module, Batch(batch.inputs[:0]))
    for name, parameter in module.named_parameters():
        (factor,) = fast.factors[name]
        assert factor.squared_norms().shape == (0,)
        assert torch.equal(factor.weighted_sum(torch.zeros(0)), torch.zeros_like(parameter))


def test_frozen_weights_get_no_factor() -> None:
    module = nn.LSTM(FEATURES, HIDDEN, num_layers=2).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in ("weight_ih_l1", "bias_hh_l1"))
    fast = fast_gradients(module, Batch(torch.randn(3, 5, FEATURES, dtype=torch.float64)))
    assert fast.factors.keys() == {"weight_ih_l1", "bias_hh_l1"}


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_norm_is_the_same_whoever_shares_the_chunk(make: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    module = make(16, 16, num_layers=2, bidirectional=True, batch_first=True)
    inputs = torch.randn(32, 10, 16)
    others = torch.randn(32, 10, 16)
    others[5] = inputs[5]
    order = torch.randperm(32)

    def norms(inputs: Tensor) -> Tensor:
        factors = fast_gradients(module, Batch(inputs), torch.float32).factors.values()
        return torch.stack([factor.squared_norms() for (factor,) in factors])

    alone = norms(inputs)
    assert torch.equal(norms(others)[:, 5], alone[:, 5])
    assert torch.equal(norms(inputs[order]), alone[:, order])


def test_dropout_between_layers() -> None:
    inputs = torch.randn(3, 5, FEATURES, dtype=torch.float64)
    module = nn.LSTM(FEATURES, HIDDEN, num_layers=2, dropout=1.0).double()
    fast, slow = fast_gradients(module, Batch(inputs)), slow_gradients(module, Batch(inputs))
    for name, expected in slow.parameters.items():
        torch.testing.assert_close(fast.factors[name][0].explicit(), expected)
    module.dropout = 0.5
    random = [fast_gradients(module, Batch(inputs)).losses for _ in range(2)]
    assert not torch.equal(*random)
    module.eval()
    evaluated = fast_gradients(module, Batch(inputs)).losses
    assert_close(evaluated, slow_gradients(module, Batch(inputs)).losses, torch.float64)


def test_inputs_may_change_after_the_forward_pass() -> None:
    """What the factors need is copied, so nothing has to be held."""
    module = nn.LSTM(FEATURES, 30).double()
    inputs = torch.randn(5, 3, FEATURES, dtype=torch.float64)

    class ChangesItsInput(nn.LSTM):
        def forward(self, given, state=None):
            result = super().forward(given, state)
            with torch.no_grad():
                given.zero_()
            return result

    changing = ChangesItsInput(FEATURES, 30).double()
    changing.load_state_dict(module.state_dict())
    expected = fast_gradients(module, Batch(inputs)).factors["weight_ih_l0"][0].explicit()
    found = fast_gradients(changing, Batch(inputs)).factors["weight_ih_l0"][0].explicit()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_half_precision_is_widened_inside(make: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    module = make(FEATURES, HIDDEN, bidirectional=True).to(torch.bfloat16)
    batch = Batch(torch.randn(3, 20, FEATURES).to(torch.bfloat16).double())
    fast = fast_gradients(module, batch, torch.bfloat16)
    slow = slow_gradients(module.double(), batch)
    assert fast.inputs.dtype == torch.bfloat16
    for name, (factor,) in fast.factors.items():
        assert factor.explicit().dtype == torch.float32
        error = (factor.explicit().double() - slow.parameters[name]).norm()
        assert error <= 2e-2 * slow.parameters[name].norm()


def test_runs_backwards_once() -> None:
    """Backward overwrites what forward left: a second pass would be wrong, so it is refused."""
    module = nn.LSTM(FEATURES, HIDDEN)
    state = torch.zeros(1, 3, HIDDEN), torch.zeros(1, 3, HIDDEN)
    weights = tuple(module.parameters())
    arguments = (torch.randn(5, 3, FEATURES), state, [*weights], True, 1, 0.0, True, False, False)
    ran = RULES[torch.lstm].run(Call(torch.lstm, arguments, {}, weights))
    loss = ran.result[0].sum()
    torch.autograd.grad(loss, ran.watched, retain_graph=True)
    with pytest.raises(GradientError, match="only once"):
        torch.autograd.grad(loss, ran.watched)
