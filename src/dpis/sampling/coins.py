"""Independent coins for many records, at the price of those that fall heads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError
from dpis.randomness import Stream

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


def heads(sizes: Integers, probabilities: Reals, stream: Stream) -> tuple[Integers, Integers]:
    """Toss one coin for every slot of every group, and say which fell heads.

    The groups lie one after another: ``sizes[0]`` slots whose coins show heads with ``probabilities[0]``,
    then those of the next group. The number of tails before a head is geometric, and coins have no
    memory, so ``floor(ln u / ln(1 - p))`` slots are skipped at once for a uniform ``u``. Skips are whole
    numbers, so the only error is that of ``u`` and its logarithm. A probability of one skips nothing.

    Returns:
        The slots that fell heads, ascending within every group, and the group of each.
    """
    if not np.all((probabilities >= 0) & (probabilities <= 1)):
        raise InputError(f"probabilities must lie in [0, 1], found {probabilities}")
    with np.errstate(divide="ignore"):
        log_tails = np.log1p(-probabilities)
    starts = np.cumsum(sizes) - sizes
    tossed = np.zeros_like(sizes)
    open_groups = np.flatnonzero((sizes > 0) & (probabilities > 0))
    slots = [np.zeros(0, dtype=np.int64)]
    groups = [np.zeros(0, dtype=np.int64)]
    while len(open_groups):
        left = sizes[open_groups] - tossed[open_groups]
        expected = left * probabilities[open_groups]
        # Enough to pass the end of a group in most cases; what is short goes on in the next round.
        draws = np.minimum(left, (expected + 4 * np.sqrt(expected) + 4).astype(np.int64))
        owners = np.repeat(open_groups, draws)
        with np.errstate(over="ignore"):
            tails = np.log(stream.uniforms(len(owners))) / log_tails[owners]
        steps = np.minimum(tails, sizes[owners]).astype(np.int64) + 1
        ends = np.cumsum(steps)
        last = np.cumsum(draws) - 1
        before = ends[last - draws + 1] - steps[last - draws + 1]
        ends += np.repeat(tossed[open_groups] - before, draws)
        inside = ends <= sizes[owners]
        slots.append((starts[owners] + ends - 1)[inside])
        groups.append(owners[inside])
        tossed[open_groups] = ends[last]
        open_groups = open_groups[ends[last] < sizes[open_groups]]
    return np.concatenate(slots), np.concatenate(groups)
