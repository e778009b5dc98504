"""Whoever holds which shards, the same records are drawn; and the coins of two shards have nothing in common.

Seeds are fixed; each law of oracles.py would reject a true sampler with probability below 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from dpis import randomness
from dpis.errors import InputError
from dpis.randomness import Coins
from dpis.sampling import ImportanceSampler, Sampler, Shards, UniformSampler
from dpis.sampling.classes import RecordClasses

from .oracles import (
    KEY,
    SlowSampler,
    accept_changing_frequencies,
    accept_frequencies,
    accept_freshness,
    accept_independence,
    growing_norms,
    inclusions,
    plain,
)

populations = st.one_of(st.integers(0, 300), st.sampled_from([10**10, 10**10 + 7, 2**31 - 1]))
counts = st.sampled_from([1, 2, 4, 64, 64, 1024])


# ── who holds what ───────────────────────────────────────────────────────────────────────────────────


def boundaries_of(population: int, count: int) -> list[int]:
    """In Python's own numbers, which do not overflow."""
    return [population * shard // count for shard in range(count + 1)]


@given(populations, counts, st.integers(1, 70))
def test_shards_are_dealt_out_whole(population: int, count: int, ranks: int) -> None:
    """Every shard has one owner, every record one shard, and shards differ by a record at most."""
    ranks = min(ranks, count)
    assume(population / ranks + population / count < 2**31)
    owners = [Shards.of_rank(population, count, rank, ranks) for rank in range(ranks)]
    assert [s for own in owners for s in own.numbers] == list(range(count))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    ends = boundaries_of(population, count)
    for own in owners:
        assert own.records == range(ends[own.first], ends[own.last])
        assert own.boundaries.tolist() == ends[own.first : own.last + 1]
        assert own.sizes.sum() == len(own.records)
        assert max(own.sizes, default=0) - min(own.sizes, default=0) <= 1


@given(populations.filter(bool), counts, st.data())
def test_a_record_lies_within_its_shard(population: int, count: int, data: st.DataObject) -> None:
    records = sorted(set(data.draw(st.lists(st.integers(0, population - 1), max_size=20))))
    ends = boundaries_of(population, count)
    own = Shards(population, count, 0, 0)
    shards = own.shard_of(np.array(records, dtype=np.int64))
    for record, shard in zip(records, shards.tolist(), strict=True):
        assert ends[shard] <= record < ends[shard + 1]
    if population < 2**31:
        whole = Shards.whole(population, count)
        found = whole.counts(np.array(records, dtype=np.int64)).tolist()
        assert found == [shards.tolist().count(shard) for shard in range(count)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Shards.whole(10, 3), "power of two"),
        (lambda: Shards.whole(10, 0), "power of two"),
        (lambda: Shards.whole(10, 2**17), "power of two"),
        (lambda: Shards.whole(-1), "population"),
        (lambda: Shards.whole(True), "population"),
        (lambda: Shards.whole(2**47), "population"),
        (lambda: Shards.whole(2**31), "more processes"),
        (lambda: Shards(10, 4, 3, 2), "own shards"),
        (lambda: Shards(10, 4, 0, 5), "own shards"),
        (lambda: Shards.of_rank(10, 4, 4, 4), "rank"),
        (lambda: Shards.of_rank(10, 4, 0, 5), "Set the option `shards`"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        wrong()


# ── the same draws, however shards are dealt out ─────────────────────────────────────────────────────

Make = Callable[[Shards], Sampler]
SAMPLERS: dict[str, Make] = {
    "uniform": lambda shards: UniformSampler(shards, 1.0),
    "importance": lambda shards: ImportanceSampler(shards, 1.0, headroom=3.0),
}


def dealt_out(population: int, count: int, ranks: int) -> list[Shards]:
    return [Shards.of_rank(population, count, rank, ranks) for rank in range(ranks)]


def gathered(samplers: Sequence[Sampler]) -> dict[str, Any]:
    """The states of all processes, put together."""
    states = [sampler.state_dict() for sampler in samplers]
    together = states[0]
    for state in states[1:]:
        if "shards" in state:
            together["shards"] = together["shards"] | state["shards"]
    return together


def run(make: Make, owners: Sequence[Sequence[Shards]], steps: int) -> list[Any]:
    """All that is drawn, while norms and clip norm change and the shards change hands from time to time.

    Args:
        make: a sampler over some shards.
        owners: who holds what; everybody hands over to the next.
        steps: how many each of them takes.
    """
    history: list[Any] = []
    samplers = [make(own) for own in owners[0]]
    for turn, now in enumerate(owners):
        state = gathered(samplers)
        samplers = [make(own) for own in now]
        for sampler in samplers:
            sampler.load_state_dict(state)
        for step in range(turn * steps, (turn + 1) * steps):
            draws = [sampler.draw(0.3, KEY.coins("draw", step)) for sampler in samplers]
            history.append(torch.cat([draw.indices for draw in draws]).tolist())
            history.append(torch.cat([draw.importance for draw in draws]).tolist())
            for sampler, draw in zip(samplers, draws, strict=True):
                sampler.observe(draw.indices.flip(0), growing_norms(draw.indices, step).flip(0))
            if step % 20 == 19:
                for sampler in samplers:
                    sampler.set_clip_norm(1.0 + 0.5 * math.sin(step))
        if isinstance(samplers[0], ImportanceSampler):
            sums = [sampler.sum_of_last_norms(0.7) for sampler in samplers]
            history.append(np.concatenate(sums).tolist())
    return [*history, plain(gathered(samplers))]


def law_draws_do_not_depend_on_the_owners(make: Make, population: int, count: int = 64) -> None:
    """Record by record, with equal importance, and equal sums and states: also where shards change hands."""
    alone = [Shards.whole(population, count)]
    expected = run(make, [alone, alone, alone], steps=30)
    for ranks in (2, 3, min(7, count), count):
        parts = dealt_out(population, count, ranks)
        assert run(make, [parts, parts, parts], steps=30) == expected
        assert run(make, [parts, alone, dealt_out(population, count, 2)], steps=30) == expected


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize(
    ("population", "count"), [(0, 4), (1, 4), (5, 8), (63, 64), (300, 8), (1500, 16)]
)
def test_draws_do_not_depend_on_the_owners(make: Make, population: int, count: int) -> None:
    law_draws_do_not_depend_on_the_owners(make, population, count)


def test_somebody_is_drawn() -> None:
    """So that the law above does not compare nothing with nothing."""
    history = run(SAMPLERS["importance"], [[Shards.whole(300, 8)]], steps=30)
    assert sum(len(drawn) for drawn in history[:60:2]) > 500


def test_records_keep_their_numbers_in_every_process() -> None:
    own = Shards.of_rank(10**10, 2**16, 2**16 - 1, 2**16)
    sampler = ImportanceSampler(own, 1.0, headroom=3.0)
    draw = sampler.draw(1e-3, KEY.coins("draw", 0))
    assert len(draw)
    assert draw.indices.min() >= own.records.start == (2**16 - 1) * 10**10 // 2**16
    assert draw.indices.max() < 10**10
    sampler.observe(draw.indices, torch.zeros(len(draw)))
    places = draw.indices.numpy() - own.records.start
    assert np.flatnonzero(np.isfinite(sampler._last_norms)).tolist() == places.tolist()


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_nobody_owns_nothing_and_goes_on(make: Make) -> None:
    idle = make(Shards(100, 4, 2, 2))
    draw = idle.draw(1.0, KEY.coins("draw", 0))
    assert len(draw) == 0
    idle.observe(draw.indices, draw.importance)
    idle.set_clip_norm(0.5)
    idle.load_state_dict(idle.state_dict())
    assert idle.population == 100


def test_records_of_others_are_refused() -> None:
    sampler = ImportanceSampler(Shards.of_rank(100, 4, 1, 4), 1.0, headroom=3.0)
    for stranger in (24, 50):
        with pytest.raises(InputError, match="does not exist here: 25 records from 25 on"):
            sampler.observe(torch.tensor([stranger]), torch.zeros(1))


# ── coins ────────────────────────────────────────────────────────────────────────────────────────────

NORMS = np.tile([0.05, 0.2, 0.3, 0.5, math.inf], 8)


def small(count: int = 8) -> ImportanceSampler:
    """Five records a shard, all shards alike."""
    sampler = ImportanceSampler(Shards.whole(40, count), 1.0, headroom=1.5, floor=0.1)
    sampler.observe(torch.arange(40), torch.from_numpy(NORMS))
    return sampler


def law_coins_of_shards_are_independent() -> None:
    """Frequencies as they should be, steps and records uncorrelated: records of two shards too (rules 1, 28)."""
    sampler = small()
    probabilities = 0.8 * small_importance() / sampler.clip_norm
    table = inclusions(lambda t: sampler.draw(0.8, KEY.coins("draw", t)), 1500, 40)
    accept_frequencies(table, probabilities)
    accept_freshness(table, probabilities)
    accept_independence(table, probabilities)


def small_importance() -> np.ndarray:
    slow = SlowSampler(40, 1.0, 1.5, 0.1)
    slow.norms = NORMS.tolist()
    return slow.importance()


def law_masks_of_shards_differ() -> None:
    """Within a step no two shards of many records draw alike: 2**-50 a pair."""
    shards = Shards.whole(6400)
    draw = UniformSampler(shards, 1.0).draw(0.5, KEY.coins("draw", 0))
    mask = torch.zeros(6400, dtype=torch.bool)
    mask[draw.indices] = True
    masks = {tuple(own.tolist()) for own in mask.view(64, 100)}
    assert len(masks) == 64


def law_frequencies_follow_while_records_move() -> None:
    sampler, shadow = small(), SlowSampler(40, 1.0, 1.5, 0.1)
    shadow.norms = NORMS.tolist()
    observe = sampler.observe

    def observe_both(indices: Tensor, norms: Tensor) -> None:
        observe(indices, norms)
        shadow.observe(indices, norms)

    sampler.observe = observe_both  # type: ignore[method-assign]
    accept_changing_frequencies(sampler, lambda: 0.4 * shadow.importance(), 0.4, 600)


LAWS = {name: law for name, law in vars().items() if name.startswith("law_")}
ONE_ARGUMENT = {"law_draws_do_not_depend_on_the_owners"}


@pytest.mark.parametrize("law", [LAWS[name] for name in LAWS if name not in ONE_ARGUMENT])
def test_law(law: Callable[[], None]) -> None:
    law()


# ── against one shard after the other ────────────────────────────────────────────────────────────────


@given(st.data())
def test_moving_all_shards_at_once_is_moving_one_after_the_other(data: st.DataObject) -> None:
    """Record by record in the same places, not in the same classes only."""
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    ends = np.concatenate([[0], np.cumsum(sizes)])
    labels = np.array(data.draw(lists_of(ends[-1])), dtype=np.uint8)
    together = RecordClasses(labels, 4, ends)
    apart = [
        RecordClasses(labels[begin:end], 4, np.array([0, end - begin]))
        for begin, end in pairwise(ends)
    ]
    for _ in range(3):
        new = np.array(data.draw(lists_of(ends[-1])), dtype=np.int64)
        moved = np.flatnonzero(data.draw(lists_of(ends[-1])))
        together.move(moved, new[moved])
        for (begin, end), own in zip(pairwise(ends), apart, strict=True):
            here = moved[(begin <= moved) & (moved < end)]
            own.move(here - begin, new[here])
        orders = [own.order + begin for own, begin in zip(apart, ends[:-1], strict=True)]
        assert together.order.tolist() == np.concatenate(orders).tolist()
        assert together.sizes.tolist() == [own.sizes[0].tolist() for own in apart]


def lists_of(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), min_size=int(length), max_size=int(length))


# ── states ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_state_that_lacks_own_shards_is_refused_and_changes_nothing() -> None:
    """Resume on fewer processes, and the checkpoint of one of them is forgotten."""
    one, other = (ImportanceSampler(own, 1.0, headroom=3.0) for own in dealt_out(100, 8, 2))
    one.observe(torch.arange(50), torch.full((50,), 0.1))
    other.observe(torch.arange(50, 100), torch.full((50,), 0.2))
    alone = ImportanceSampler(Shards.whole(100, 8), 1.0, headroom=3.0)
    with pytest.raises(InputError, match=r"without their state.*4 of 8 own shards.*shard 4"):
        alone.load_state_dict(one.state_dict())
    assert alone.last_norms.isinf().all()
    alone.load_state_dict(gathered([one, other]))
    assert alone.last_norms.tolist() == pytest.approx([0.1] * 50 + [0.2] * 50)


def test_a_dropped_shard_is_refused() -> None:
    sampler = ImportanceSampler(Shards.whole(100, 8), 1.0, headroom=3.0)
    state = sampler.state_dict()
    del state["shards"][5]
    with pytest.raises(InputError, match="reassigns records without their state"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("others", [Shards.whole(101, 8), Shards.whole(100, 16)])
def test_a_state_of_other_shards_is_refused(others: Shards) -> None:
    state = ImportanceSampler(others, 1.0, headroom=3.0).state_dict()
    sampler = ImportanceSampler(Shards.whole(100, 8), 1.0, headroom=3.0)
    with pytest.raises(InputError, match="another population or number of shards"):
        sampler.load_state_dict(state)


# ── broken on purpose ────────────────────────────────────────────────────────────────────────────────


def one_stream_for_all(key: bytes, _real: Any = randomness._block_cipher) -> Any:
    """Every shard reads what the first one reads."""

    class Blind:
        cipher = _real(key)

        def update_into(self, blocks: np.ndarray, buffer: np.ndarray) -> int:
            blocks.view("<u8")[:, 0] = 0
            return self.cipher.update_into(blocks, buffer)

    return Blind()


def by_own_place(self: Coins, shards: Any, wanted: Any, _real: Any = Coins.pairs) -> Any:
    """A process counts its shards from 0."""
    return _real(self, shards - shards[:1], wanted)


def front_to_back(self: Coins, shards: Any, wanted: Any, _real: Any = Coins.pairs) -> Any:
    """A process reads one stream, shard after shard."""
    return _real(self, np.zeros(1, dtype=np.int64), wanted.sum(keepdims=True))


def over_all_shards(self: RecordClasses, records: Any, labels: Any) -> None:
    """In an order that depends on the other shards: by the number of those that move."""
    shift = len(records) % 2
    MOVE(self, records[shift:], labels[shift:])
    MOVE(self, records[:shift], labels[:shift])


MOVE = RecordClasses.move


def of_importance(population: int = 300, count: int = 8) -> Callable[[], None]:
    return lambda: law_draws_do_not_depend_on_the_owners(SAMPLERS["importance"], population, count)


PLANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "one stream for all shards: masks": (
        randomness, "_block_cipher", one_stream_for_all, law_masks_of_shards_differ),
    "one stream for all shards: correlations": (
        randomness, "_block_cipher", one_stream_for_all, law_coins_of_shards_are_independent),
    "shards are counted by process": (Coins, "pairs", by_own_place, of_importance()),
    "one stream a process": (Coins, "pairs", front_to_back, of_importance()),
    "records move as others do": (RecordClasses, "move", over_all_shards, of_importance()),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_noticed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, bug, law = PLANTS[plant]
    monkeypatch.setattr(target, name, bug)
    with pytest.raises(AssertionError):
        law()
