"""n = 8 with one canary: the lower bound on epsilon stays below the claim, and passes it for planted bugs.

A false alarm has probability 1e-3 or less in each test of the real code; seeds are fixed.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dpis.accounting import Accountant
from dpis.group import current_group
from dpis.mechanism import Contribution, Mechanism, Method, NormSum, noisy_update
from dpis.mechanism import mechanism as module
from dpis.noise import add_noise
from dpis.sampling import Draw, ImportanceSampler
from tests.ranks import on_ranks

from .systems import config, engine
from .test_broken_on_purpose import RELEASED, unclipped
from .two_worlds import Scenario, lower_bound

pytestmark = pytest.mark.statistical


def claim(method: Method = Method.DPIS, **changes):
    public = {"n_public": 8, "delta": 0.05, "accountant": Accountant.PLD, "headroom": 2.0}
    return config(method, **(public | changes))


SURE = claim(epsilon=2.0, batch_size=4, equivalent_batch=8, epochs=1)  # π = 1, two steps
SMALL = dataclasses.replace(SURE, epsilon=0.5, headroom=5.0)
RARE = claim(epsilon=1.0, batch_size=1, epochs=1)  # π = 1/8, eight steps
REJECT = dataclasses.replace(SURE, contribution=Contribution.REJECT)
ADAPTIVE = claim(Method.DPIS_ADAPTIVE, batch_size=4, rate_cap=1.0, epochs=2)
STALE = dataclasses.replace(ADAPTIVE, norm_sum=NormSum.STALE)
CLIPPING = claim(batch_size=4, epochs=2, clip_ceiling=2.0, clip_lowest=0.1)
FLOOR = 0.001  # seen with next to no gradient: its estimate is the floor

SCENARIOS = {
    "weight": Scenario(SURE, 900),
    "weight, grown": Scenario(SMALL, 400, canary_norm=1e4, last_norm=FLOOR),
    "weight, rare": Scenario(RARE, 300),
    "weight, real engine": Scenario(SURE, 200, engine=engine(2)),
    "reject": Scenario(REJECT, 900, canary_norm=0.9),
    "reject, grown": Scenario(REJECT, 400, canary_norm=1e4, last_norm=FLOOR),
    "adaptive": Scenario(ADAPTIVE, 300),
    "adaptive, stale": Scenario(STALE, 300),
    "adaptive clipping": Scenario(CLIPPING, 300),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_nothing_contradicts_the_claim(scenario: Scenario) -> None:
    assert lower_bound(scenario) <= scenario.config.epsilon


# ── and it fires ─────────────────────────────────────────────────────────────────────────────────────


def too_little(sums, std, normals):
    return add_noise(sums, 2 / 3 * std, normals)


def union_over_the_epoch(self, rate, stream, _draw=ImportanceSampler.draw):
    """Algorithm 1: who was drawn once stays a candidate."""
    fresh = _draw(self, rate, stream)
    self.kept = torch.cat([getattr(self, "kept", fresh.indices), fresh.indices]).unique()
    return Draw(self.kept, torch.full((len(self.kept),), self.clip_norm, dtype=torch.float64))


def hardly_any_noise(self, label, value, sensitivity, multiplier, occasion):
    return RELEASED(self, label, value, sensitivity / 1000, multiplier, occasion)


PLANTS = {
    "noise x 2/3": (Scenario(SURE, 2000), noisy_update, "add_noise", too_little),
    "sticky coins": (Scenario(RARE, 900), ImportanceSampler, "draw", union_over_the_epoch),
    "a missing clip": (
        Scenario(SURE, 150, canary_norm=50.0), module, "contribution_weights", unclipped),
    "a missing clip, grown": (
        Scenario(SMALL, 300, 50.0, FLOOR), module, "contribution_weights", unclipped),
    "a missing clip, real engine": (
        Scenario(SURE, 150, 50.0, engine=engine(2)), module, "contribution_weights", unclipped),
    "uncharged K'": (Scenario(ADAPTIVE, 150), Mechanism, "_released", hardly_any_noise),
    "uncharged K', stale": (Scenario(STALE, 150), Mechanism, "_released", hardly_any_noise),
    "uncharged K*": (Scenario(CLIPPING, 600), Mechanism, "_released", hardly_any_noise),
}  # fmt: skip


@pytest.mark.parametrize(("scenario", "target", "name", "bug"), PLANTS.values(), ids=PLANTS)
def test_a_planted_bug_contradicts_the_claim(scenario, target, name, bug, monkeypatch) -> None:
    monkeypatch.setattr(target, name, bug)
    assert lower_bound(scenario) > scenario.config.epsilon


# ── over two ranks ───────────────────────────────────────────────────────────────────────────────────


def _bound_over_ranks(rank: int, scenario: Scenario, plant: str) -> float:
    """On a rank of its own, with a bug planted there."""
    if plant == "noise x 2/3":

        def too_little_of_a_slice(sums, std, normals, begins=None):
            return add_noise(sums, 2 / 3 * std, normals, begins)

        noisy_update.add_noise = too_little_of_a_slice
    elif plant == "rank 0 adds no noise":

        def of_rank_1(sums, std, normals, begins=None):
            return add_noise(sums, std if rank == 1 else 1e-3 * std, normals, begins)

        noisy_update.add_noise = of_rank_1
    return lower_bound(scenario, current_group())


@pytest.mark.parametrize("name", ["weight", "weight, rare", "adaptive"])
def test_nothing_contradicts_the_claim_over_two_ranks(name: str) -> None:
    scenario = SCENARIOS[name]
    bounds = on_ranks(2, _bound_over_ranks, scenario, "", seconds=200)
    assert bounds[0] == bounds[1] <= scenario.config.epsilon


@pytest.mark.parametrize("plant", ["noise x 2/3", "rank 0 adds no noise"])
def test_a_planted_bug_contradicts_the_claim_over_two_ranks(plant: str) -> None:
    """The canary's direction is the first of two entries: rank 0 makes its noise, and holds no canary."""
    scenario = PLANTS["noise x 2/3"][0]
    assert on_ranks(2, _bound_over_ranks, scenario, plant, seconds=200)[0] > scenario.config.epsilon
