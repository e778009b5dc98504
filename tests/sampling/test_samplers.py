"""Samplers: any norm is safe, the same state and stream draw the same, k = inf is DP-SGD."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.sampling import ImportanceSampler, Sampler, Shards, UniformSampler
from dpis.sampling.estimate import Estimate

from .oracles import KEY, growing_norms, importance_of, state_of

ODD_NORMS = [0.0, -0.0, 1e-45, 1e-320, 0.05, 1.0, 3e38, 1e38, 1e300, math.inf, math.nan]
norms = st.one_of(st.floats(0, 3), st.floats(0), st.sampled_from(ODD_NORMS))
headrooms = st.one_of(st.floats(1, 20), st.sampled_from([1.0, math.inf]))
clip_norms = st.sampled_from([1e-30, 0.1, 1.0, 3.7, 1e30])


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def observed(
    values: list[float], clip_norm: float = 1.0, headroom: float = 2.0, **more: Any
) -> Any:
    sampler = ImportanceSampler(Shards.whole(len(values)), clip_norm, headroom=headroom, **more)
    sampler.observe(torch.arange(len(values)), tensor(values))
    return sampler


def whole_sum(sampler: ImportanceSampler, bound: float, **more: float) -> float:
    """Over all shards, as the mechanism adds them up."""
    return math.fsum(sampler.sum_of_last_norms(bound, **more))


def walked(sampler: Sampler, first: int, last: int, rate: float = 0.3) -> list[list[float]]:
    """Draw and observe from step to step; all that was drawn."""
    history = []
    for step in range(first, last):
        draw = sampler.draw(rate, KEY.coins("draw", step))
        history.append(draw.indices.tolist() + draw.importance.tolist())
        sampler.observe(draw.indices, growing_norms(draw.indices, step))
    return history


# ── any norm is safe ─────────────────────────────────────────────────────────────────────────────────


@given(st.lists(norms, max_size=30), headrooms, st.floats(1e-6, 1), clip_norms, st.integers(0, 99))
def test_importance_is_as_specified_and_never_above_the_clip_norm(
    values: list[float], headroom: float, floor: float, clip_norm: float, step: int
) -> None:
    sampler = observed(values, clip_norm, headroom, floor=floor * clip_norm)
    draw = sampler.draw(1.0, KEY.coins("draw", step))
    assert draw.indices.tolist() == sorted(set(draw.indices.tolist()))
    with np.errstate(over="ignore"):
        stored = [float(np.float32(value)) for value in values]
    expected = [importance_of(n, clip_norm, headroom, floor * clip_norm) for n in stored]
    assert draw.importance.tolist() == [expected[i] for i in draw.indices]
    assert all(0 < g <= clip_norm for g in draw.importance.tolist())
    sure = [i for i, g in enumerate(expected) if g == clip_norm]
    assert set(sure) <= set(draw.indices.tolist()), (
        "at rate one a record at the cap is always drawn"
    )


def test_a_missing_cap_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncapped(self: Estimate, norms: np.ndarray) -> np.ndarray:
        return self.headroom * np.maximum(norms.astype(float), self.floor)

    def topmost(self: Estimate, norms: np.ndarray) -> np.ndarray:
        return np.full(len(norms), len(self.bounds) - 1)

    law = test_importance_is_as_specified_and_never_above_the_clip_norm.hypothesis.inner_test
    law([0.1, 2.0], 2.0, 0.05, 1.0, 0)
    monkeypatch.setattr(Estimate, "importance", uncapped)
    monkeypatch.setattr(Estimate, "labels", topmost)
    with pytest.raises(AssertionError):
        law([0.1, 2.0], 2.0, 0.05, 1.0, 0)


def test_a_record_that_grew_is_held_back_once() -> None:
    """Norms are stored raw, so the next estimate knows the whole growth (rule 16)."""
    sampler = observed([0.1], headroom=2.0)
    sampler.observe(torch.tensor([0]), tensor([5.0]))
    assert sampler.last_norms.tolist() == [5.0]
    assert sampler.draw(1.0, KEY.coins("draw", 0)).importance.tolist() == [1.0]


@given(headrooms, st.floats(1e-6, 2), clip_norms, st.lists(norms, min_size=1, max_size=20))
def test_no_record_exceeds_the_bound_of_its_class(
    headroom: float, floor: float, clip_norm: float, values: list[float]
) -> None:
    estimate = Estimate(clip_norm, headroom, floor * clip_norm)
    with np.errstate(over="ignore"):
        stored = np.abs(np.nan_to_num(np.array(values), nan=np.inf)).astype(np.float32)
    bounds = estimate.bounds[estimate.labels(stored)]
    assert (estimate.importance(stored) <= bounds).all()
    assert estimate.bounds[-1] == clip_norm
    assert (np.diff(estimate.bounds) > 0).all()
    assert len(estimate.bounds) <= 256
    floor_class = estimate.labels(np.zeros(1, dtype=np.float32))
    assert estimate.bounds[floor_class] == estimate.importance(np.zeros(1, dtype=np.float32))


def test_a_norm_that_is_not_finite_means_unseen() -> None:
    sampler = observed([0.25, 0.25, 0.25])
    sampler.observe(torch.tensor([2, 0]), tensor([math.nan, math.inf]))
    assert sampler.last_norms.tolist() == [math.inf, 0.25, math.inf]
    assert sampler.last_norms.dtype == torch.float32


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ([0, 1], [0.1, -0.1]),
        ([0, 1], [0.1, -math.inf]),
        ([1, 1], [0.1, 0.2]),
        ([0, 2, 0], [0.1, 0.2, 0.1]),
        ([3], [0.1]),
        ([-1], [0.1]),
        ([0, 1], [0.1]),
    ],
)
def test_what_cannot_be_stored_is_refused_and_changes_nothing(
    indices: list[int], values: list[float]
) -> None:
    sampler = observed([0.5, 0.25, 0.125])
    before = state_of(sampler)
    with pytest.raises(InputError):
        sampler.observe(torch.tensor(indices), tensor(values))
    assert state_of(sampler) == before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ImportanceSampler(Shards.whole(-1), 1.0, headroom=2.0),
        lambda: ImportanceSampler(Shards.whole(2**31), 1.0, headroom=2.0),
        lambda: ImportanceSampler(Shards.whole(1.0), 1.0, headroom=2.0),  # type: ignore[arg-type]
        lambda: ImportanceSampler(Shards.whole(1), 0.0, headroom=2.0),
        lambda: ImportanceSampler(Shards.whole(1), math.nan, headroom=2.0),
        lambda: ImportanceSampler(Shards.whole(1), 1.0, headroom=0.9),
        lambda: ImportanceSampler(Shards.whole(1), 1.0, headroom=math.nan),
        lambda: ImportanceSampler(Shards.whole(1), 1.0, headroom=2.0, floor=0.0),
        lambda: ImportanceSampler(Shards.whole(1), 1.0, headroom=2.0, floor=math.nan),
        lambda: UniformSampler(Shards.whole(1), -1.0),
        lambda: UniformSampler(Shards.whole(1), 1.0).draw(0.0, KEY.coins("draw", 0)),
        lambda: UniformSampler(Shards.whole(1), 1.0).draw(1.1, KEY.coins("draw", 0)),
        lambda: observed([1.0]).draw(math.nan, KEY.coins("draw", 0)),
        lambda: observed([1.0]).sum_of_last_norms(1.0, unseen=1.5),
        lambda: UniformSampler(Shards.whole(1), 1.0).sum_of_last_norms(1.0),
    ],
)
def test_wrong_requests_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        wrong()


# ── edges ────────────────────────────────────────────────────────────────────────────────────────────

SAMPLERS: list[Callable[[int], Sampler]] = [
    lambda population: UniformSampler(Shards.whole(population), 1.0),
    lambda population: ImportanceSampler(Shards.whole(population), 1.0, headroom=2.0),
]


@pytest.mark.parametrize("make", SAMPLERS, ids=["uniform", "importance"])
def test_nobody_and_nothing(make: Callable[[int], Sampler]) -> None:
    empty, nobody = make(0), torch.zeros(0, dtype=torch.int64)
    for step in range(3):
        draw = empty.draw(1.0, KEY.coins("draw", step))
        assert len(draw) == 0
        empty.observe(draw.indices, draw.importance)
    empty.set_clip_norm(2.0)
    assert empty.population == 0
    assert empty.clip_norm == 2.0
    seldom = make(5)
    seldom.observe(nobody, torch.zeros(0))
    draw = seldom.draw(1e-15, KEY.coins("draw", 0))
    assert draw.indices.dtype == torch.int64
    assert draw.importance.dtype == torch.float64
    assert len(draw) == 0
    seldom.observe(draw.indices, draw.importance)


@pytest.mark.parametrize("make", SAMPLERS, ids=["uniform", "importance"])
def test_at_rate_one_everybody_unseen_is_drawn(make: Callable[[int], Sampler]) -> None:
    draw = make(1000).draw(1.0, KEY.coins("draw", 0))
    assert draw.indices.tolist() == list(range(1000))
    assert draw.importance.tolist() == [1.0] * 1000


def test_infinite_headroom_is_uniform_sampling() -> None:
    uniform = UniformSampler(Shards.whole(400), 0.3)
    importance = ImportanceSampler(Shards.whole(400), 0.3, headroom=math.inf)
    assert walked(uniform, 0, 50) == walked(importance, 0, 50)


def test_the_clip_norm_can_change() -> None:
    sampler = observed([0.02, 0.1, 0.3, 5.0])
    before = state_of(sampler)
    sampler.set_clip_norm(0.1)
    importance = sampler.draw(1.0, KEY.coins("draw", 0)).importance
    assert importance.max() == 0.1
    assert sampler.clip_norm == 0.1
    sampler.set_clip_norm(0.4, floor=0.2)
    draw = sampler.draw(1.0, KEY.coins("draw", 1))
    assert draw.importance.tolist() == [0.4] * 4
    sampler.set_clip_norm(1.0, floor=0.05)
    assert state_of(sampler) == before


def test_the_sum_of_last_norms() -> None:
    sampler = observed([0.25, 4.0, math.nan, 0.0])
    assert whole_sum(sampler, 1.0) == 0.25 + 1 + 1 + 0
    assert whole_sum(sampler, 2.0, unseen=0.5) == 0.25 + 2 + 0.5 + 0
    assert whole_sum(ImportanceSampler(Shards.whole(0), 1.0, headroom=2.0), 1.0) == 0.0


@given(st.lists(norms, max_size=20), norms, clip_norms)
def test_one_record_adds_between_nothing_and_the_bound(
    values: list[float], more: float, bound: float
) -> None:
    before, after = (whole_sum(observed(all_), bound) for all_ in (values, [*values, more]))
    assert -1e-12 * bound <= after - before <= (1 + 1e-12) * bound


# ── the same again ───────────────────────────────────────────────────────────────────────────────────


def test_a_restored_sampler_draws_the_same() -> None:
    sampler = ImportanceSampler(Shards.whole(200), 1.0, headroom=3.0)
    walked(sampler, 0, 40)
    sampler.set_clip_norm(0.7)
    walked(sampler, 40, 60)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    restored = ImportanceSampler(Shards.whole(200), 1.0, headroom=3.0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert state_of(restored) == state_of(sampler)
    assert walked(restored, 60, 100) == walked(sampler, 60, 100)


def test_a_state_is_a_copy() -> None:
    sampler = ImportanceSampler(Shards.whole(50), 1.0, headroom=3.0)
    state = sampler.state_dict()
    walked(sampler, 0, 10)
    assert all(own["last_norms"].isinf().all() for own in state["shards"].values())
    other = ImportanceSampler(Shards.whole(50), 1.0, headroom=3.0)
    other.load_state_dict(state)
    walked(other, 0, 10)
    assert all(own["last_norms"].isinf().all() for own in state["shards"].values())
    assert state_of(other) == state_of(sampler)


def test_the_order_within_classes_is_part_of_the_state() -> None:
    sampler = ImportanceSampler(Shards.whole(200), 1.0, headroom=3.0)
    walked(sampler, 0, 40)
    forgetful = ImportanceSampler(Shards.whole(200), 1.0, headroom=3.0)
    forgetful.observe(torch.arange(200), sampler.last_norms)
    assert walked(forgetful, 40, 60) != walked(sampler, 40, 60)


def test_the_order_of_what_is_observed_does_not_matter() -> None:
    one, other = (ImportanceSampler(Shards.whole(50), 1.0, headroom=3.0) for _ in range(2))
    records = torch.arange(0, 50, 3)
    one.observe(records, growing_norms(records, 0))
    other.observe(records.flip(0), growing_norms(records, 0).flip(0))
    assert state_of(one) == state_of(other)


@pytest.mark.parametrize(
    "damage",
    [
        {"headroom": 2.0},
        {"last_norms": torch.zeros(9)},
        {"last_norms": torch.full((10,), -1.0)},
        {"last_norms": torch.full((10,), math.nan)},
        {"last_norms": torch.zeros(10)},
        {"order": torch.zeros(10, dtype=torch.int32)},
        {"order": torch.arange(9, dtype=torch.int32)},
        {"sizes": torch.tensor([10])},
        {"clip_norm": math.nan},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    sampler = ImportanceSampler(Shards.whole(20, 2), 1.0, headroom=3.0)
    sampler.observe(torch.arange(10, 15), torch.full((5,), 0.2))
    before, state = state_of(sampler), sampler.state_dict()
    of_sampler = state | {name: value for name, value in damage.items() if name in state}
    of_shard = {name: value for name, value in damage.items() if name not in state}
    shards = state["shards"] | {1: state["shards"][1] | of_shard}
    with pytest.raises(InputError):
        sampler.load_state_dict(of_sampler | {"shards": shards})
    assert state_of(sampler) == before


def test_a_uniform_sampler_is_restored_too() -> None:
    sampler = UniformSampler(Shards.whole(10), 1.0)
    sampler.set_clip_norm(0.5)
    restored = UniformSampler(Shards.whole(10), 1.0)
    restored.load_state_dict(sampler.state_dict())
    assert restored.clip_norm == 0.5


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────


def test_cost_and_memory_go_with_the_candidates() -> None:
    population, sampler = 1_000_000, ImportanceSampler(Shards.whole(1_000_000), 1.0, headroom=2.0)
    everybody = torch.arange(population)
    sampler.observe(everybody, growing_norms(everybody, 0))
    coins = KEY.coins("draw", 0)
    draw = sampler.draw(1000 / population, coins)
    assert 100 < len(draw) < 1000
    groups, read = sampler._classes.sizes.size, coins._positions.sum()
    assert read < 3 * (len(draw) + groups), "randomness was read for others than the candidates"
    assert sampler.nbytes < 12.01 * population
