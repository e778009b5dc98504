import pytest

from dpis.accounting import Budget, Workload, plan_adaptive
from dpis.accounting.adaptive import adaptive_step
from dpis.accounting.renyi import renyi_divergence
from dpis.errors import InputError
from reproduction.noise_causes import noise_causes, workload_of
from tests.app.page.made_up import BATCH, EPOCHS, N, adaptive_history, falling_kappa


def split(epsilon, history):
    workload = Workload.create(n_public=N, batch_size=BATCH, epochs=len(history))
    budget = Budget(epsilon, 1e-5)
    order = plan_adaptive(budget, workload).order
    kappa = [e["kappa"] for e in history]
    causes = noise_causes(
        budget, workload, order, kappa, [e["grad_noise_multiplier"] for e in history]
    )
    return causes, workload, order


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_at_kappa_1_all_three_agree_up_to_what_the_releases_cost(epsilon):
    causes, _, _ = split(epsilon, adaptive_history(epsilon, (1.0,) * EPOCHS))
    for uniform, importance, actual in zip(
        causes.uniform, causes.importance, causes.actual, strict=True
    ):
        assert importance == pytest.approx(actual, rel=1e-4)
        assert uniform < importance < 1.02 * uniform


def test_importance_alone_costs_the_same_in_every_epoch_and_in_all_what_the_run_cost():
    causes, workload, order = split(4.0, adaptive_history(4.0))

    def costs(sigmas):
        pairs = zip(sigmas, falling_kappa(), strict=True)
        return [renyi_divergence(adaptive_step(workload, s, k), order) for s, k in pairs]

    even, actual = costs(causes.importance), costs(causes.actual)
    assert max(even) == pytest.approx(min(even), rel=1e-4)
    assert sum(even) == pytest.approx(sum(actual), rel=1e-4)
    assert max(actual) > 1.5 * min(actual)  # the schedule does move budget


def test_the_schedule_lowers_the_last_epochs_below_what_sampling_gives():
    causes, _, _ = split(4.0, adaptive_history(4.0))
    assert causes.actual[-1] < causes.importance[-1] < causes.uniform[-1]
    assert causes.actual[5] > causes.importance[5]  # paid for early


def test_the_papers_uniform_noise_comes_out():
    """RDP gives .81 at epsilon 4 for a batch of 512 and 16 epochs (Figure 1)."""
    causes, _, _ = split(4.0, adaptive_history(4.0))
    assert causes.uniform[0] == pytest.approx(0.81, abs=0.02)


def test_a_history_of_another_length_is_refused():
    workload = Workload.create(n_public=N, batch_size=BATCH, epochs=3)
    with pytest.raises(InputError, match="each of 3 epochs"):
        noise_causes(Budget(1.0, 1e-5), workload, 8, [1.0] * 2, [1.0] * 3)


def test_the_workload_follows_from_released_values():
    history = [(e["sampling_rate"], e["kappa"]) for e in adaptive_history(1.0)]
    assert workload_of(N, history) == Workload.create(n_public=N, batch_size=BATCH, epochs=EPOCHS)
