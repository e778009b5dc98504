import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpis.accounting import (
    Budget,
    Gaussian,
    PlannedRun,
    PlannedSequence,
    PoissonGaussian,
    RenyiFilter,
)
from dpis.accounting.renyi import renyi_divergence
from dpis.errors import BudgetExceededError, InputError

from .strategies import events

STEP = PoissonGaussian(sampling_rate=0.1, noise_multiplier=1.0)
MEAN = Gaussian(noise_multiplier=8.0)
RUNS = (PlannedRun("mean", MEAN, 1), PlannedRun("gradient", STEP, 3))


@given(st.lists(events, max_size=60), st.floats(0.5, 8.0), st.integers(2, 64))
def test_whatever_is_asked_what_is_admitted_fits(stream, epsilon, order):
    try:
        guard = RenyiFilter(Budget(epsilon, 1e-5), order)
    except InputError:
        return
    admitted = []
    for event in stream:
        before = guard.spent
        try:
            guard.admit(event)
            admitted.append(event)
        except BudgetExceededError:
            assert guard.spent == before
    total = sum(renyi_divergence(event, order) for event in admitted)
    assert guard.spent == pytest.approx(total)
    assert guard.spent <= guard.rho_budget
    assert guard.left == pytest.approx(guard.rho_budget - total)
    assert 0 <= guard.fraction_spent <= 1


@pytest.mark.parametrize("order", [1, 1.5, 0, True, 2.0, 10**400])
def test_the_order_must_be_an_integer_above_one(order):
    with pytest.raises(InputError, match="order"):
        RenyiFilter(Budget(1, 1e-5), order)


def test_an_order_that_leaves_nothing_is_refused():
    with pytest.raises(InputError, match="no noise meets"):
        RenyiFilter(Budget(0.1, 1e-5), 2)


def test_a_refusal_says_what_is_left_and_what_to_do():
    guard = RenyiFilter(Budget(1, 1e-5), 18)
    with pytest.raises(BudgetExceededError, match=r"left.*not released.*Stop here"):
        guard.admit(Gaussian(noise_multiplier=0.1))


def law_the_plan_is_followed_to_its_end_and_no_further(follow=PlannedSequence):
    guard = follow(RUNS, 1e-5)
    guard.admit(MEAN)
    guard.admit(STEP)
    guard.admit(PoissonGaussian(sampling_rate=0.05, noise_multiplier=1.5))  # dominated: free
    for costlier in (
        PoissonGaussian(sampling_rate=0.1, noise_multiplier=0.99),
        PoissonGaussian(sampling_rate=0.11, noise_multiplier=1.0),
        MEAN,
    ):
        with pytest.raises(BudgetExceededError):
            guard.admit(costlier)
    guard.admit(STEP)
    with pytest.raises(BudgetExceededError, match="plan ended"):
        guard.admit(STEP)


def test_the_plan_is_followed_to_its_end_and_no_further():
    law_the_plan_is_followed_to_its_end_and_no_further()


def test_spending_rises_to_one():
    guard = PlannedSequence(RUNS, 1e-5)
    fractions = [guard.fraction_spent]
    for event in (MEAN, STEP, STEP, STEP):
        guard.admit(event)
        fractions.append(guard.fraction_spent)
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert fractions[-1] == pytest.approx(1.0)
    assert guard.done == 4
