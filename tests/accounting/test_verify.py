import dataclasses
import functools
import hashlib
import json
import math

import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from dpis.accounting import (
    Adjacency,
    Budget,
    CountSource,
    Gaussian,
    Header,
    LedgerWriter,
    Mode,
    PlannedRun,
    PoissonGaussian,
    Workload,
    adaptive_step,
    next_grad_noise,
    plan_adaptive,
    plan_predeclared,
    verify_ledger,
)
from dpis.accounting import verification as verify_module
from dpis.accounting.ledger import CHAIN_ROOT, Entry, encode_line, entry_body, header_body
from dpis.errors import BrokenLedgerError

CLAIM = Budget(1.0, 1e-5)
WORKLOAD = Workload.create(n_public=40_000, batch_size=2000, epochs=2)
MODEL = b"the released model"


@functools.cache
def predeclared_plan():
    return plan_predeclared(CLAIM, WORKLOAD)


def predeclared_header(**changes):
    fields = {
        "claim": CLAIM,
        "adjacency": Adjacency.ADD_REMOVE,
        "n_public": 40_000,
        "n_public_source": CountSource.GIVEN,
        "mode": Mode.PREDECLARED,
        "planned": predeclared_plan().runs,
    }
    return Header(**{**fields, **changes})


@pytest.fixture(scope="module")
def header():
    return predeclared_header()


def write_run(path, header, *, events=None, finish=True):
    planned = [run.event for run in header.planned for _ in range(run.count)]
    with LedgerWriter.create(path, header) as ledger:
        for event in planned[:events]:
            ledger.record("gradient", event)
        if finish:
            ledger.finish(hashlib.sha256(MODEL).hexdigest())
    return path


def test_a_finished_run_holds(tmp_path, header):
    verdict = verify_ledger(write_run(tmp_path / "l", header))
    assert verdict.holds
    assert 0.99 < verdict.epsilon_spent <= 1.0
    assert verdict.not_for_release == ()


def test_an_early_stop_keeps_the_claim_of_the_plan(tmp_path, header):
    verdict = verify_ledger(write_run(tmp_path / "l", header, events=7))
    assert verdict.holds
    assert verdict.epsilon_spent < verdict.epsilon_claimable <= 1.0


def test_an_unfinished_run_does_not_hold(tmp_path, header):
    verdict = verify_ledger(write_run(tmp_path / "l", header, finish=False))
    assert not verdict.holds
    assert "line 42" in verdict.problem
    assert "unfinished" in verdict.problem


def law_a_torn_event_counts_as_spent(folder, header, verify=verify_ledger):
    path = write_run(folder / "torn", header, events=7, finish=False)
    whole = verify(path).epsilon_spent
    with path.open("ab") as file:
        file.write(b'{"type":"ev')
    torn = verify(path)
    eight = verify(write_run(folder / "eight", header, events=8, finish=False))
    assert torn.epsilon_spent == eight.epsilon_spent > whole
    assert "torn" in torn.problem


@pytest.mark.slow
def test_a_torn_event_counts_as_spent(tmp_path, header):
    law_a_torn_event_counts_as_spent(tmp_path, header)


def test_marked_runs_hold_but_are_not_for_release(tmp_path, header):
    marked = predeclared_header(seeded=True, diagnostics=True)
    verdict = verify_ledger(write_run(tmp_path / "l", marked))
    assert verdict.holds
    assert verdict.not_for_release == ("seeded", "diagnostics")


def law_a_claim_below_its_events_is_found_out(folder, header, verify=verify_ledger):
    """The chain is intact: only recomputing epsilon can tell."""
    planned = tuple(
        PlannedRun(
            run.label,
            PoissonGaussian(
                sampling_rate=run.event.sampling_rate,
                noise_multiplier=0.998 * run.event.noise_multiplier,
            ),
            run.count,
        )
        for run in header.planned
    )
    verdict = verify(write_run(folder / "overclaimed", predeclared_header(planned=planned)))
    assert not verdict.holds
    assert "claims epsilon" in verdict.problem


@pytest.mark.slow
def test_a_claim_below_its_events_is_found_out(tmp_path, header):
    law_a_claim_below_its_events_is_found_out(tmp_path, header)


def forge(path, header, events):
    """A file with an intact chain that no guard has seen."""
    line, chain = encode_line(header_body(header), CHAIN_ROOT)
    data = line
    for index, event in enumerate(events):
        line, chain = encode_line(entry_body(index, Entry("gradient", event)), chain)
        data += line
    path.write_bytes(data)
    return path


def law_events_the_plan_does_not_cover_are_found_out(folder, header, verify=verify_ledger):
    planned = [run.event for run in header.planned for _ in range(run.count)]
    with pytest.raises(BrokenLedgerError, match=r"line 42.*beyond the plan"):
        verify(forge(folder / "beyond", header, [*planned, planned[0]]))
    costlier = PoissonGaussian(sampling_rate=0.05, noise_multiplier=1.0)
    with pytest.raises(BrokenLedgerError, match=r"line 3.*not covered"):
        verify(forge(folder / "costlier", header, [planned[0], costlier]))


def test_events_the_plan_does_not_cover_are_found_out(tmp_path, header):
    law_events_the_plan_does_not_cover_are_found_out(tmp_path, header)


def adaptive_header(plan):
    return Header(
        claim=plan.budget,
        adjacency=Adjacency.ADD_REMOVE,
        n_public=plan.workload.n_public,
        n_public_source=CountSource.GIVEN,
        mode=Mode.ADAPTIVE,
        filter_order=plan.order,
    )


def test_a_finished_adaptive_run_holds(tmp_path):
    plan = plan_adaptive(CLAIM, WORKLOAD)
    with LedgerWriter.create(tmp_path / "l", adaptive_header(plan)) as ledger:
        for epoch, kappa in enumerate([0.9, 0.4], start=1):
            ledger.record("norm-sum", plan.releases[0].event)
            sigma = next_grad_noise(plan, epoch=epoch, kappa=kappa, spent=ledger.guard.spent)
            step = adaptive_step(WORKLOAD, sigma, kappa)
            ledger.record_all([Entry("gradient", step)] * WORKLOAD.steps_per_epoch)
        ledger.finish("0" * 64)
    verdict = verify_ledger(tmp_path / "l")
    assert verdict.holds
    assert 0.999 < verdict.epsilon_spent <= 1.0 + 1e-9


def test_a_released_count_must_be_charged_first(tmp_path):
    plan = plan_adaptive(CLAIM, WORKLOAD)
    released = dataclasses.replace(adaptive_header(plan), n_public_source=CountSource.RELEASED)
    step = adaptive_step(WORKLOAD, plan.noise_multiplier, 1.0)
    with pytest.raises(BrokenLedgerError, match=r"line 2.*count"):
        verify_ledger(forge(tmp_path / "uncharged", released, [step]))
    with LedgerWriter.create(tmp_path / "charged", released) as ledger:
        ledger.record("count", Gaussian(noise_multiplier=800.0))
        ledger.record("gradient", step)
        ledger.finish("0" * 64)
    assert verify_ledger(tmp_path / "charged").holds


def test_what_cannot_be_computed_proves_nothing(tmp_path, header, monkeypatch):
    path = write_run(tmp_path / "l", header)
    monkeypatch.setattr(
        verify_module.rdp.RdpAccountant, "get_epsilon", lambda self, delta: math.nan
    )
    monkeypatch.setattr(
        verify_module.pld.PLDAccountant, "get_epsilon", lambda self, delta: math.nan
    )
    assert not verify_ledger(path).holds


def law_an_overrun_filter_is_found_out_at_its_line(folder, verify=verify_ledger):
    plan = plan_adaptive(CLAIM, WORKLOAD)
    step = adaptive_step(WORKLOAD, plan.noise_multiplier, 1.0)
    path = forge(folder / "overrun", adaptive_header(plan), [step] * (WORKLOAD.steps + 5))
    with pytest.raises(BrokenLedgerError, match="overrun") as caught:
        verify(path)
    assert WORKLOAD.steps + 1 <= caught.value.line <= WORKLOAD.steps + 4


def test_an_overrun_filter_is_found_out_at_its_line(tmp_path):
    law_an_overrun_filter_is_found_out_at_its_line(tmp_path)


def test_the_model_is_compared_with_the_end_line(tmp_path, header):
    path = write_run(tmp_path / "l", header)
    (tmp_path / "model").write_bytes(MODEL)
    (tmp_path / "other").write_bytes(MODEL + b"!")
    assert verify_ledger(path, tmp_path / "model").holds
    assert not verify_ledger(path, tmp_path / "other").holds


@pytest.mark.parametrize("events", [20, 39, 41, 1000])
def test_an_end_that_counts_other_events_is_refused(tmp_path, header, events):
    """The chain is intact: only counting can tell."""
    planned = [run.event for run in header.planned for _ in range(run.count)]
    path = forge(tmp_path / "l", header, planned)
    chain = json.loads(path.read_bytes().splitlines()[-1])["chain"]
    end = {"type": "end", "events": events, "model_sha256": "0" * 64}
    path.write_bytes(path.read_bytes() + encode_line(end, chain)[0])
    with pytest.raises(BrokenLedgerError, match=rf"counts {events} events, the ledger holds 40"):
        verify_ledger(path)


def law_a_thousandth_too_much_is_found_out(folder, verify=verify_ledger):
    """What costs 1.001 of the claim does not pass for it, predeclared or adaptive."""
    event = PoissonGaussian(sampling_rate=0.05, noise_multiplier=2.0)
    planned = (PlannedRun("gradient", event, 40),)
    cost = verify(
        write_run(folder / "cost", predeclared_header(claim=Budget(50.0, 1e-5), planned=planned))
    ).epsilon_claimable
    for factor, holds in ((1.0 + 1e-6, True), (1 / 1.001, False)):
        claimed = predeclared_header(claim=Budget(factor * cost, 1e-5), planned=planned)
        verdict = verify(write_run(folder / f"claims {factor}", claimed))
        assert verdict.holds is holds, factor
        # and so it is, when the ledger says how much less the run spent before it stopped
        verdict = verify(write_run(folder / f"stopped {factor}", claimed, events=3))
        assert verdict.holds is holds, factor


def law_a_grid_has_a_public_limit(folder, verify=verify_ledger):
    """Forged: noise so small, or a claim so near to the cost, that only grids without end could tell."""
    tiny = (PlannedRun("release", Gaussian(noise_multiplier=0.01), 1000),)
    verdict = verify(write_run(folder / "tiny", predeclared_header(planned=tiny), events=1))
    assert not verdict.holds
    assert "cannot be shown" in verdict.problem
    planned = (PlannedRun("release", Gaussian(noise_multiplier=4.0), 1),)
    exact = epsilon_of_gaussian(4.0, 1e-5)
    just_below = predeclared_header(claim=Budget(exact * (1 - 1e-12), 1e-5), planned=planned)
    verdict = verify(write_run(folder / "near", just_below))
    assert not verdict.holds
    assert "cannot be shown" in verdict.problem


def epsilon_of_gaussian(z, delta):
    """Exactly, by the closed form of its privacy loss distribution (Balle and Wang 2018)."""

    def delta_at(epsilon):
        return ndtr(0.5 / z - epsilon * z) - math.exp(epsilon) * ndtr(-0.5 / z - epsilon * z)

    return brentq(lambda epsilon: delta_at(epsilon) - delta, 1e-3, 50.0, xtol=1e-15)


def test_a_grid_has_a_public_limit(tmp_path, monkeypatch):
    grids = []
    at_interval = verify_module._pld_epsilon

    def counted(event, delta, interval):
        grids.append(interval)
        return at_interval(event, delta, interval)

    monkeypatch.setattr(verify_module, "LARGEST_GRID", 10**5)
    monkeypatch.setattr(verify_module, "_pld_epsilon", counted)
    law_a_grid_has_a_public_limit(tmp_path)
    assert len(grids) == 2  # none for the first; 2 / 10**5 is above the third


def law_a_filter_overrun_by_a_thousandth_is_found_out(folder, verify=verify_ledger):
    plan = plan_adaptive(CLAIM, WORKLOAD)
    step = adaptive_step(WORKLOAD, plan.noise_multiplier, 1.0)
    header = dataclasses.replace(adaptive_header(plan), claim=Budget(1.0, 1e-5))
    path = forge(folder / "spent", header, [step] * 10)
    cost = verify(path).epsilon_spent
    for factor, refused in ((1.0 + 1e-6, False), (1 / 1.001, True)):
        claimed = dataclasses.replace(header, claim=Budget(factor * cost, 1e-5))
        path = forge(folder / f"claims {factor}", claimed, [step] * 10)
        if refused:
            with pytest.raises(BrokenLedgerError, match=r"line 11.*overrun"):
                verify(path)
        else:
            assert "overrun" not in verify(path).problem


def test_a_thousandth_too_much_is_found_out(tmp_path):
    law_a_thousandth_too_much_is_found_out(tmp_path)


def test_a_filter_overrun_by_a_thousandth_is_found_out(tmp_path):
    law_a_filter_overrun_by_a_thousandth_is_found_out(tmp_path)


def test_a_torn_event_of_an_adaptive_run_counts_as_the_whole_claim(tmp_path):
    """What it cost is not known; the filter had admitted it."""
    plan = plan_adaptive(CLAIM, WORKLOAD)
    step = adaptive_step(WORKLOAD, plan.noise_multiplier, 1.0)
    path = forge(tmp_path / "l", adaptive_header(plan), [step] * 3)
    assert verify_ledger(path).epsilon_spent < 1.0
    path.write_bytes(path.read_bytes() + b'{"type":"ev')
    verdict = verify_ledger(path)
    assert verdict.epsilon_spent == 1.0
    assert "torn" in verdict.problem
