"""The mechanism under attack: tight where it is right, accused where it is broken.

Seeds are fixed. An audit of right code accuses it with probability 5 % at most: of 200, more than 20 with 1e-3 at most.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpis.accounting import Accountant
from dpis.auditing import audit_mechanism
from dpis.auditing.mechanism_audit import mechanism_scores
from dpis.errors import InputError
from dpis.mechanism import Contribution, Method, make_plan
from dpis.options import NormSum
from dpis.randomness import Key
from tests.auditing.attacks import BUGS, OFTEN, SURE, config

MOST_FALSE_ALARMS = 20


def test_it_finds_most_of_the_claim() -> None:
    found = audit_mechanism(SURE, runs=40_000, key=Key.from_seed(1))
    assert 0.85 * found.epsilon < found.curve_bound < found.epsilon
    assert 0 < found.bound < found.claim_at_bound_delta
    assert not found.refuted


def test_it_sees_half_the_noise_in_a_thousand_runs() -> None:
    found = dataclasses.replace(BUGS[0], runs=4000).bound()
    assert found.refuted


def test_scores_are_of_the_world_they_come_from() -> None:
    """At π = 1 a score is a Gaussian: half a squared shift above zero with the canary, as much below without."""
    plan = make_plan(SURE)
    seen = mechanism_scores(plan, 40_000, Key.from_seed(2))
    shift = np.sqrt(plan.workload.steps) / plan.privacy.planned_noise[0]
    for scores, sign in ((seen.with_canary, 1), (seen.without, -1)):
        assert scores.mean() == pytest.approx(
            sign * shift**2 / 2, abs=5 * shift / np.sqrt(len(scores))
        )
        assert scores.std() == pytest.approx(shift, rel=0.03)


def test_what_claims_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="claims nothing"):
        audit_mechanism(config(method=Method.SGD))
    with pytest.raises(InputError, match="at least 100"):
        audit_mechanism(SURE, runs=10)


ALIKE = {
    "weight": SURE,
    "often": OFTEN,
    "reject": dataclasses.replace(SURE, contribution=Contribution.REJECT),
    "dp-sgd": config(method=Method.DP_SGD),
    "adaptive": config(method=Method.DPIS_ADAPTIVE, delta=0.01, rate_cap=1.0, epochs=2),
    "stale": config(
        method=Method.DPIS_ADAPTIVE, delta=0.01, rate_cap=1.0, epochs=2, norm_sum=NormSum.STALE
    ),
    "adaptive clipping": config(clip_ceiling=2.0, clip_lowest=0.1, epochs=2),
    "rdp": config(accountant=Accountant.RDP),
}


@pytest.mark.parametrize("name", ALIKE)
def test_no_method_is_accused(name: str) -> None:
    found = audit_mechanism(ALIKE[name], runs=20_000, key=Key.from_seed(5))
    assert not found.refuted
    assert found.bound > 0 or name in ("adaptive", "stale")


@pytest.mark.statistical
def test_right_code_is_accused_as_seldom_as_stated() -> None:
    alarms = [
        audit_mechanism(SURE, runs=3000, key=Key.from_seed(seed)).refuted for seed in range(200)
    ]
    assert sum(alarms) <= MOST_FALSE_ALARMS


@pytest.mark.statistical
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_seen(bug: object) -> None:
    assert bug.bound().refuted


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
@pytest.mark.parametrize(("steps", "share"), [(1, 0.9), (100, 0.8)])
def test_how_much_of_epsilon_is_found(epsilon: float, steps: int, share: float) -> None:
    """One Poisson-Gaussian step at π = 1/5, and a hundred at 1/100, at the claimed delta."""
    n = 1000 if steps > 1 else 10
    batch = {"batch_size": 10} if steps > 1 else {"batch_size": 10, "n_public": 10, "kappa": 1.0}
    tried = config(epsilon=epsilon, delta=1e-5, **{"n_public": n, **batch})
    found = audit_mechanism(tried, runs=1_000_000, key=Key.from_seed(1))
    assert share * epsilon < found.curve_bound < epsilon
    assert share * 0.95 * found.claim_at_bound_delta < found.bound < found.claim_at_bound_delta
