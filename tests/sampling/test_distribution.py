"""How often who is drawn: the fast sampler against the obvious one, and against broken ones.

Seeds are fixed; each law of oracles.py would reject a true sampler with probability below 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dpis.randomness import Coins
from dpis.sampling import Draw, ImportanceSampler, Shards, UniformSampler, importance
from dpis.sampling.classes import RecordClasses
from dpis.sampling.estimate import Estimate

from .oracles import (
    KEY,
    SlowSampler,
    accept_changing_frequencies,
    accept_frequencies,
    accept_freshness,
    accept_independence,
    accept_subsets,
    importance_of,
    inclusions,
)

NORMS = np.array([0.0, 0.03, 0.11, 0.2, 0.26, 0.3, 0.41, 0.5, 0.7, 3.0, math.inf, 1e-3])
RATE, HEADROOM, FLOOR = 0.8, 1.5, 0.1
POPULATION, SHARDS = 3 * len(NORMS), 8
ANY = np.zeros(1, dtype=np.int64)
PROBABILITIES = RATE * np.array(
    [importance_of(float(np.float32(n)), 1.0, HEADROOM, FLOOR) for n in np.tile(NORMS, 3)]
)

pytestmark = pytest.mark.slow


def fast() -> ImportanceSampler:
    sampler = ImportanceSampler(
        Shards.whole(POPULATION, SHARDS), 1.0, headroom=HEADROOM, floor=FLOOR
    )
    sampler.observe(torch.arange(POPULATION), torch.from_numpy(np.tile(NORMS, 3)))
    return sampler


def slow() -> SlowSampler:
    sampler = SlowSampler(POPULATION, 1.0, HEADROOM, FLOOR)
    sampler.observe(torch.arange(POPULATION), torch.from_numpy(np.tile(NORMS, 3)))
    return sampler


def accept_all(make: Callable[[], ImportanceSampler | SlowSampler], steps: int) -> None:
    sampler = make()
    table = inclusions(lambda t: sampler.draw(RATE, KEY.coins("draw", t)), steps, POPULATION)
    accept_frequencies(table, PROBABILITIES)
    accept_freshness(table, PROBABILITIES)
    accept_independence(table, PROBABILITIES)


def accept_while_moving(make: Callable[[], ImportanceSampler | SlowSampler], steps: int) -> None:
    sampler, shadow = make(), slow()
    observe = sampler.observe

    def observe_both(indices: torch.Tensor, norms: torch.Tensor) -> None:
        observe(indices, norms)
        shadow.observe(indices, norms)

    sampler.observe = observe_both  # type: ignore[method-assign]
    accept_changing_frequencies(sampler, lambda: 0.4 * shadow.importance(), 0.4, steps)


@pytest.mark.parametrize("make", [slow, fast])
def test_inclusion_freshness_and_independence(make: Callable[[], ImportanceSampler]) -> None:
    accept_all(make, 1500)


@pytest.mark.parametrize("make", [slow, fast])
def test_frequencies_follow_while_records_move(make: Callable[[], ImportanceSampler]) -> None:
    accept_while_moving(make, 700)


@pytest.mark.statistical
@pytest.mark.slow
def test_the_same_with_many_more_draws() -> None:
    accept_all(fast, 50_000)
    accept_while_moving(fast, 15_000)


def test_every_subset_of_four_records() -> None:
    sampler = ImportanceSampler(Shards.whole(4), 1.0, headroom=1.0, floor=0.2)
    sampler.observe(torch.tensor([0, 1, 3]), torch.tensor([0.3, 0.1, 0.45]))
    probabilities = 0.9 * np.array([np.float32(0.3), 0.2, 1.0, np.float32(0.45)])
    accept_subsets(lambda t: sampler.draw(0.9, KEY.coins("draw", t)), 2500, probabilities)


def test_uniform_sampling() -> None:
    sampler = UniformSampler(Shards.whole(40), 1.0)
    table = inclusions(lambda t: sampler.draw(0.3, KEY.coins("draw", t)), 1500, 40)
    probabilities = np.full(40, 0.3)
    accept_frequencies(table, probabilities)
    accept_freshness(table, probabilities)
    accept_independence(table, probabilities)


# ── broken on purpose ────────────────────────────────────────────────────────────────────────────────


class Broken(ImportanceSampler):
    """As `fast`; what is broken is said by the subclass."""

    def __init__(self) -> None:
        super().__init__(Shards.whole(POPULATION, SHARDS), 1.0, headroom=HEADROOM, floor=FLOOR)
        self.observe(torch.arange(POPULATION), torch.from_numpy(np.tile(NORMS, 3)))


class StickyCoins(Broken):
    """A third of the draws repeats the last one: candidates kept over an epoch, as the paper has it."""

    last: Draw | None = None

    def draw(self, rate: float, coins: Coins) -> Draw:
        if self.last is None or coins.take(ANY, ANY + 1)[0] > 1 / 3:
            self.last = super().draw(rate, coins)
        return self.last


class CommonCoin(Broken):
    """One coin for all records, each with the right probability."""

    def draw(self, rate: float, coins: Coins) -> Draw:
        u = coins.take(ANY, ANY + 1)[0]
        chosen = torch.from_numpy(np.flatnonzero(u < PROBABILITIES))
        return Draw(chosen, torch.ones(len(chosen), dtype=torch.float64))


class LastOneMissing(Broken):
    """The last record of the order never takes part: a boundary that is off by one."""

    def draw(self, rate: float, coins: Coins) -> Draw:
        draw = super().draw(rate, coins)
        kept = draw.indices != self._classes.order[-1]
        return Draw(draw.indices[kept], draw.importance[kept])


@pytest.mark.parametrize(
    ("law", "broken"),
    [
        (accept_freshness, StickyCoins),
        (accept_independence, CommonCoin),
        (accept_frequencies, LastOneMissing),
    ],
)
def test_every_law_notices_what_it_is_meant_for(
    law: Callable[[np.ndarray, np.ndarray], None], broken: type[Broken]
) -> None:
    sampler = broken()
    table = inclusions(lambda t: sampler.draw(RATE, KEY.coins("draw", t)), 1500, POPULATION)
    with pytest.raises(AssertionError):
        law(table, PROBABILITIES)


def bounds_instead_of_importance(self: Estimate, norms: np.ndarray) -> np.ndarray:
    exact = np.minimum(self.headroom * np.maximum(norms.astype(float), self.floor), self.clip_norm)
    if not hasattr(self, "bounds"):
        return exact
    return self.bounds[self.bounds.searchsorted(exact)]


def test_a_missing_thinning_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimate, "importance", bounds_instead_of_importance)
    with pytest.raises(AssertionError):
        accept_all(fast, 1500)


def test_records_that_do_not_move_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = fast()
    monkeypatch.setattr(RecordClasses, "move", lambda *_: None)
    with pytest.raises(AssertionError):
        accept_while_moving(lambda: sampler, 700)


def test_skips_that_are_one_too_long_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = importance.heads

    def late(*given: Any) -> object:
        slots, *more = sound(*given)
        behind = np.isin(slots - 1, slots)  # whoever follows a head at once is overlooked
        return slots[~behind], *(one[~behind] for one in more)

    monkeypatch.setattr(importance, "heads", late)
    with pytest.raises(AssertionError):
        accept_all(fast, 1500)
