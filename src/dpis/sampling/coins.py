"""Independent coins for many records, at the price of those that fall heads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError
from dpis.randomness import Coins

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


NOTHING = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)


@np.errstate(divide="ignore", over="ignore")  # of a probability of one, and of one next to nothing
def heads(
    sizes: Integers, probabilities: Reals, coins: Coins, shards: Integers
) -> tuple[Integers, Integers, Reals]:
    """Toss one coin for every slot of every group, and say which fell heads.

    Slots lie shard by shard, and within a shard class by class: ``sizes[0, 0]`` of them show heads with
    ``probabilities[0]``, then those of the next class. The number of tails before a head is geometric, and coins have
    no memory, so ``floor(ln u / ln(1 - p))`` slots are skipped at once for a uniform ``u``. Skips are whole
    numbers, so the only error is that of ``u`` and its logarithm. A probability of one skips nothing.

    All shards are tossed for at once, each with its own numbers: what falls in a shard depends on no other.

    Args:
        sizes: how many slots there are, by own shard and class.
        probabilities: of heads, by class.
        coins: of this step.
        shards: what the own shards are called.

    Returns:
        The slots that fell heads, ascending within every group; the class of each; and for each a uniform number that
        was not looked at.
    """
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise InputError(f"probabilities must lie in [0, 1], found {probabilities}")
    log_tails = np.log1p(-probabilities)
    groups = (sizes * probabilities > 0).ravel().nonzero()[0]
    owners, labels = np.divmod(groups, len(probabilities))
    sizes = sizes.ravel()
    left, ends = sizes[groups], sizes.cumsum()[groups]
    found = []
    while len(left):
        expected = left * probabilities[labels]
        # Enough to pass the end of a group in most cases; what is short goes on in the next round.
        draws = np.minimum(left, (expected + 4 * np.sqrt(expected) + 2).astype(np.int64))
        counts = np.bincount(owners, draws, len(shards)).astype(np.int64)
        uniforms = coins.pairs(shards, counts)
        group = np.arange(len(left)).repeat(draws)
        room = left[group]
        tails = np.log(uniforms[:, 0]) / log_tails[labels][group]
        steps = np.minimum(tails, room).astype(np.int64) + 1
        passed = steps.cumsum()
        after = passed[draws.cumsum() - 1]
        before = np.zeros(len(after), dtype=np.int64)
        before[1:] = after[:-1]
        passed -= before[group]
        inside = (passed <= room).nonzero()[0]
        group = group[inside]
        slots = (ends - left - 1)[group] + passed[inside]
        found.append((slots, labels[group], uniforms[inside, 1]))
        left = left - (after - before)
        short = (left > 0).nonzero()[0]
        left, ends, owners, labels = left[short], ends[short], owners[short], labels[short]
    if len(found) < 2:
        return found[0] if found else NOTHING
    slots, labels, uniforms = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return slots, labels, uniforms
