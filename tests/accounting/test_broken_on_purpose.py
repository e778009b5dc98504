"""For each rule of the mechanism that concerns accounting: plant the bug, and a law must fail.

The laws stand in the other test files, where they hold for the real code. Here each is run against a
broken one. A law that still passes would be a check that cannot fail.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dpis.accounting import (
    Accountant,
    Adjacency,
    Budget,
    Gaussian,
    NormSumBounds,
    PlannedSequence,
    PoissonGaussian,
    Release,
    RenyiFilter,
    events,
    ledger,
    ledger_writer,
    plans,
    pld,
    renyi,
    verification,
)
from dpis.accounting import filter as filter_module
from dpis.accounting import predeclared as plan
from dpis.accounting.renyi import renyi_divergence
from dpis.errors import BudgetExceededError, DpisError, InputError

from . import (
    test_accountants,
    test_adaptive,
    test_filter,
    test_ledger,
    test_predeclared,
    test_renyi,
    test_verify,
)


@dataclass(frozen=True)
class Plant:
    """A bug: what is replaced by what, and the law that has to notice."""

    rule: str
    target: Any
    name: str
    bug: Any
    law: Callable[..., None]
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.rule


def lacks_factor_two(event, order):
    """The displays before Eq. 13: exp((m² - m)/σ²) instead of half of it is σ smaller by √2."""
    if isinstance(event, Gaussian):
        return renyi_divergence(event, order)
    z = event.noise_multiplier / math.sqrt(2)
    return renyi_divergence(
        PoissonGaussian(sampling_rate=event.sampling_rate, noise_multiplier=z), order
    )


def amplified_norm_sum(self):
    return PoissonGaussian(sampling_rate=0.01, noise_multiplier=self.noise_multiplier)


def cost_to_the_filter(event, order):
    """As the filter of a run has it."""
    return RenyiFilter(Budget(100.0, 1e-5), order).cost(event)


def any_order(self, event):
    """A minimum over orders, taken at run time."""
    counts = {**self._counts, event: self._counts.get(event, 0) + 1}
    epsilon, _ = renyi.best_order(events.Composition(tuple(counts.items())), 1e-5)
    if epsilon > self.rho_budget + renyi.conversion_offset(self.order, 1e-5):
        raise BudgetExceededError("over")
    self._counts = counts


class AsksNothing(filter_module.Guard):
    """Admits whatever comes."""

    fraction_spent = 0.0

    def admit(self, event):
        pass


def forgets_the_torn_line(path):
    return dataclasses.replace(ledger.read_ledger(path), torn=False)


def tells_who_was_drawn(index, entry):
    return {**ledger.entry_body(index, entry), "candidates": 17}


def takes_any_event(data):
    return Gaussian(noise_multiplier=data.get("noise_multiplier", 1.0))


def law_of_verify_on_one_grid(folder):
    """What may cost more than the claim is looked at on ever finer grids, which takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_INTERVALS", verification._INTERVALS[:1])
        test_verify.law_a_thousandth_too_much_is_found_out(folder)


PLANTS = [
    Plant("3 the sampling rate may pass 1", events.PoissonGaussian, "__post_init__", lambda self: None,
          lambda: _raises(lambda: PoissonGaussian(sampling_rate=1.7, noise_multiplier=1.0))),
    Plant("4 K_tilde is not clipped", NormSumBounds, "clip", lambda self, raw: raw,
          test_adaptive.law_released_norm_sums_stay_in_their_bounds),
    Plant("4 NaN passes through", NormSumBounds, "clip", lambda self, raw: min(max(self.lowest, raw), self.highest),
          test_adaptive.law_released_norm_sums_stay_in_their_bounds),
    Plant("6 K' accounted as subsampled", Release, "event", property(amplified_norm_sum),
          test_adaptive.law_norm_sums_are_charged_once_an_epoch),
    Plant("7 K* accounted as subsampled", Release, "event", property(amplified_norm_sum),
          test_predeclared.law_k_star_is_an_unsampled_gaussian),
    Plant("8 K released more often than charged", plans, "planned_runs",
          lambda w, z, r, _real=plans.planned_runs: list(_real(w, z, r))[:1],
          test_adaptive.law_norm_sums_are_charged_once_an_epoch),
    Plant("11 Eq. 13 without its factor 2", filter_module, "renyi_divergence", lacks_factor_two,
          lambda: test_renyi.law_both_directions_are_bounded(cost_to_the_filter)),
    Plant("13 the norm sum does not enter the multiplier", filter_module, "renyi_divergence",
          lambda event, order: event.sampling_rate,
          lambda: test_renyi.law_divergence_rises_with_the_norm_sum(cost_to_the_filter)),
    Plant("filter: the minimum over orders at run time", RenyiFilter, "admit", any_order,
          test_adaptive.law_the_order_is_fixed_beforehand),
    Plant("filter: nothing is refused", RenyiFilter, "admit",
          lambda self, event: self._counts.update({event: self._counts.get(event, 0) + 1}),
          test_adaptive.law_the_order_is_fixed_beforehand),
    Plant("filter: the conversion is left out of the budget", filter_module, "renyi_budget",
          lambda budget, order: budget.epsilon, test_adaptive.law_the_order_is_fixed_beforehand),
    Plant("plan: noise a third too small", plan, "smallest_parameter",
          lambda *a, _real=plan.smallest_parameter, **k: _real(*a, **k) * 2 / 3,
          lambda: _keyerror_is_a_failure(test_predeclared.law_a_plan_keeps_its_budget)),
    Plant("plan: noise half as much again", plan, "planned_runs",
          lambda w, z, r, _real=plan.planned_runs: _real(w, [x / 1.5 for x in z], r),
          test_predeclared.law_a_plan_keeps_its_budget),
    Plant("plan: steps beyond its end", PlannedSequence, "admit",
          lambda self, event: None, test_filter.law_the_plan_is_followed_to_its_end_and_no_further),
    Plant("plan: a costlier event passes for the planned one", PoissonGaussian, "dominates",
          lambda self, other: True, test_filter.law_the_plan_is_followed_to_its_end_and_no_further),
    Plant("20 a line of the ledger tells how many were drawn", ledger_writer, "entry_body", tells_who_was_drawn,
          test_ledger.law_only_what_is_public_stands_in_a_ledger, ("file",)),
    Plant("21 the ledger waits in a buffer", ledger_writer, "write_through",
          lambda file, data: file.write(data), test_ledger.law_an_event_is_on_disk_before_record_returns,
          ("file",)),
    Plant("21 the ledger does not wait for the disk", ledger_writer, "write_through",
          lambda file, data: (file.write(data), file.flush()),
          test_ledger.law_an_event_is_on_disk_before_record_returns, ("file",)),
    Plant("21 the writer asks no guard", ledger.Header, "guard", lambda self: AsksNothing(),
          test_ledger.law_an_event_beyond_the_plan_is_never_recorded, ("file",)),
    Plant("21 a line is not chained to the one before", ledger, "_chained_hash",
          lambda previous, text: hashlib.sha256(text.encode()).hexdigest(),
          test_ledger.law_lines_of_two_runs_do_not_mix, ("folder",)),
    Plant("21 a torn event is forgotten", verification, "read_ledger", forgets_the_torn_line,
          test_verify.law_a_torn_event_counts_as_spent, ("folder", "header")),
    Plant("22 replace-one passes for add-remove", Adjacency, "parse", lambda name: Adjacency.ADD_REMOVE,
          test_ledger.law_other_adjacencies_are_refused, ("folder",)),
    Plant("22 events of an unknown kind pass for Gaussians", ledger, "event_from_json", takes_any_event,
          test_ledger.law_events_of_an_unknown_kind_are_refused, ("folder",)),
    Plant("22 unknown accountants pass for pld", Accountant, "parse", classmethod(lambda *_: Accountant.PLD),
          test_accountants.law_unknown_accountants_raise),
    Plant("verify: believes the claim", verification, "_epsilon", lambda _, __, claim: verification._Bound(claim),
          test_verify.law_a_claim_below_its_events_is_found_out, ("folder", "header")),
    Plant("verify: a plan may cost a hundredth more than the claim", verification, "_ROUNDING", 1e-2,
          law_of_verify_on_one_grid, ("folder",)),
    Plant("verify: a filter may be overrun by a hundredth", verification, "_ROUNDING", 1e-2,
          test_verify.law_a_filter_overrun_by_a_thousandth_is_found_out, ("folder",)),
    Plant("verify: does not compare with the plan", events.PoissonGaussian, "dominates", lambda self, other: True,
          test_verify.law_events_the_plan_does_not_cover_are_found_out, ("folder", "header")),
    Plant("verify: does not replay the filter", verification, "_check_adaptive", lambda ledger: 0.0,
          test_verify.law_an_overrun_filter_is_found_out_at_its_line, ("folder",)),
]  # fmt: skip


def _raises(call):
    with pytest.raises(InputError, match="sampling_rate"):
        call()


def _keyerror_is_a_failure(law):
    try:
        law()
    except KeyError as error:  # the planted value was never evaluated: the plan notices by itself
        raise AssertionError from error


SLOW = ("verify: does not compare with the plan", "21 a torn event is forgotten")


@pytest.mark.parametrize(
    "plant",
    [pytest.param(p, marks=pytest.mark.slow if p.rule in SLOW else (), id=p.rule) for p in PLANTS],
)
def test_a_planted_bug_is_noticed(plant, monkeypatch, tmp_path):
    resources = {
        "file": lambda: tmp_path / "l.jsonl",
        "folder": lambda: tmp_path,
        "header": test_verify.predeclared_header,
    }
    arguments = [resources[need]() for need in plant.needs]
    monkeypatch.setattr(plant.target, plant.name, plant.bug)
    with pytest.raises((AssertionError, DpisError, pytest.fail.Exception)):
        plant.law(*arguments)


def test_rounding_left_alone_is_noticed(monkeypatch):
    """Asked at the very delta, the convolutions' rounding understates epsilon."""
    monkeypatch.setattr(pld, "delta_to_ask_for", lambda delta, events: delta)
    with pytest.raises(AssertionError):
        test_accountants.law_rounding_never_understates()


def test_one_direction_alone_is_noticed(monkeypatch):
    """Rule 10: an accountant that bounds only the cheaper direction understates epsilon."""
    monkeypatch.setattr(pld, "divergence_removed", pld.divergence_added)
    with pytest.raises(AssertionError):
        test_accountants.law_pld_bounds_both_directions()


def test_verify_on_one_grid_holds_for_the_real_code(tmp_path):
    law_of_verify_on_one_grid(tmp_path)
