"""Laws that every kind of plan has to pass, played as a mechanism plays them; then bugs that a law must notice."""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from dp_accounting import rdp

from dpis.accounting import (
    Accountant,
    AdaptivePlan,
    Budget,
    Cadence,
    Composition,
    CountSource,
    Entry,
    Event,
    Header,
    LedgerWriter,
    NoPrivacy,
    OpenEndedPlan,
    PoissonGaussian,
    PredeclaredPlan,
    PrivacyPlan,
    Release,
    RenyiFilter,
    Terms,
    Unguarded,
    Workload,
    epsilon_by_pld,
    epsilon_by_rdp,
    exponential_decay,
    plan_adaptive,
    plan_predeclared,
    read_ledger,
)
from dpis.accounting.plans import BudgetedPlan
from dpis.accounting.workload import GRADIENT, NORM_SUM
from dpis.errors import BudgetExceededError, DpisError, InputError

BUDGET = Budget(2.0, 1e-4)
SHORT = Workload.create(n_public=60, batch_size=12, epochs=3)
FALLING = Workload.create(n_public=60, batch_size=12, epochs=3, kappa="1:0.5")
MEAN = Release("mean", 20.0)
K_STAR = Release(NORM_SUM, 30.0, Cadence.BETWEEN_EPOCHS)
C = 0.7


@functools.cache
def plans() -> dict[str, PrivacyPlan]:
    """At least one of every kind, by name."""
    by_renyi = {"accountant": Accountant.RDP}
    both = [Cadence.EACH_EPOCH, Cadence.BETWEEN_EPOCHS]
    decay = exponential_decay(0.5, 3)
    return {
        "predeclared": plan_predeclared(BUDGET, SHORT, **by_renyi),
        "by pld": plan_predeclared(BUDGET, SHORT),
        "decaying": plan_predeclared(BUDGET, SHORT, noise_shape=decay, **by_renyi),
        "with releases": plan_predeclared(BUDGET, FALLING, releases=[MEAN, K_STAR], **by_renyi),
        "adaptive": plan_adaptive(BUDGET, SHORT),
        "adaptive with releases": plan_adaptive(
            BUDGET, SHORT, releases=[MEAN], norm_releases_per_epoch=both
        ),
        "open-ended": OpenEndedPlan(
            workload=Workload.create(n_public=60, batch_size=12, epochs=1), noise_multiplier=1.3
        ),
        "sgd": NoPrivacy(workload=SHORT),
    }


EPOCHS = 3
NORM_SUMS = [
    (60 * C,) * 3,
    (30 * C, 20 * C, 25 * C),
    (math.nan, -math.inf, math.inf),
    (0.0, 1e300, 0.0),
]
"""What the noise may leave of ``K'``, epoch by epoch."""


def played(plan: PrivacyPlan, norm_sums: tuple[float, ...] = NORM_SUMS[1]) -> Iterator[Entry]:
    """Every event of a run in its order, as a mechanism charges them."""
    spent: Counter[Event] = Counter()

    def charged(entries: list[Entry]) -> list[Entry]:
        spent.update(entry.event for entry in entries)
        return entries

    def due(cadence: Cadence) -> list[Entry]:
        return [Entry(r.label, r.event) for r in plan.releases if r.cadence is cadence]

    yield from charged(due(Cadence.ONCE))
    for epoch, norm_sum in enumerate(norm_sums, start=1):
        plan.require_epoch(epoch)
        yield from charged(due(Cadence.EACH_EPOCH))
        terms = plan.terms(epoch, C, norm_sum if plan.adapts else None, spent)
        yield from charged(plan.charge(terms, plan.workload.steps_per_epoch))
        if epoch != plan.last_epoch:
            yield from charged(due(Cadence.BETWEEN_EPOCHS))


def composed(entries: list[Entry]) -> Composition:
    return Composition.of(*(entry.event for entry in entries))


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────


def law_a_whole_run_fits_its_claim(plan: PrivacyPlan) -> None:
    """Whatever norm sums are released: the guard admits it all, and dp-accounting finds no more than was claimed."""
    for norm_sums in NORM_SUMS if plan.adapts else NORM_SUMS[:1]:
        guard, entries = plan.guard(), list(played(plan, norm_sums))
        for entry in entries:
            guard.admit(entry.event)
        if plan.claim is None:
            continue
        assert sum(entry.label == GRADIENT for entry in entries) == plan.workload.steps
        if plan.adapts:
            accountant = rdp.RdpAccountant([plan.order])
            accountant.compose(composed(entries).to_dp_accounting())
            epsilon = accountant.get_epsilon(plan.claim.delta)
        else:
            by = epsilon_by_pld if plan.accountant is Accountant.PLD else epsilon_by_rdp
            epsilon = by(composed(entries), plan.claim.delta)
        assert epsilon <= plan.claim.epsilon * (1 + 1e-9)
        assert epsilon > 0.9 * plan.claim.epsilon  # and does not waste it


def law_the_guard_refuses_one_more(plan: PrivacyPlan) -> None:
    """And leaves what was spent as it was; without a claim there is nothing that could be refused."""
    guard, entries = plan.guard(), list(played(plan))
    for entry in entries:
        guard.admit(entry.event)
    spent = guard.fraction_spent
    for entry in entries[-1:]:
        if plan.claim is None:
            guard.admit(entry.event)
            continue
        with pytest.raises(BudgetExceededError, match=r"not released|not covered"):
            guard.admit(entry.event)
        assert guard.fraction_spent == spent


def law_the_header_gives_the_same_guard(plan: PrivacyPlan, folder: Any) -> None:
    """Written and read again, it admits and refuses the same events and says the same of the budget."""
    if plan.claim is None:
        with pytest.raises(InputError, match="needs a claim"):
            plan.header(CountSource.GIVEN)
        return
    header = plan.header(CountSource.GIVEN)
    assert (header.claim, header.adjacency) == (plan.claim, plan.adjacency)
    assert header.n_public == plan.workload.n_public
    path = folder / "ledger.jsonl"
    LedgerWriter.create(path, header).close()
    ours, theirs = plan.guard(), read_ledger(path).header.guard()
    assert type(ours) is type(theirs)
    stream = [entry.event for entry in played(plan)]
    costly = PoissonGaussian(sampling_rate=1.0, noise_multiplier=0.3)
    for event in [costly, *stream, stream[-1], costly]:
        assert admits(ours, event) == admits(theirs, event)
        assert ours.fraction_spent == theirs.fraction_spent


def admits(guard: Any, event: Event) -> bool:
    try:
        guard.admit(event)
    except BudgetExceededError:
        return False
    return True


def law_spending_rises_from_nothing_to_the_whole(plan: PrivacyPlan) -> None:
    guard = plan.guard()
    fractions = [guard.fraction_spent]
    for entry in played(plan):
        guard.admit(entry.event)
        fractions.append(guard.fraction_spent)
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert fractions[-1] == pytest.approx(0.0 if plan.claim is None else 1.0, abs=1e-3)


def law_a_plan_has_its_epochs_and_no_others(plan: PrivacyPlan) -> None:
    endless = isinstance(plan, OpenEndedPlan)
    beyond = [0, -1] if endless else [0, -1, EPOCHS + 1, EPOCHS + 100]
    for epoch in beyond:
        with pytest.raises(BudgetExceededError, match="not covered"):
            plan.require_epoch(epoch)
        with pytest.raises(BudgetExceededError, match="not covered"):
            plan.terms(epoch, C, 40 * C if plan.adapts else None, {})
    if endless:
        assert plan.terms(10**6, C, None, {}) == replace(plan.terms(1, C, None, {}), epoch=10**6)


def law_steps_are_charged_as_they_are_taken(plan: PrivacyPlan) -> None:
    """The rate and the noise of the terms, once a step. Only what has no noise at all is free, and has no epsilon."""
    for epoch in range(1, EPOCHS + 1):
        terms = plan.terms(epoch, C, 40 * C if plan.adapts else None, {})
        charged = plan.charge(terms, 4)
        if terms.noise_multiplier == 0:
            assert plan.claim is None
            assert charged == []
            assert terms.clip_norm == math.inf
            assert plan.epsilon_of(Composition(), 1e-5) == math.inf
            continue
        step = PoissonGaussian(
            sampling_rate=terms.sampling_rate, noise_multiplier=terms.noise_multiplier
        )
        assert charged == [Entry(GRADIENT, step)] * 4
        assert terms.clip_norm == C
        assert terms.equivalent_batch == pytest.approx(terms.sampling_rate * plan.workload.n_public)
        if not plan.adapts:
            assert (
                terms.noise_multiplier
                == plan.planned_noise[min(epoch, len(plan.planned_noise)) - 1]
            )
    if plan.adapts:  # and what was spent before is not there to be spent again
        poorer = plan.terms(2, C, 40 * C, Counter(entry.event for entry in played(plan, (60 * C,))))
        assert poorer.noise_multiplier > plan.terms(2, C, 40 * C, {}).noise_multiplier


def law_epsilon_so_far_is_sound(plan: PrivacyPlan) -> None:
    """Of what is fixed beforehand it is computed; of what was chosen on the way it is the claim, from the start."""
    entries = list(played(plan))
    for count in {0, len(entries) // 2, len(entries)}:
        spent = composed(entries[:count])
        found = plan.epsilon_of(spent, BUDGET.delta)
        if plan.adapts:
            assert found == BUDGET.epsilon
        elif entries:
            assert found == (epsilon_by_pld(spent, BUDGET.delta) if count else 0.0)
            assert found <= BUDGET.epsilon or plan.claim is None
    if plan.adapts:
        with pytest.raises(InputError, match="claims epsilon at delta"):
            plan.epsilon_of(composed(entries), BUDGET.delta / 2)
    elif entries:
        for delta in (0.0, 1.0, -1.0, math.nan):
            with pytest.raises(InputError, match="delta must lie"):
                plan.epsilon_of(composed(entries), delta)
        tiny = plan.epsilon_of(composed(entries), 1e-18)  # too small for PLD
        assert tiny == epsilon_by_rdp(composed(entries), 1e-18)


def law_only_what_is_planned_is_released(plan: PrivacyPlan) -> None:
    for release in plan.releases:
        assert plan.release(release.label, release.cadence) == release
    for label in ("another", GRADIENT):
        with pytest.raises(InputError, match="nobody would pay"):
            plan.release(label)
    if plan.adapts:
        plan.release(NORM_SUM, Cadence.EACH_EPOCH)


def law_a_released_count_moves_what_adapts(plan: PrivacyPlan) -> None:
    """The order of the filter and the noise of other releases were fixed before it; the claim is the same."""
    if not plan.adapts:
        with pytest.raises(InputError, match="cannot follow"):
            plan.with_count(80)
        return
    anew = plan.with_count(80)
    assert anew.workload == replace(plan.workload, n_public=80)
    kept = ("claim", "adjacency", "order", "rate_cap", "reserve_share")
    assert all(getattr(anew, name) == getattr(plan, name) for name in kept)
    labels = [[(r.label, r.cadence) for r in p.releases] for p in (plan, anew)]
    assert labels[0] == labels[1]
    assert [r for r in anew.releases if r.label != NORM_SUM] == [
        r for r in plan.releases if r.label != NORM_SUM
    ]
    same = plan.with_count(plan.workload.n_public)
    assert same.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=1e-3)
    assert replace(same, noise_multiplier=plan.noise_multiplier) == plan


def law_alike_means_alike(plan: PrivacyPlan) -> None:
    """Where the order of epochs is said not to matter, no two steps differ; no batch passes the largest."""
    steps = {entry.event for entry in played(plan) if entry.label == GRADIENT}
    assert not (plan.same_terms_throughout and len(steps) > 1)
    for event in steps:
        assert event.sampling_rate * plan.workload.n_public <= plan.largest_batch * (1 + 1e-12)


LAWS = [law for name, law in sorted(globals().items()) if name.startswith("law_")]


def obeys(law: Callable[..., None], plan: PrivacyPlan, folder: Any) -> None:
    law(plan, folder) if law is law_the_header_gives_the_same_guard else law(plan)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", list(plans()))
def test_every_plan(law, name, tmp_path):
    obeys(law, plans()[name], tmp_path)


def test_every_kind_is_here():
    def kinds(kind: type) -> set[str]:
        own = set() if inspect.isabstract(kind) else {kind.__name__}
        return own.union(*(kinds(child) for child in kind.__subclasses__()))

    assert kinds(PrivacyPlan) == {type(plan).__name__ for plan in plans().values()}


def test_noise_that_cannot_be_accounted_for_is_refused():
    for noise in (1e-3, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="noise_multiplier"):
            OpenEndedPlan(workload=SHORT, noise_multiplier=noise)


def test_without_noise_epsilon_is_infinite_before_and_after_any_step():
    plan = OpenEndedPlan(workload=SHORT, noise_multiplier=0.0)
    event = PoissonGaussian(sampling_rate=0.1, noise_multiplier=1.0)
    for spent in (Composition(), Composition.of(event)):
        assert plan.epsilon_of(spent, 1e-5) == math.inf


@pytest.mark.parametrize(("n_public", "batch_size"), [(1989, 7), (999, 21), (60_000, 512)])
@pytest.mark.parametrize("norm_sum", [-math.inf, math.nan, 0.0, math.inf])
def test_every_norm_sum_gives_terms_also_at_the_largest_rate(n_public, batch_size, norm_sum):
    """``(b·C)/(n·C)`` may be a last bit below ``b/n``."""
    workload = Workload.create(n_public=n_public, batch_size=batch_size, epochs=2)
    plan = plan_adaptive(Budget(4.0, 1e-5), workload, rate_cap=1.0)
    for clip_norm in (0.1, 0.7, 1.3):
        terms = plan.terms(1, clip_norm, norm_sum, {})
        assert batch_size / n_public <= terms.sampling_rate <= 1


# ── bugs ─────────────────────────────────────────────────────────────────────────────────────────────

TERMS, CHARGE, HEADER = PrivacyPlan.terms, PrivacyPlan.charge, PredeclaredPlan.header
ADAPTED, FILTERED, WITH_COUNT = AdaptivePlan.terms, AdaptivePlan.header, AdaptivePlan.with_count


@dataclass(frozen=True)
class Plant:
    """A bug in a kind of plan, and the law that has to notice."""

    what: str
    kind: type
    name: str
    bug: Any
    law: Callable[..., None]
    plan: str

    def __str__(self) -> str:
        return self.what


def less_noise(self: PrivacyPlan, *given: Any) -> Terms:
    terms = TERMS(self, *given)
    return replace(terms, noise_multiplier=terms.noise_multiplier * 2 / 3)


def without_releases(self: PredeclaredPlan, source: CountSource) -> Header:
    return replace(HEADER(self, source), planned=self.runs[1:])


def at_another_order(self: AdaptivePlan, source: CountSource) -> Header:
    return replace(FILTERED(self, source), filter_order=self.order + 5)


def overclaims(self: AdaptivePlan, source: CountSource) -> Header:
    return replace(FILTERED(self, source), claim=Budget(BUDGET.epsilon / 2, BUDGET.delta))


PLANTS = [
    Plant("terms with two thirds of the noise", PrivacyPlan, "terms", less_noise,
          law_a_whole_run_fits_its_claim, "predeclared"),
    Plant("a step is charged as if it were noisier", PrivacyPlan, "charge",
          lambda self, terms, n: CHARGE(self, replace(terms, noise_multiplier=2 * terms.noise_multiplier), n),
          law_steps_are_charged_as_they_are_taken, "open-ended"),
    Plant("a step of every epoch is free", PrivacyPlan, "charge", lambda self, terms, n: CHARGE(self, terms, n - 1),
          law_a_whole_run_fits_its_claim, "adaptive"),
    Plant("private steps are free", PrivacyPlan, "charge", lambda self, terms, n: [],
          law_steps_are_charged_as_they_are_taken, "open-ended"),
    Plant("what was spent is forgotten", AdaptivePlan, "terms",
          lambda self, epoch, C, K, spent: ADAPTED(self, epoch, C, K, {}),
          law_a_whole_run_fits_its_claim, "adaptive"),
    Plant("the adaptive plan has no filter", AdaptivePlan, "guard", lambda self: Unguarded(),
          law_the_guard_refuses_one_more, "adaptive"),
    Plant("the predeclared plan is not followed", PredeclaredPlan, "guard", lambda self: Unguarded(),
          law_the_guard_refuses_one_more, "with releases"),
    Plant("a filter with twice the budget", AdaptivePlan, "guard",
          lambda self: RenyiFilter(Budget(2 * BUDGET.epsilon, BUDGET.delta), self.order),
          law_spending_rises_from_nothing_to_the_whole, "adaptive"),
    Plant("a filter at another order than the header's", AdaptivePlan, "header", at_another_order,
          law_the_header_gives_the_same_guard, "adaptive"),
    Plant("a header that claims less than the plan", AdaptivePlan, "header", overclaims,
          law_the_header_gives_the_same_guard, "adaptive"),
    Plant("a header without the releases", PredeclaredPlan, "header", without_releases,
          law_the_header_gives_the_same_guard, "with releases"),
    Plant("an open-ended run gets a ledger", OpenEndedPlan, "header", lambda self, source: None,
          law_the_header_gives_the_same_guard, "open-ended"),
    Plant("epochs beyond the plan", PrivacyPlan, "require_epoch", lambda self, epoch: None,
          law_a_plan_has_its_epochs_and_no_others, "predeclared"),
    Plant("an open end that ends", OpenEndedPlan, "last_epoch", 1, law_a_plan_has_its_epochs_and_no_others,
          "open-ended"),
    Plant("sgd reports an epsilon", NoPrivacy, "epsilon_of", lambda self, spent, delta: 0.0,
          law_steps_are_charged_as_they_are_taken, "sgd"),
    Plant("sgd clips", NoPrivacy, "terms", TERMS, law_steps_are_charged_as_they_are_taken, "sgd"),
    Plant("epsilon from noise that was chosen on the way", AdaptivePlan, "epsilon_of", PrivacyPlan.epsilon_of,
          law_epsilon_so_far_is_sound, "adaptive"),
    Plant("epsilon is the claim only", PrivacyPlan, "epsilon_of", lambda self, spent, delta: 0.5,
          law_epsilon_so_far_is_sound, "open-ended"),
    Plant("an unplanned release", PrivacyPlan, "release", lambda self, label, cadence=Cadence.ONCE: MEAN,
          law_only_what_is_planned_is_released, "with releases"),
    Plant("a released count chooses the order", AdaptivePlan, "with_count",
          lambda self, n: replace(WITH_COUNT(self, n), order=self.order + 1),
          law_a_released_count_moves_what_adapts, "adaptive with releases"),
    Plant("a released count drops the other releases", AdaptivePlan, "with_count",
          lambda self, n: plan_adaptive(self.budget, replace(self.workload, n_public=n), order=self.order),
          law_a_released_count_moves_what_adapts, "adaptive with releases"),
    Plant("the order of decaying noise does not matter", PrivacyPlan, "same_terms_throughout", True,
          law_alike_means_alike, "decaying"),
    Plant("adaptive steps count as alike", PrivacyPlan, "same_terms_throughout", True, law_alike_means_alike,
          "adaptive"),
    Plant("the largest batch leaves the cap out", AdaptivePlan, "largest_batch", 12.0, law_alike_means_alike,
          "adaptive"),
    Plant("the claim is half of the budget", BudgetedPlan, "claim",
          property(lambda self: Budget(self.budget.epsilon / 2, self.budget.delta)),
          law_a_whole_run_fits_its_claim, "predeclared"),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_bug_is_noticed(plant, monkeypatch, tmp_path):
    plan = plans()[plant.plan]
    obeys(plant.law, plan, tmp_path)
    (tmp_path / "ledger.jsonl").unlink(missing_ok=True)
    monkeypatch.setattr(plant.kind, plant.name, plant.bug)
    with pytest.raises((AssertionError, DpisError, pytest.fail.Exception)):
        obeys(plant.law, plan, tmp_path)
