import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.accounting import (
    Accountant,
    Budget,
    Cadence,
    Gaussian,
    Release,
    Workload,
    epsilon_by_pld,
    epsilon_by_rdp,
    exponential_decay,
    plan_predeclared,
)
from dpis.accounting.workload import (
    GRADIENT,
    composition_of,
    planned_runs,
    releases_over_run,
)
from dpis.errors import InputError

DELTA = 1e-5
PAPER = {"n_public": 60_000, "batch_size": 512, "epochs": 30}


def sigma(epsilon, accountant, kappa=1.0):
    plan = plan_predeclared(
        Budget(epsilon, DELTA), Workload.create(**PAPER, kappa=kappa), accountant=accountant
    )
    return plan.grad_noise_multipliers[0]


@pytest.mark.parametrize(
    ("epsilon", "by_rdp", "by_pld", "kappa_ratio"),
    [
        (0.5, 3.973, 3.653, 0.982),
        (1, 2.193, 2.038, 0.947),
        (2, 1.312, 1.239, 0.865),
        (4, 0.900, 0.860, 0.73),
    ],
)
def test_known_noise_multipliers(epsilon, by_rdp, by_pld, kappa_ratio):
    rdp = sigma(epsilon, Accountant.RDP)
    assert rdp == pytest.approx(by_rdp, rel=3e-3)
    assert sigma(epsilon, Accountant.PLD) == pytest.approx(by_pld, rel=3e-3)
    assert sigma(epsilon, Accountant.RDP, kappa=0.4) / rdp == pytest.approx(kappa_ratio, abs=2e-3)


def law_a_plan_keeps_its_budget(plan_for=plan_predeclared):
    """Never less private than asked, and within 0.1 % of the tightest noise."""
    for epsilon, batch, epochs, shape in [
        (0.3, 50, 3, None),
        (1.0, 100, 2, exponential_decay(0.05, 2)),
    ]:
        for accountant, epsilon_of in [
            (Accountant.PLD, epsilon_by_pld),
            (Accountant.RDP, epsilon_by_rdp),
        ]:
            workload = Workload.create(n_public=20_000, batch_size=batch, epochs=epochs)
            plan = plan_for(
                Budget(epsilon, DELTA), workload, accountant=accountant, noise_shape=shape
            )
            fine = {"interval": 5e-5} if accountant is Accountant.PLD else {}
            assert epsilon_of(plan.composition, DELTA, **fine) <= epsilon * (1 + 1e-9)
            assert plan.epsilon <= epsilon
            less = [0.999 * z for z in plan.noise_multipliers]
            lower = composition_of(tuple(planned_runs(workload, less, ())))
            assert epsilon_of(lower, DELTA, **fine) > epsilon


def test_a_plan_keeps_its_budget():
    law_a_plan_keeps_its_budget()


@pytest.mark.slow
@given(
    st.floats(0.1, 4.0),
    st.integers(20, 1000),
    st.integers(1, 10),
    st.floats(0.3, 1.0),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
)
@settings(max_examples=12)
def test_calibration_inverts_epsilon_from_the_private_side(epsilon, batch, epochs, kappa, delta):
    workload = Workload.create(n_public=20_000, batch_size=batch, epochs=epochs, kappa=kappa)
    plan = plan_predeclared(Budget(epsilon, delta), workload)
    assert plan.epsilon <= epsilon
    assert_within_a_thousandth_of_the_tightest(plan, interval=5e-5)


def assert_within_a_thousandth_of_the_tightest(plan, interval):
    budget = plan.budget
    less = [0.999 * z for z in plan.noise_multipliers]
    lower = composition_of(tuple(planned_runs(plan.workload, less, ())))
    assert epsilon_by_pld(lower, budget.delta, interval) > budget.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "n_public", "batch", "epochs", "interval"),
    [(0.01, 60_000, 256, 10, 2e-6), (0.001, 10_000, 64, 2, 7e-7), (20.0, 5_000, 50, 5, 1e-4)],
)
def test_extreme_budgets_are_met_within_a_thousandth(epsilon, n_public, batch, epochs, interval):
    """Small epsilons and many steps need a finer discretisation of privacy loss; the plan finds it."""
    workload = Workload.create(n_public=n_public, batch_size=batch, epochs=epochs)
    plan = plan_predeclared(Budget(epsilon, DELTA), workload)
    assert epsilon_by_pld(plan.composition, DELTA, interval) <= epsilon
    assert_within_a_thousandth_of_the_tightest(plan, interval)


def test_dpis_and_dp_sgd_at_the_equivalent_batch_have_the_same_privacy():
    dpis = plan_predeclared(
        Budget(1, DELTA), Workload.create(n_public=6000, batch_size=100, epochs=2, kappa=0.4)
    )
    direct = plan_predeclared(
        Budget(1, DELTA),
        Workload.create(n_public=6000, batch_size=100, epochs=2, equivalent_batch=250),
    )
    assert dpis.composition == direct.composition
    assert dpis.workload.equivalent_batch == (250.0, 250.0)
    assert dpis.grad_noise_multipliers[0] == pytest.approx(0.4 * dpis.noise_multipliers[0])


def test_every_event_is_planned_in_its_order():
    workload = Workload.create(n_public=10_000, batch_size=1000, epochs=3, kappa="1:0.5")
    releases = [Release("mean", 8.0), Release("K*", 30.0, Cadence.BETWEEN_EPOCHS)]
    plan = plan_predeclared(Budget(2, DELTA), workload, releases=releases)
    assert [(run.label, run.count) for run in plan.runs] == [
        ("mean", 1),
        (GRADIENT, 10),
        ("K*", 1),
        (GRADIENT, 10),
        ("K*", 1),
        (GRADIENT, 10),
    ]
    rates = [run.event.sampling_rate for run in plan.runs if run.label == GRADIENT]
    assert rates == pytest.approx([0.1, 1000 / 0.75 / 10_000, 0.2])


def test_a_release_is_paid_for_by_more_gradient_noise():
    workload = Workload.create(n_public=10_000, batch_size=100, epochs=3)
    alone = plan_predeclared(Budget(1, DELTA), workload)
    beside = plan_predeclared(Budget(1, DELTA), workload, releases=[Release("mean", 8.0)])
    assert beside.noise_multipliers[0] > alone.noise_multipliers[0]
    assert beside.epsilon <= 1


def law_k_star_is_an_unsampled_gaussian():
    workload = Workload.create(n_public=1000, batch_size=100, epochs=5)
    for cadence, times in [(Cadence.ONCE, 1), (Cadence.EACH_EPOCH, 5), (Cadence.BETWEEN_EPOCHS, 4)]:
        spent = dict(releases_over_run(workload, [Release("K*", 20.0, cadence)]))
        assert spent == {Gaussian(noise_multiplier=20.0): times}


def test_k_star_is_an_unsampled_gaussian_once_an_epoch():
    law_k_star_is_an_unsampled_gaussian()


def test_decay_shapes_the_noise_per_epoch():
    workload = Workload.create(n_public=1000, batch_size=100, epochs=4)
    plan = plan_predeclared(Budget(1, DELTA), workload, noise_shape=exponential_decay(0.01, 4))
    first = plan.noise_multipliers[0]
    assert plan.noise_multipliers == pytest.approx([first * math.exp(-0.01 * e) for e in range(4)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 2000}, "larger than n_public"),
        ({"batch_size": 0}, "batch size"),
        ({"epochs": 0}, "epochs"),
        ({"n_public": -5}, "n_public"),
        ({"kappa": 0}, "kappa"),
        ({"kappa": 1.1}, "kappa"),
        ({"kappa": math.nan}, "kappa"),
        ({"kappa": "0.5,0.4"}, "one value an epoch"),
        ({"kappa": "a:b"}, "kappa"),
        ({"kappa": 0.05}, "above n_public"),
        ({"kappa": 0.5, "equivalent_batch": 200}, "both given"),
        ({"equivalent_batch": 50}, "at least the batch size"),
        ({"equivalent_batch": math.nan}, "at least the batch size"),
        ({"equivalent_batch": 5000}, "above n_public"),
    ],
    ids=str,
)
def test_impossible_workloads_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Workload.create(**{"n_public": 1000, "batch_size": 100, "epochs": 3, **changes})


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf, 1e6])
def test_epsilon_must_be_positive_and_finite(epsilon):
    with pytest.raises(InputError, match="epsilon"):
        Budget(epsilon, DELTA)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2, math.nan])
def test_delta_must_lie_inside_zero_and_one(delta):
    with pytest.raises(InputError, match="delta"):
        Budget(1.0, delta)


def test_a_budget_that_no_noise_can_meet_is_refused():
    workload = Workload.create(n_public=1000, batch_size=100, epochs=3)
    with pytest.raises(InputError, match=r"no noise meets.*mean"):
        plan_predeclared(Budget(0.1, DELTA), workload, releases=[Release("mean", 2.0)])


def test_a_release_that_only_pld_can_afford_is_planned_for():
    """At 3.9 the release alone costs 0.95 by PLD and more than 1 by Renyi."""
    workload = Workload.create(n_public=10_000, batch_size=100, epochs=1)
    plan = plan_predeclared(Budget(1, DELTA), workload, releases=[Release("mean", 3.9)])
    assert 0.999 < plan.epsilon <= 1


def test_a_release_cannot_pass_for_an_iteration():
    with pytest.raises(InputError, match="label"):
        Release(GRADIENT, 8.0)


def test_a_split_budget_adds_up():
    first, rest = Budget(2.0, 1e-5).split(0.1)
    assert first.epsilon + rest.epsilon == pytest.approx(2.0)
    assert first.delta + rest.delta == pytest.approx(1e-5)


def test_the_last_epoch_keeps_its_steps_when_the_batch_does_not_divide_n():
    assert Workload.create(n_public=60_000, batch_size=512, epochs=1).steps_per_epoch == 117
    assert Workload.create(n_public=100, batch_size=100, epochs=1).steps_per_epoch == 1
    for n in range(100, 160):
        assert Workload.create(n_public=n, batch_size=7, epochs=1).steps_per_epoch == n // 7
