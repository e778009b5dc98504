"""The obvious sampler, one coin a record, and the laws that every sampler has to keep.

Every law raises AssertionError for a sample of a true sampler with probability below `FALSE_ALARM`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from dpis.randomness import Coins, Key
from dpis.sampling import Draw, Sampler, Shards

FALSE_ALARM = 1e-6
KEY = Key.from_seed(7)


def importance_of(norm: float, clip_norm: float, headroom: float, floor: float) -> float:
    """``g_hat`` as the specification has it."""
    if not math.isfinite(norm):
        norm = math.inf
    return min(clip_norm, headroom * max(norm, floor))


class SlowSampler:
    """Importance sampling as it is written down: a coin for every record, in turn."""

    def __init__(self, population: int, clip_norm: float, headroom: float, floor: float) -> None:
        self.population, self.clip_norm = population, clip_norm
        self.headroom, self.floor = headroom, floor
        self.norms = [math.inf] * population

    def importance(self) -> np.ndarray:
        settings = self.clip_norm, self.headroom, self.floor
        return np.array([importance_of(np.float32(norm), *settings) for norm in self.norms])

    def draw(self, rate: float, coins: Coins) -> Draw:
        importance = self.importance()
        own = Shards.whole(self.population)
        heads = coins.take(own.numbers, own.sizes) < rate * importance / self.clip_norm
        chosen = np.flatnonzero(heads)
        return Draw(torch.from_numpy(chosen), torch.from_numpy(importance[chosen]))

    def observe(self, indices: Tensor, norms: Tensor) -> None:
        for i, norm in zip(indices.tolist(), norms.tolist(), strict=True):
            self.norms[i] = norm


Drawing = Callable[[int], Draw]


def inclusions(draw: Drawing, steps: int, population: int) -> np.ndarray:
    """Row ``t`` tells who was drawn in step ``t``."""
    table = np.zeros((steps, population))
    for step in range(steps):
        table[step, draw(step).indices.numpy()] = 1
    return table


def accept_frequencies(table: np.ndarray, probabilities: np.ndarray) -> None:
    """Every record is drawn as often as its probability says; exact binomial tails."""
    counts, steps = table.sum(axis=0), len(table)
    low = stats.binom.cdf(counts, steps, probabilities)
    high = stats.binom.sf(counts - 1, steps, probabilities)
    assert np.minimum(low, high).min() > FALSE_ALARM / (2 * len(counts))


def accept_freshness(table: np.ndarray, probabilities: np.ndarray) -> None:
    """Neighbouring steps are uncorrelated, record by record and all together (rule 1)."""
    scaled = standardised(table, probabilities)
    scores = (scaled[1:] * scaled[:-1]).sum(axis=0) / math.sqrt(len(table) - 1)
    assert np.abs(scores).max() < two_sided(len(scores) + 1)
    assert abs(scores.sum()) / math.sqrt(len(scores)) < two_sided(len(scores) + 1)


def accept_independence(table: np.ndarray, probabilities: np.ndarray) -> None:
    """Records of one step are uncorrelated in pairs, and their number varies as it should."""
    scaled = standardised(table, probabilities)
    scores = scaled.T @ scaled / math.sqrt(len(table))
    pairs = scores[np.triu_indices(scaled.shape[1], k=1)]
    assert np.abs(pairs).max() < two_sided(len(pairs) + 1)
    assert abs(pairs.sum()) / math.sqrt(len(pairs)) < two_sided(len(pairs) + 1)


def accept_subsets(draw: Drawing, steps: int, probabilities: np.ndarray) -> None:
    """Every subset of a small population occurs as often as the product of its coins says."""
    population = len(probabilities)
    table = inclusions(draw, steps, population).astype(int)
    counts = np.bincount(table @ (1 << np.arange(population)), minlength=1 << population)
    subsets = np.arange(1 << population)[:, None] >> np.arange(population) & 1
    expected = steps * np.where(subsets, probabilities, 1 - probabilities).prod(axis=1)
    assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM


def accept_changing_frequencies(
    sampler: Sampler | SlowSampler, probabilities: Callable[[], np.ndarray], rate: float, steps: int
) -> None:
    """Frequencies follow the probabilities while norms change with who is drawn."""
    surplus, variance = np.zeros(sampler.population), np.zeros(sampler.population)
    for step in range(steps):
        q = probabilities()
        drawn = sampler.draw(rate, KEY.coins("draw", step)).indices
        surplus -= q
        surplus[drawn.numpy()] += 1
        variance += q * (1 - q)
        sampler.observe(drawn, growing_norms(drawn, step))
    scores = surplus / np.sqrt(variance)
    assert np.abs(scores).max() < two_sided(len(scores) + 1)
    assert abs(surplus.sum()) / math.sqrt(variance.sum()) < two_sided(len(scores) + 1)


def growing_norms(records: Tensor, step: int) -> Tensor:
    """Norms that wander over all classes, in another rhythm for every record."""
    phase = records.double() * 2.4 + step * 0.1 * (1 + records % 3)
    return 10 ** (1.2 * torch.sin(phase) - 0.8)


def standardised(table: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    return (table - probabilities) / np.sqrt(probabilities * (1 - probabilities))


def two_sided(tests: int) -> float:
    return float(stats.norm.isf(FALSE_ALARM / (2 * tests)))


def state_of(sampler: Sampler) -> Any:
    """A sampler's state in a form that can be compared."""
    return plain(sampler.state_dict())


def plain(value: Any) -> Any:
    """A state whose tensors are lists."""
    if isinstance(value, Mapping):
        return [plain(one) for one in value.values()]
    return value.tolist() if isinstance(value, Tensor) else value
