"""Whole runs of the mechanism: what is refused, what is resumed, what the ledger proves at the end."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpis.accounting import CountSource, Entry, Gaussian, Mode, Release, read_ledger, verify_ledger
from dpis.accounting.workload import COUNT
from dpis.errors import BudgetExceededError, InputError
from dpis.mechanism import (
    Config,
    Contribution,
    LedgerJournal,
    Method,
    NormSum,
    plan_with_count,
)
from dpis.randomness import Key
from dpis.sampling import Draw
from dpis.training.run import Run, RunOptions

from .laws_of_releases import CLIPPING, everything_at_once
from .systems import PlainSums, Small, config, plan_of, rigged, rows, watching

KEY = Key.from_seed(11)
NORMS = (0.05, 0.2, 0.3, 1.0, 0.4, 0.1, 0.2)
RUNS = {
    "dpis": config(headroom=2.0, equivalent_batch=4),
    "dpis-reject": config(headroom=2.0, contribution=Contribution.REJECT, clip_norm=0.3),
    "dpis-clipping": config(**CLIPPING, epochs=3),
    "adaptive": config(Method.DPIS_ADAPTIVE, headroom=1.5),
    "adaptive-stale": config(Method.DPIS_ADAPTIVE, norm_sum=NormSum.STALE, epochs=3),
    "adaptive-clipping": everything_at_once(),
    "dp-sgd": config(Method.DP_SGD),
    "dp-sgd-decay": config(Method.DP_SGD_DECAY, decay_rate=0.1),
}
runs = pytest.mark.parametrize("c", RUNS.values(), ids=RUNS)


class Changing(Small):
    """Gradients that change with the steps, so that what was seen matters."""

    def __init__(self, c: Config, journal: LedgerJournal, key: Key = KEY) -> None:
        super().__init__(c, rows(*NORMS), key, journal, PlainSums(3))

    @property
    def records(self) -> Tensor:
        return self.first * (1 + 0.4 * math.sin(self.mechanism.step))

    @records.setter
    def records(self, first: Tensor) -> None:
        self.first = first


def header(c: Config):
    return plan_of(c).header(versions={"dpis": "test"}, seeded=True, diagnostics=False)


@pytest.mark.slow
@runs
def test_a_whole_run_verifies(c: Config, tmp_path: Path) -> None:
    journal = LedgerJournal.create(tmp_path / "l.jsonl", header(c))
    system = Changing(c, journal)
    updates = system.run()
    assert len(updates) == plan_of(c).workload.steps
    assert 0 < system.mechanism.fraction_spent <= 1
    with pytest.raises(BudgetExceededError):
        system.begin()
    journal.finish("0" * 64)
    verdict = verify_ledger(tmp_path / "l.jsonl")
    assert verdict.holds, verdict.problem
    assert verdict.epsilon_spent <= c.epsilon
    assert not any(update.isnan().any() for update in updates)


@pytest.mark.parametrize("noise", [math.nan, -50.0, -1e9, 0.0, 1e9])
def test_an_adaptive_run_never_overruns_the_filter(noise: float, tmp_path: Path) -> None:
    """Whatever norm sums are released: every event passes the filter, and an independent check agrees."""
    c = everything_at_once(epochs=4, reserve_share=0.5, norm_sum=NormSum.FULL_PASS)
    journal = LedgerJournal.create(tmp_path / "l.jsonl", header(c))
    Changing(c, journal, rigged(noise)).run()
    journal.finish("0" * 64)
    verdict = verify_ledger(tmp_path / "l.jsonl")
    assert verdict.holds, verdict.problem
    assert verdict.epsilon_spent > 0.95 * c.epsilon  # and hardly anything is left over


@runs
@pytest.mark.parametrize("stop", [2, 5, 8])
def test_a_restored_mechanism_goes_on_bit_for_bit(c: Config, stop: int, tmp_path: Path) -> None:
    """In the middle of an epoch and between epochs, over the ledger that was left behind."""
    whole = LedgerJournal.create(tmp_path / "whole.jsonl", header(c))
    expected = Changing(c, whole).run()
    whole.close()

    cut = LedgerJournal.create(tmp_path / "cut.jsonl", header(c))
    before = Changing(c, cut)
    advance(before, stop)
    saved = io.BytesIO()
    torch.save([before.mechanism.state_dict(), before.mechanism.own_state()], saved)
    advance(before, 2)  # lost in a crash: done again below, with the same events
    cut.close()

    reopened = LedgerJournal.reopen(tmp_path / "cut.jsonl", header(c))
    after = Changing(c, reopened)
    after.mechanism.load_state_dict(*torch.load(io.BytesIO(saved.getvalue())))
    rest = advance(after, len(expected) - stop)
    reopened.close()
    assert all(torch.equal(a, b) for a, b in zip(rest, expected[stop:], strict=True))
    entries = [read_ledger(tmp_path / name).entries for name in ("whole.jsonl", "cut.jsonl")]
    assert entries[0] == entries[1]


def advance(system: Small, steps: int) -> list[Tensor]:
    """So many steps, with the epochs they belong to. An epoch is ended with its last step."""
    released = []
    for _ in range(steps):
        if not system.mechanism.steps_left:
            system.begin()
        released.append(system.step())
        if not system.mechanism.steps_left:
            system.mechanism.end_epoch()
    return released


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_drawn_that_no_epoch_accounts_for() -> None:
    system = Small(config(), rows(*NORMS))
    with pytest.raises(BudgetExceededError, match="begin the next epoch"):
        system.mechanism.draw()
    system.begin()
    with pytest.raises(InputError, match="steps to go"):
        system.begin()
    with pytest.raises(InputError, match="steps to go"):
        system.mechanism.end_epoch()
    for _ in range(5):
        system.step()
    with pytest.raises(BudgetExceededError, match="begin the next epoch"):
        system.mechanism.draw()
    assert len(system.journal.entries) == 5


@pytest.mark.parametrize("given", [None, [0.1]])
def test_a_full_pass_is_of_all_records(given: list[float] | None) -> None:
    """Else the noise would be solved from norms that are stale, though the ledger speaks of a full pass."""
    system = Small(config(Method.DPIS_ADAPTIVE), rows(*NORMS))
    assert system.mechanism.wants_all_norms
    with pytest.raises(InputError, match="norms of all records"):
        system.mechanism.begin_epoch(None if given is None else torch.tensor(given))
    assert not system.journal.entries


def test_a_sum_takes_the_drawn_records_alone() -> None:
    system = Small(config(epochs=1), rows(*NORMS))
    system.begin()
    draw = system.mechanism.draw()
    total = system.mechanism.start_sum(draw, system.gradients.parameters)
    (tape,) = system.gradients.tapes(torch.ones(len(draw) + 1, 3, dtype=torch.float64))
    with pytest.raises(InputError, match="drawn records alone"):
        system.mechanism.add(total, tape)


def test_a_draw_serves_one_release() -> None:
    """Twice would be sticky coins; a draw of one's own has probabilities nobody knows."""
    system = Small(config(epochs=1), rows(*NORMS))
    system.begin()
    mechanism = system.mechanism
    draw = mechanism.draw()
    system.release(draw)
    for wrong in (draw, Draw(torch.tensor([1]), torch.tensor([1.0]))):
        with pytest.raises(BudgetExceededError, match="once for every draw"):
            system.release(wrong)
    assert (mechanism.step, mechanism.steps_left) == (1, 4)
    for _ in range(4):
        system.step()
    with pytest.raises(BudgetExceededError):
        system.release(draw)
    assert mechanism.steps_left == 0


def test_a_statistic_is_released_once_and_only_if_planned() -> None:
    """The same occasion has the same noise: a second release would give the difference away."""
    releases = (Release("mean", 30.0),)
    for method in (Method.DPIS, Method.DPIS_ADAPTIVE):
        mechanism = Small(config(method, releases=releases), rows(*NORMS), KEY).mechanism
        noisy = mechanism.release("mean", torch.zeros(2), sensitivity=0.5)
        assert noisy.shape == (2,)
        with pytest.raises(InputError, match="released already"):
            mechanism.release("mean", torch.ones(2), sensitivity=0.5)
        with pytest.raises(InputError, match="not in the plan"):
            mechanism.release("median", torch.ones(2), sensitivity=0.5)


def test_a_clip_norm_is_adapted_once_an_epoch() -> None:
    system = Small(everything_at_once(), rows(*NORMS), KEY, gradients=PlainSums(3))
    system.epoch()
    with pytest.raises(InputError, match="released already"):
        system.mechanism.end_epoch()
    restored = Small(everything_at_once(), rows(*NORMS), KEY, gradients=PlainSums(3))
    restored.mechanism.load_state_dict(system.mechanism.state_dict(), system.mechanism.own_state())
    with pytest.raises(InputError, match="released already"):
        restored.mechanism.end_epoch()


def test_a_release_has_the_noise_it_is_charged_for() -> None:
    releases = (Release("mean", 30.0),)
    mechanism = Small(config(releases=releases), rows(*NORMS), rigged(noise=1.0)).mechanism
    noisy = mechanism.release("mean", torch.zeros(3, dtype=torch.float64), sensitivity=0.5)
    assert noisy.tolist() == [pytest.approx(1.001 * 30 * 0.5, rel=1e-6)] * 3


# ── a released number of records ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.DPIS, Method.DP_SGD, Method.DPIS_ADAPTIVE])
def test_a_released_count_is_charged_first(method: Method, tmp_path: Path) -> None:
    c = config(method, n_public=100, batch_size=20, release_n=True)
    run = Run.start(tmp_path / "run", c, 120, KEY, RunOptions())
    workload, adaptive = run.mechanism.plan.workload, method is Method.DPIS_ADAPTIVE
    system = Small(c, rows(*[0.2] * 120), KEY, gradients=PlainSums(3))
    system.mechanism = run.mechanism
    system.run()
    run.finish("0" * 64)
    run.close()
    ledger = read_ledger(run.folder.ledger)
    assert ledger.entries[0] == Entry(COUNT, Gaussian(noise_multiplier=20.0))
    assert sum(entry.label == COUNT for entry in ledger.entries) == 1
    assert ledger.header.mode is (Mode.ADAPTIVE if adaptive else Mode.PREDECLARED)
    released = ledger.header.n_public_source is CountSource.RELEASED
    assert released == adaptive
    assert ledger.header.n_public == workload.n_public
    assert (workload.n_public != 100) == adaptive
    assert verify_ledger(run.folder.ledger).holds


def test_predeclared_a_released_count_sets_the_scale_of_updates_alone() -> None:
    c = config(n_public=100, batch_size=50, release_n=True)
    systems = [Small(c, rows(*[0.2] * population), rigged(0.0)) for population in (100, 80)]
    for system in systems:
        system.mechanism.release_count()
    terms = [system.begin() for system in systems]
    assert terms[0] == terms[1]
    updates = [system.step(range(10)) for system in systems]
    assert torch.allclose(updates[0] * 100, updates[1] * 80, rtol=1e-12)
    assert torch.allclose(updates[1], systems[1].records[:10].sum(0) / 80 / 0.5, rtol=1e-12)


@pytest.mark.parametrize("noise", [math.nan, -math.inf, -1e9, -3.0, 0.0, 2.0, 1e9, math.inf])
def test_a_released_count_stays_near_the_declared_one(noise: float) -> None:
    for b, rate_cap in ((33, 0.33), (50, 0.5), (10, 0.3), (82, 0.82)):
        c = config(
            Method.DPIS_ADAPTIVE, n_public=100, batch_size=b, rate_cap=rate_cap, release_n=True
        )
        mechanism = Small(c, rows(0.2, 0.2), rigged(noise)).mechanism
        plan = plan_with_count(plan_of(c), mechanism.release_count())
        assert 50 <= plan.workload.n_public <= 200
        assert plan.privacy.order == plan_of(c).privacy.order
        assert plan.privacy.releases[0] == plan_of(c).privacy.releases[0]
        if math.isnan(noise):
            assert plan.workload.n_public == 100


# ── what does not change the mechanism ───────────────────────────────────────────────────────────────


def test_the_real_engine_and_the_stand_in_agree() -> None:
    c = config(headroom=2.0, contribution=Contribution.REJECT, equivalent_batch=4)
    one, other = (Small(c, rows(*NORMS), KEY, gradients=g).run() for g in (None, PlainSums(3)))
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(one, other, strict=True))


def test_sgd_is_the_plain_mean_over_b() -> None:
    c = config(Method.SGD)
    system = Small(c, rows(*NORMS), KEY)
    terms = system.begin()
    assert (terms.noise_multiplier, terms.clip_norm) == (0.0, math.inf)
    assert torch.allclose(system.step([0, 3]), system.records[[0, 3]].sum(0) / 2, rtol=1e-12)
    assert system.journal.log == []


def test_no_noise_is_the_same_twice() -> None:
    with watching() as seen:
        Small(everything_at_once(), rows(*NORMS), KEY, gradients=PlainSums(3)).run()
    values = [value for _, value in seen]
    assert len(set(values)) == len(values) == 15 + 3 + 2
