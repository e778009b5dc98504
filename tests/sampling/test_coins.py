"""Skipping from head to head is the same as tossing every coin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.randomness import Coins
from dpis.sampling.coins import heads
from dpis.sampling.draw import Draw

from .oracles import KEY, accept_subsets

groups = st.lists(
    st.tuples(st.integers(0, 60), st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-300, 1.0]))),
    max_size=6,
)


SHARD = np.array([5])


class Constant(Coins):
    """Coins of one number for ever."""

    def __init__(self, number: float) -> None:
        self.number = number

    def pairs(self, shards: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return np.full((counts.sum(), 2), self.number)


def toss(sizes: list[int], probabilities: list[float], coins: Coins) -> tuple[list, list]:
    """One shard."""
    by_shard = np.array([sizes], dtype=np.int64)
    slots, owners, unread = heads(by_shard, np.array(probabilities), coins, SHARD)
    assert len(unread) == len(slots)
    return slots.tolist(), owners.tolist()


@given(groups, st.integers(0, 1000))
def test_slots_ascend_and_belong_to_their_groups(drawn: list[tuple[int, float]], step: int) -> None:
    sizes, probabilities = [size for size, _ in drawn], [p for _, p in drawn]
    slots, owners = toss(sizes, probabilities, KEY.coins("draw", step))
    ends = np.cumsum(sizes)
    for slot, owner in zip(slots, owners, strict=True):
        assert ends[owner] - sizes[owner] <= slot < ends[owner]
        assert probabilities[owner] > 0
    assert len(set(slots)) == len(slots)
    for group, probability in enumerate(probabilities):
        own = [slot for slot, owner in zip(slots, owners, strict=True) if owner == group]
        assert own == sorted(own)
        assert probability < 1 or len(own) == sizes[group]


@given(st.integers(0, 300), st.floats(1e-3, 0.999), st.integers(0, 1000))
def test_one_group_against_a_loop(size: int, probability: float, step: int) -> None:
    slots, _ = toss([size], [probability], KEY.coins("draw", step))
    coins, expected, slot = KEY.coins("draw", step), [], -1
    while True:
        u = float(coins.take(SHARD, np.array([1]))[0])
        slot += 1 + math.floor(math.log(u) / math.log1p(-probability))
        if slot >= size:
            break
        expected.append(slot)
    assert slots == expected


def test_more_heads_than_anybody_expects() -> None:
    slots, owners = toss([1000, 500], [0.01, 0.001], Constant(1 - 2.0**-53))
    assert sorted(slots) == list(range(1500))
    assert sorted(owners) == [0] * 1000 + [1] * 500


@pytest.mark.parametrize("probability", [0.0, 1e-300, 1e-15, 1e-9])
def test_no_heads_at_all(probability: float) -> None:
    assert toss([2**31 - 1, 10], [probability, 0.0], Constant(2.0**-53)) == ([], [])


@pytest.mark.parametrize("probability", [-1e-9, 1 + 1e-9, math.nan])
def test_what_is_not_a_probability_is_refused(probability: float) -> None:
    with pytest.raises(InputError):
        toss([3, 3], [0.5, probability], KEY.coins("draw", 0))


def test_every_subset_has_its_probability() -> None:
    sizes, probabilities = np.array([[1, 0, 1], [1, 1, 1]]), np.array([0.3, 0.5, 0.8])

    def draw(step: int) -> Draw:
        slots, _, _ = heads(sizes, probabilities, KEY.coins("draw", step), np.array([3, 8]))
        return Draw(torch.from_numpy(slots), torch.ones(len(slots)))

    accept_subsets(draw, 3000, np.repeat(np.tile(probabilities, 2), sizes.ravel()))
