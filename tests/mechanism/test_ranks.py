"""Several ranks release what one process releases: the same draws, sums, noise and events. Ranks are threads here.

Each law is tried with the bug planted that it is there for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpis.accounting import read_ledger
from dpis.accounting.workload import NORM_SUM
from dpis.errors import InputError
from dpis.group import Group
from dpis.mechanism import Config, Contribution, GroupJournal, LedgerJournal, Method, NormSum
from dpis.mechanism import mechanism as module
from dpis.mechanism import noisy_update as update_module
from dpis.noise import add_noise
from dpis.randomness import Key
from dpis.sampling import Shards

from .laws_of_releases import CLIPPING, everything_at_once
from .systems import Listener, PlainSums, Small, config, plan_of, rows, watching
from .threads import on_threads

KEY = Key.from_seed(11)
WIDTH = 40_000
"""Entries of the update: more than two tiles of noise, and more than one block of this test."""
RUNS = {
    "dpis": config(headroom=2.0, equivalent_batch=4),
    "reject": config(headroom=2.0, contribution=Contribution.REJECT, clip_norm=0.3),
    "clipping": config(**CLIPPING, epochs=3),
    "adaptive": config(Method.DPIS_ADAPTIVE, headroom=1.5),
    "adaptive-stale": config(Method.DPIS_ADAPTIVE, norm_sum=NormSum.STALE, epochs=3),
    "everything": everything_at_once(),
    "dp-sgd": config(Method.DP_SGD),
    "dp-sgd-decay": config(Method.DP_SGD_DECAY, decay_rate=0.1),
    "sgd": config(Method.SGD),
}


@dataclass
class Seen:
    """What a rank of a run saw: whom it drew, what was released, and which events were spent."""

    draws: list[tuple[list[int], list[float]]]
    updates: list[Tensor]
    events: list[Any]


def records_of(count: int, width: int = 3) -> Tensor:
    """Gradients of lengths from .02 to 1.5."""
    return rows(*(0.02 + 1.5 * (i * 0.37 % 1.0) for i in range(count)), width=width)


def run(c: Config, records: Tensor, group: Group | None = None) -> Seen:
    """A whole run, or a rank's part in it; gradients change with the steps, so that what was seen matters."""
    width = records.shape[1]
    system = Small(c, records, KEY, Listener(), PlainSums(width), group=group)
    mechanism, seen = system.mechanism, Seen([], [], [])
    for _ in range(c.epochs):
        system.begin()
        while mechanism.steps_left:
            draw = mechanism.draw()
            system.records = records * (1 + 0.4 * math.sin(mechanism.step))
            seen.draws.append((draw.indices.tolist(), draw.importance.tolist()))
            seen.updates.append(system.release(draw))
        mechanism.end_epoch()
    seen.events = system.journal.entries
    return seen


def law_ranks_release_what_one_process_does(c: Config, ranks: int, count: int = 23) -> None:
    records = records_of(count, 3)
    alone = run(c, records)
    seen = on_threads(ranks, lambda group: run(c, records, group))
    for step, (indices, importance) in enumerate(alone.draws):
        parts = [one.draws[step] for one in seen]
        assert list(chain.from_iterable(part[0] for part in parts)) == indices
        assert list(chain.from_iterable(part[1] for part in parts)) == importance
    for one in seen:
        assert one.events == alone.events
        for own, same, expected in zip(one.updates, seen[0].updates, alone.updates, strict=True):
            assert torch.equal(own, same), "all ranks hold the same bits"
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("c", RUNS.values(), ids=RUNS)
def test_ranks_release_what_one_process_does(c: Config, ranks: int) -> None:
    law_ranks_release_what_one_process_does(c, ranks)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_with_shards_and_ranks_that_hold_nobody(count: int) -> None:
    law_ranks_release_what_one_process_does(RUNS["dpis"], 4, count)
    law_ranks_release_what_one_process_does(RUNS["adaptive"], 4, count)


def law_every_entry_is_summed_and_noised_once(ranks: int, dtype: torch.dtype) -> None:
    """Over parameters that begin and end anywhere in blocks, slices and tiles."""
    sizes = {"b": (3, 7), "a": (WIDTH,), "empty": (0, 4), "c": (50, 333)}
    parameters = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    entries = sum(p.numel() for p in parameters.values())
    generator = torch.Generator().manual_seed(0)
    sums = [
        {n: torch.randn(p.shape, generator=generator).to(dtype) for n, p in parameters.items()}
        for _ in range(ranks)
    ]

    def released(group: Group) -> dict[str, Tensor]:
        noise = update_module.Noise(2.5, KEY.normals("noise", 3, entries))
        own = {name: value.clone() for name, value in sums[group.rank].items()}
        return update_module.noisy_update(
            own, parameters, noise, 0.25, group, expected_records=100.0
        )

    expected = {n: sum(one[n].double() for one in sums) for n in parameters}
    expected = add_noise(expected, 2.5, KEY.normals("noise", 3, entries))
    for update in on_threads(ranks, released):
        for name, value in expected.items():
            assert update[name].dtype == dtype
            close = (
                {"rtol": 2e-6, "atol": 1e-6}
                if dtype == torch.float32
                else {"rtol": 0, "atol": 1e-12}
            )
            torch.testing.assert_close(update[name].double(), 0.25 * value, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_entry_is_summed_and_noised_once(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_module, "BLOCK", 45_000)
    law_every_entry_is_summed_and_noised_once(ranks, dtype)


def test_sums_of_large_steps_are_sent_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand contributions that point one way: float32 would lose a record more."""
    kinds = set[torch.dtype]()
    real = update_module._Parts.read

    def read(self: Any, block: slice, room: int, kind: torch.dtype) -> Tensor:
        kinds.add(kind)
        return real(self, block, room, kind)

    monkeypatch.setattr(update_module._Parts, "read", read)
    one = {"w": torch.zeros(4)}

    def released(expected: float) -> Callable[[Group], Any]:
        return lambda group: update_module.noisy_update(
            {"w": torch.ones(4)}, one, None, 1.0, group, expected_records=expected
        )

    on_threads(2, released(4096.0))
    assert kinds == {torch.float32}
    on_threads(2, released(4097.0))
    assert kinds == {torch.float32, torch.float64}


def law_norm_sums_are_of_all_ranks(ranks: int) -> None:
    """K' has one value and one noise, whoever holds the norms."""
    c, records = RUNS["adaptive-stale"], records_of(23)
    with watching() as seen:
        run(c, records)
        alone = [value for name, value in seen if name == NORM_SUM]
        seen.clear()
        on_threads(ranks, lambda group: run(c, records, group))
    of_ranks = Counter(value for name, value in seen if name == NORM_SUM)
    assert len(alone) == c.epochs
    assert of_ranks == dict.fromkeys(alone, ranks)


def test_norm_sums_are_of_all_ranks() -> None:
    law_norm_sums_are_of_all_ranks(3)


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────


def law_events_are_on_disk_before_any_rank_goes_on(folder: Path) -> None:
    c = config(headroom=2.0)
    path, plan = folder / "ledger.jsonl", plan_of(c)
    header = plan.header(versions={}, seeded=True, diagnostics=False)
    records, problems = records_of(9), list[str]()

    def train(group: Group) -> None:
        own = LedgerJournal.create(path, header) if group.leads else None
        journal = GroupJournal(group, own)
        spend = journal.spend

        def slowly(entries: Any) -> None:
            spend(entries)
            if len(read_ledger(path).entries) < journal.position or not journal.position:
                problems.append(f"rank {group.rank} went on")

        journal.spend = slowly  # type: ignore[method-assign]
        system = Small(c, records, KEY, journal, PlainSums(3), group=group)
        for _ in range(c.epochs):
            system.epoch()
        group.gathered(None)
        journal.close()

    on_threads(2, train)
    assert not problems
    assert len(read_ledger(path).entries) == c.epochs * plan.workload.steps_per_epoch


def test_events_are_on_disk_before_any_rank_goes_on(tmp_path: Path) -> None:
    law_events_are_on_disk_before_any_rank_goes_on(tmp_path)


def test_an_event_that_is_refused_stops_all_ranks(tmp_path: Path) -> None:
    c = config(headroom=2.0)
    header = plan_of(c).header(versions={}, seeded=True, diagnostics=False)
    path, refused = tmp_path / "ledger.jsonl", list[type[BaseException]]()

    def train(group: Group) -> None:
        journal = GroupJournal(group, LedgerJournal.create(path, header) if group.leads else None)
        system = Small(c, records_of(9), KEY, journal, PlainSums(3), group=group)
        for _ in range(c.epochs):
            system.epoch()
        entries = plan_of(c).privacy.charge(system.mechanism.terms, 1)
        try:
            journal.spend(entries)
        except Exception as error:
            refused.append(type(error))
            raise
        finally:
            journal.close()

    with pytest.raises(Exception, match="plan"):
        on_threads(2, train)
    assert len(refused) == 2


# ── going on with another number of ranks ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("name", ["dpis", "everything", "dp-sgd"])
def test_a_run_goes_on_with_another_number_of_ranks(name: str, before: int, after: int) -> None:
    """Draws that were made ahead are released as they were made, each record of them by whoever has it now."""
    c, records = RUNS[name], records_of(23)
    steps = plan_of(c).workload.steps_per_epoch + 2  # in the middle of the second epoch
    left = plan_of(c).workload.steps - steps

    def first(group: Group) -> Any:
        system = Small(c, records, KEY, Listener(), PlainSums(3), group=group)
        _advance(system, records, steps)
        system.mechanism.draw_of(system.mechanism.step + group.rank % 2)
        own = {name: value.clone() for name, value in system.mechanism.own_state().items()}
        state = system.mechanism.state_dict()
        return state, own, _advance(system, records, left)

    begun = on_threads(before, first)
    own = {name: value for _, part, _ in begun for name, value in part.items()}

    def rest(group: Group) -> list[Tensor]:
        system = Small(c, records, KEY, Listener(), PlainSums(3), group=group)
        system.mechanism.load_state_dict(begun[0][0], own)
        return _advance(system, records, left)

    for updates in on_threads(after, rest):
        for update, expected in zip(updates, begun[0][2], strict=True):
            torch.testing.assert_close(update, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_place", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_done_again_with_other_sums_have_other_noise(by_place: bool, ranks: int) -> None:
    """Dropout goes by place in a rank's batch: the same noise over other sums would cancel in the difference."""
    c, records = RUNS["adaptive"], records_of(23)
    system = Small(c, records, KEY, Listener(), PlainSums(3))
    _advance(system, records, 3)
    state, own = system.mechanism.state_dict(), system.mechanism.own_state()
    unbroken = _advance(system, records, 4)

    def again(group: Group) -> list[Tensor]:
        other = Small(c, records, KEY, Listener(), PlainSums(3), group=group)
        other.mechanism.load_state_dict(state, own, by_place=by_place)
        return _advance(other, records, 4)

    updates = on_threads(ranks, again)[0]
    same = [torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(updates, unbroken, strict=True)]
    assert all(same) if ranks == 1 or not by_place else not any(same)


def test_records_are_not_reassigned_without_their_state() -> None:
    c, records = RUNS["dpis"], records_of(23)

    def first(group: Group) -> Any:
        system = Small(c, records, KEY, Listener(), PlainSums(3), group=group)
        _advance(system, records, 3)
        return system.mechanism.state_dict(), system.mechanism.own_state()

    (state, own), _ = on_threads(2, first)  # the second rank's part is lost

    with pytest.raises(InputError, match="shards is missing"):
        Small(c, records, KEY, Listener(), PlainSums(3)).mechanism.load_state_dict(state, own)


def _advance(system: Small, records: Tensor, steps: int) -> list[Tensor]:
    mechanism, updates = system.mechanism, []
    for _ in range(steps):
        if not mechanism.steps_left:
            system.begin()
        draw = mechanism.draw_of(mechanism.step)
        system.records = records * (1 + 0.4 * math.sin(mechanism.step))
        updates.append(system.release(draw))
        if not mechanism.steps_left:
            mechanism.end_epoch()
    return updates


# ── broken on purpose ────────────────────────────────────────────────────────────────────────────────


def noise_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = update_module.noisy_update

    def planted(sums: Any, parameters: Any, noise: Any, *rest: Any, **words: Any) -> Any:
        noisy = add_noise(sums, noise.std, noise.normals)
        return real(noisy, parameters, None, *rest, **words)

    monkeypatch.setattr(module, "noisy_update", planted)
    monkeypatch.setattr(update_module, "noisy_update", planted)


def one_coin_stream_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "numbers", property(lambda self: np.arange(len(self))))


def a_ranks_sum_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = update_module._added_up
    monkeypatch.setattr(update_module, "_added_up", lambda slices: real(slices[:-1]))


def the_tail_of_a_block_is_not_noised(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_little(sums: Any, std: float, normals: Any, begins: Any = None) -> Any:
        return add_noise({n: v[: len(v) - 1] for n, v in sums.items()}, std, normals, begins)

    monkeypatch.setattr(update_module, "add_noise", too_little)


def the_same_noise_in_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_the_beginning(sums: Any, std: float, normals: Any, begins: Any = None) -> Any:
        return add_noise(sums, std, normals, dict.fromkeys(sums, 0) if begins else None)

    monkeypatch.setattr(update_module, "add_noise", at_the_beginning)


def a_record_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Shards.of_rank.__func__

    def overlapping(cls: Any, population: int, count: int, rank: int, ranks: int) -> Shards:
        own = real(cls, population, count, rank, ranks)
        return Shards(population, count, max(0, own.first - count // 8), own.last)

    monkeypatch.setattr(Shards, "of_rank", classmethod(overlapping))


def own_sum_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """K' from the norms of one's own shards, as if there were no others."""
    real = module.Mechanism._release_sum_of_norms

    def planted(self: Any, *given: Any, **words: Any) -> float:
        group, self.group = (
            self.group,
            type("Deaf", (), {"gathered": lambda _, v: [v], "share": lambda _, t: None})(),
        )
        try:
            return real(self, *given, **words)
        finally:
            self.group = group

    monkeypatch.setattr(module.Mechanism, "_release_sum_of_norms", planted)


def coins_of_acceptance_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(self: Any, draw: Any) -> Any:
        return self._key.stream("accept", self.step).uniforms(len(draw))

    monkeypatch.setattr(module.Mechanism, "_acceptance_coins", by_place)


def alike(name: str) -> Callable[[], None]:
    return lambda: law_ranks_release_what_one_process_does(RUNS[name], 2)


def once() -> None:
    law_every_entry_is_summed_and_noised_once(2, torch.float64)


PLANTS = [
    (noise_on_every_rank, alike("dpis")),
    (noise_on_every_rank, once),
    (one_coin_stream_for_all_ranks, alike("dpis")),
    (one_coin_stream_for_all_ranks, alike("dp-sgd")),
    (a_ranks_sum_is_dropped, alike("dpis")),
    (a_ranks_sum_is_dropped, once),
    (the_tail_of_a_block_is_not_noised, once),
    (the_same_noise_in_every_slice, once),
    (a_record_on_two_ranks, alike("dpis")),
    (a_record_on_two_ranks, alike("dp-sgd")),
    (own_sum_of_norms, lambda: law_norm_sums_are_of_all_ranks(2)),
    (coins_of_acceptance_by_place, alike("reject")),
]


@pytest.mark.parametrize(
    ("plant", "law"), PLANTS, ids=[f"{plant.__name__}-{i}" for i, (plant, _) in enumerate(PLANTS)]
)
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    law: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    law()
    plant(monkeypatch)
    with pytest.raises((AssertionError, InputError, KeyError)):
        law()


def test_a_ledger_that_is_written_after_use_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on at once, and rank 0 writes when it gets round to it."""

    late = list[Any]()

    def spend(self: GroupJournal, entries: Any) -> None:
        self._position += len(entries)
        if self._ledger is not None:
            self._ledger.spend(late)
            late[:] = entries

    monkeypatch.setattr(GroupJournal, "spend", spend)
    with pytest.raises(AssertionError):
        law_events_are_on_disk_before_any_rank_goes_on(tmp_path)


def test_every_shard_has_coins_of_its_own() -> None:
    """Were they those of another, two records would be drawn together; over 400 steps that would show."""
    c = config(Method.DP_SGD, n_public=128, batch_size=32, epochs=100, epsilon=50.0)
    together = Counter[tuple[int, int]]()
    for indices, _ in run(c, records_of(128)).draws:
        drawn = [i for i in indices if i % 2 == 0]  # the first record of each of 64 shards
        together.update((a, b) for a in drawn[:6] for b in drawn if b > a)
    assert max(together.values()) < 0.9 * 400 * 0.25
