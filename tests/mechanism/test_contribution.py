"""What a record adds: never longer than one, and right on average."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpis.errors import InputError
from dpis.mechanism import contribution
from dpis.mechanism.contribution import acceptance, contribution_weights

Weights = Callable[..., Tensor]

C = 0.1
caps = st.floats(1e-6 * C, C)
any_norm = st.one_of(
    st.floats(0, 2 * C), st.floats(0), st.sampled_from([0.0, math.inf, math.nan, 1e-300, 1e308])
)
coins = st.floats(2.0**-53, 1 - 2.0**-53)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def accept_length(weights: Weights, norm: float, cap: float, coin: float) -> None:
    """``||v|| <= 1``, whatever the norm (rule 2)."""
    for how, uniforms in (("weight", None), ("reject", tensor(coin))):
        weight = weights(tensor(norm), tensor(cap), clip_norm=C, how=how, uniforms=uniforms).item()
        assert math.isfinite(weight)
        assert weight >= 0
        assert weight == 0 or weight * norm <= 1 + 1e-15


@given(any_norm, caps, coins)
def test_nobody_adds_more_than_one(norm: float, cap: float, coin: float) -> None:
    accept_length(contribution_weights, norm, cap, coin)


def unclipped(norms: Tensor, importance: Tensor, **_: object) -> Tensor:
    return 1.0 / importance


def test_a_missing_clip_breaks_the_law() -> None:
    with pytest.raises(AssertionError):
        accept_length(unclipped, 5 * C, C, 0.5)


@given(st.floats(1e-8 * C, 1e6 * C), caps)
def test_weight_is_the_clipped_gradient_over_the_cap(norm: float, cap: float) -> None:
    weight = contribution_weights(tensor(norm), tensor(cap), clip_norm=C).item()
    assert weight * norm == pytest.approx(min(norm, cap) / cap, rel=1e-14)


@given(st.floats(1e-8 * C, 1e6 * C), caps)
def test_both_ways_have_the_same_mean_and_weight_varies_less(norm: float, cap: float) -> None:
    sure = contribution_weights(tensor(norm), tensor(cap), clip_norm=C).item() * norm
    p = acceptance(tensor(norm), tensor(cap)).item()
    assert p * 1.0 == pytest.approx(sure, rel=1e-14)  # an accepted record adds a unit vector
    assert sure**2 <= p * 1.0 + 1e-15  # second moments


@given(st.floats(1e-8 * C, 1e6 * C), caps, coins)
def test_reject_accepts_below_the_probability(norm: float, cap: float, coin: float) -> None:
    weight = contribution_weights(
        tensor(norm), tensor(cap), clip_norm=C, how="reject", uniforms=tensor(coin)
    ).item()
    accepted = coin < min(norm, cap) / cap
    assert weight == (1 / norm if accepted else 0.0)


@pytest.mark.parametrize("how", ["weight", "reject"])
@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, 0.0, 0.99e-8 * C])
def test_what_has_no_direction_adds_nothing(how: str, norm: float) -> None:
    uniforms = tensor(2.0**-53) if how == "reject" else None
    weights = contribution_weights(tensor(norm), tensor(C), clip_norm=C, how=how, uniforms=uniforms)
    assert weights.tolist() == [0.0]


def test_the_least_norm_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = tensor(1.01e-8 * C)
    assert contribution_weights(norms, tensor(C), clip_norm=C).item() > 0
    monkeypatch.setattr(contribution, "LEAST_NORM", 1e-7)
    assert contribution_weights(norms, tensor(C), clip_norm=C).item() == 0


def test_numpy_uniforms_float32_norms_and_no_records() -> None:
    norms, cap = torch.tensor([0.05, 0.2]), torch.tensor([0.1, 0.1])
    uniforms = tensor(0.4, 0.9).numpy()
    weights = contribution_weights(norms, cap, clip_norm=C, how="reject", uniforms=uniforms)
    assert weights.dtype == torch.float64
    assert weights.tolist() == [pytest.approx(20), pytest.approx(5)]
    assert contribution_weights(torch.zeros(0), torch.zeros(0), clip_norm=C).tolist() == []


@pytest.mark.parametrize(
    ("how", "uniforms"), [("reject", None), ("weight", tensor(0.5)), ("clip", None)]
)
def test_wrong_requests_are_refused(how: str, uniforms: Tensor | None) -> None:
    with pytest.raises(InputError):
        contribution_weights(tensor(1.0), tensor(C), clip_norm=C, how=how, uniforms=uniforms)
