import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.accounting import (
    Budget,
    Cadence,
    Gaussian,
    NormSumBounds,
    Release,
    RenyiFilter,
    Workload,
    adaptive_step,
    next_grad_noise,
    plan_adaptive,
)
from dpis.accounting.renyi import conversion_offset, renyi_divergence
from dpis.accounting.workload import NORM_SUM
from dpis.errors import BudgetExceededError, InputError

DELTA = 1e-5
SMALL = Workload.create(n_public=2000, batch_size=50, epochs=5)


def run_filter(plan, kappas, solve=next_grad_noise):
    """A whole adaptive run against a stream of released kappas; returns the filter and every sigma."""
    guard = RenyiFilter(plan.budget, plan.order)
    sigmas = []
    for release in plan.releases:
        if release.cadence is Cadence.ONCE:
            guard.admit(release.event)
    for epoch, kappa in enumerate(kappas, start=1):
        for release in plan.releases:
            if release.cadence is Cadence.EACH_EPOCH:
                guard.admit(release.event)
        sigmas.append(solve(plan, epoch=epoch, kappa=kappa, spent=guard.spent))
        step = adaptive_step(plan.workload, sigmas[-1], kappa)
        for _ in range(plan.workload.steps_per_epoch):
            guard.admit(step)
        for release in plan.releases:
            if release.cadence is Cadence.BETWEEN_EPOCHS and epoch < plan.workload.epochs:
                guard.admit(release.event)
    return guard, sigmas


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5),
    st.floats(0.2, 8.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_no_stream_of_norm_sums_overruns_the_budget(
    kappas, epsilon, reserve_share, adaptive_clipping
):
    cadences = [Cadence.EACH_EPOCH] + [Cadence.BETWEEN_EPOCHS] * adaptive_clipping
    plan = plan_adaptive(
        Budget(epsilon, DELTA),
        SMALL,
        reserve_share=reserve_share,
        norm_releases_per_epoch=cadences,
        releases=[Release("N", 400.0)],
    )
    guard, _ = run_filter(plan, kappas)
    assert guard.spent <= plan.rho_budget
    assert (
        guard.spent >= 0.999 * plan.rho_budget
    )  # and the last epoch leaves next to nothing unused


def test_constant_kappa_one_is_the_public_plan():
    plan = plan_adaptive(Budget(1, DELTA), SMALL)
    _, sigmas = run_filter(plan, [1.0] * 5)
    assert sigmas == pytest.approx([plan.noise_multiplier] * 5, rel=1e-3)


def test_two_phases_move_the_saved_budget_to_late_epochs():
    early = plan_adaptive(Budget(4, DELTA), SMALL, reserve_share=0.8)
    _, sigmas = run_filter(early, [0.4] * 5)
    assert early.first_phase == 4
    assert sigmas[4] < 0.8 * sigmas[3]
    even = plan_adaptive(Budget(4, DELTA), SMALL, reserve_share=0.0)
    _, sigmas = run_filter(even, [0.4] * 5)
    assert sigmas == pytest.approx([sigmas[0]] * 5, rel=1e-3)


@pytest.mark.parametrize(
    ("reserve_share", "epochs", "expected"),
    [(0.8, 5, 4), (0.6, 5, 3), (0.3, 10, 3), (1, 7, 7), (0, 3, 0)],
)
def test_the_first_phase_is_the_floor(reserve_share, epochs, expected):
    workload = Workload.create(n_public=2000, batch_size=50, epochs=epochs)
    assert (
        plan_adaptive(Budget(4, DELTA), workload, reserve_share=reserve_share).first_phase
        == expected
    )


def _admit_until_refused(guard, event):
    for admitted in range(1000):
        try:
            guard.admit(event)
        except BudgetExceededError:
            return admitted
    raise AssertionError("nothing was refused")


def law_the_order_is_fixed_beforehand(make_filter=RenyiFilter):
    """rho_budget = epsilon - off(alpha): no minimum over orders at run time, the claim exactly (epsilon, delta)."""
    for epsilon, less_noise in [(0.5, 0.6), (2.0, 0.8)]:  # where another order would let more pass
        plan = plan_adaptive(Budget(epsilon, DELTA), SMALL)
        guard = make_filter(plan.budget, plan.order)
        assert plan.order == int(plan.order)
        assert guard.rho_budget == pytest.approx(epsilon - conversion_offset(plan.order, DELTA))
        step = adaptive_step(plan.workload, less_noise * plan.noise_multiplier, 1.0)
        admitted = _admit_until_refused(guard, step)
        spent = admitted * renyi_divergence(step, plan.order)
        assert spent + conversion_offset(plan.order, DELTA) <= epsilon + 1e-9


def test_the_order_is_fixed_beforehand():
    law_the_order_is_fixed_beforehand()


def law_norm_sums_are_charged_once_an_epoch(plan_for=plan_adaptive):
    """K' and K*: unsampled Gaussians of multiplier sigma_K, one an epoch, no 1/p_K."""
    workload = Workload.create(n_public=60_000, batch_size=512, epochs=30)
    cadences = [Cadence.EACH_EPOCH, Cadence.BETWEEN_EPOCHS]
    plan = plan_for(Budget(1, DELTA), workload, norm_releases_per_epoch=cadences)
    norm_sums = [run for run in plan.runs if run.label == NORM_SUM]
    assert len(norm_sums) == 30 + 29
    assert all(run.count == 1 for run in norm_sums)
    assert all(
        run.event == Gaussian(noise_multiplier=plan.norm_noise_multiplier) for run in norm_sums
    )
    cost = sum(renyi_divergence(run.event, plan.order) for run in norm_sums)
    assert plan.norm_noise_multiplier >= 0.02 * 60_000
    assert cost <= 0.02 * plan.rho_budget * (1 + 1e-9)


def test_norm_sums_are_charged_once_an_epoch():
    law_norm_sums_are_charged_once_an_epoch()


def test_small_data_pays_exactly_its_share_for_norm_sums():
    plan = plan_adaptive(Budget(1, DELTA), SMALL)
    assert plan.norm_noise_multiplier > 0.02 * 2000
    cost = 5 * renyi_divergence(Gaussian(noise_multiplier=plan.norm_noise_multiplier), plan.order)
    assert cost == pytest.approx(0.02 * plan.rho_budget)


def law_released_norm_sums_stay_in_their_bounds(bounds_for=NormSumBounds.create):
    bounds = bounds_for(n_public=1000, batch_size=100, clip_norm=0.5, rate_cap=0.5)
    low, high = 100 * 0.5 / 0.5, 1000 * 0.5
    for raw in (-1e9, -math.inf, 0.0, 99.9, 100.0, 321.0, 500.0, 500.1, 1e9, math.inf):
        clipped = bounds.clip(raw)
        assert low <= clipped <= high
        assert clipped == raw or raw < low or raw > high
    assert bounds.clip(math.nan) == high


def test_released_norm_sums_stay_in_their_bounds():
    law_released_norm_sums_stay_in_their_bounds()


def test_bounds_that_cross_are_refused():
    with pytest.raises(InputError, match="rate_cap"):
        NormSumBounds.create(n_public=1000, batch_size=600, clip_norm=1.0)
    with pytest.raises(InputError, match="rate_cap"):
        NormSumBounds.create(n_public=1000, batch_size=10, clip_norm=1.0, rate_cap=1.5)
    with pytest.raises(InputError, match="clip norm"):
        NormSumBounds.create(n_public=1000, batch_size=10, clip_norm=math.nan)


def test_the_next_noise_is_solved_at_once():
    """In process, under 100 ms: measured generously, to fail only if it became a different algorithm."""
    workload = Workload.create(n_public=60_000, batch_size=512, epochs=30)
    plan = plan_adaptive(Budget(0.1, DELTA), workload)
    begin = time.process_time()
    for epoch in range(1, 11):
        next_grad_noise(plan, epoch=epoch, kappa=0.5, spent=0.01 * plan.rho_budget)
    assert time.process_time() - begin < 10 * 0.1 * 5


def test_a_run_near_the_knee_of_a_high_order_is_solved_to_its_end():
    """There the cost of a step falls a thousandfold within some per cent of the noise."""
    workload = Workload.create(n_public=1000, batch_size=3, epochs=8)
    plan = plan_adaptive(Budget(0.3, 1e-6), workload)
    for lowest in (0.02, 0.1, 0.2, 0.3, 0.5):
        guard, _ = run_filter(plan, [max(lowest, 1 - (1 - lowest) * e / 4) for e in range(8)])
        assert 0.99 * plan.rho_budget < guard.spent <= plan.rho_budget


def test_misuse_of_the_solver_is_refused():
    plan = plan_adaptive(Budget(1, DELTA), SMALL)
    for kappa in (0.0, 1.01, math.nan, 0.02):
        with pytest.raises(InputError, match="kappa"):
            next_grad_noise(plan, epoch=1, kappa=kappa, spent=0.0)
    with pytest.raises(InputError, match="epoch"):
        next_grad_noise(plan, epoch=6, kappa=1.0, spent=0.0)
    with pytest.raises(BudgetExceededError, match="nothing is left"):
        next_grad_noise(plan, epoch=1, kappa=1.0, spent=plan.rho_budget)


def test_a_plan_made_anew_from_a_noisy_count_keeps_its_order():
    before = plan_adaptive(Budget(1, DELTA), SMALL)
    noisy = Workload.create(n_public=1987, batch_size=50, epochs=5)
    after = plan_adaptive(Budget(1, DELTA), noisy, order=before.order)
    assert (after.order, after.rho_budget) == (before.order, before.rho_budget)
    other = plan_adaptive(Budget(1, DELTA), noisy, order=before.order + 9)
    assert other.noise_multiplier > after.noise_multiplier


def test_impossible_adaptive_plans_are_refused():
    with pytest.raises(InputError, match="no noise meets"):
        plan_adaptive(Budget(0.1, DELTA), SMALL, releases=[Release("mean", 1.0)])
    with pytest.raises(InputError, match="rate_cap"):
        plan_adaptive(Budget(1, DELTA), Workload.create(n_public=100, batch_size=80, epochs=1))
    with pytest.raises(InputError, match="reserve_share"):
        plan_adaptive(Budget(1, DELTA), SMALL, reserve_share=1.2)
    with pytest.raises(InputError, match="kappa"):
        plan_adaptive(
            Budget(1, DELTA), Workload.create(n_public=2000, batch_size=50, epochs=2, kappa=0.5)
        )


@pytest.mark.slow
@given(st.floats(0.2, 8.0))
@settings(max_examples=10)
def test_the_filter_costs_little_against_the_minimum_over_orders(epsilon):
    from dpis.accounting import epsilon_by_rdp
    from dpis.accounting.workload import composition_of

    plan = plan_adaptive(Budget(epsilon, DELTA), SMALL)
    assert epsilon_by_rdp(composition_of(plan.runs), DELTA) >= 0.98 * epsilon
