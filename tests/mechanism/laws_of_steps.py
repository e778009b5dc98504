"""What one step must satisfy. Every law raises AssertionError where it is broken.

They are run on the real code by `test_laws`, and on broken code by `test_broken_on_purpose`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from dpis.gradients import RecordGradients
from dpis.mechanism import Config, Contribution, Method
from dpis.randomness import Key
from dpis.sampling import Draw

from ..sampling.oracles import (
    FALSE_ALARM,
    accept_frequencies,
    accept_freshness,
    accept_independence,
)
from .laws_of_releases import everything_at_once
from .systems import (
    Listener,
    PlainSums,
    Small,
    clipped,
    config,
    forced,
    importance,
    moments_by_enumeration,
    plan_of,
    recorded_ciphers,
    released,
    rigged,
    rows,
)

WAYS = list(Contribution)
APPLIED = 1.001
ROUNDING = 5e-4
"""What a contribution's norm may miss one by: half of what the applied noise is larger (rule 19)."""


def law_updates_weigh_by_inverse_probability() -> None:
    """Without noise, and with C above every norm: ``(1/n_public)·Σ_drawn grad_i / probability_i``."""
    norms = (0.3, 0.9, 0.05, 0.5, 0.7)
    for way in WAYS:
        c = config(clip_norm=10.0, floor=1e-3, headroom=2.0, equivalent_batch=8, contribution=way)
        for seed in range(1, 7):
            system = Small(c, rows(*norms), rigged(0.0, 1e-9, seed)).seen(norms)  # reject none
            system.begin()
            draw = system.mechanism.draw()
            found = system.step()
            expected = torch.zeros(3).double()
            for i in draw.indices.tolist():
                q = 0.8 * 2.0 * norms[i] / 10.0
                probability = q if way is Contribution.WEIGHT else q * norms[i] / (2 * norms[i])
                expected += system.records[i] / probability / 10
            assert torch.allclose(
                found, expected, rtol=1e-6, atol=1e-12
            )  # norms are kept in float32


def law_infinite_headroom_is_dp_sgd() -> None:
    """The same key gives the same run, bit for bit."""
    shared = {"equivalent_batch": 6, "clip_norm": 0.5, "epochs": 3}
    records = rows(0.1, 3.0, 0.5, 0.2, 0.9, 0.0, 0.4)
    runs = [
        Small(config(method, **shared, headroom=math.inf), records, Key.from_seed(3)).run()
        for method in (Method.DPIS, Method.DP_SGD)
    ]
    assert len(runs[0]) == 15
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert len({tuple(update.tolist()) for update in runs[0]}) == 15


def unequal(way: Contribution) -> tuple[Config, Tensor, list[float]]:
    """Four records: unseen, as estimated, grown beyond its estimate, below the floor."""
    c = config(
        n_public=5, batch_size=2, equivalent_batch=4, clip_norm=0.8, headroom=1.5, contribution=way
    )
    return c, rows(0.7, 0.4, 5.0, 0.01), [math.inf, 0.3, 0.1, 0.002]


def law_the_mean_of_an_update() -> None:
    """``Σ clip(grad_i, g_hat_i) / n_public``, exactly: every subset and every second coin (rule 12)."""
    for way in WAYS:
        c, records, last_norms = unequal(way)
        caps = [importance(norm, c) for norm in last_norms]
        expected = sum(clipped(g, cap) for g, cap in zip(records, caps, strict=True)) / c.n_public
        mean = moments_by_enumeration(c, records, last_norms).mean
        assert torch.allclose(mean, expected, rtol=1e-12, atol=1e-15)


def law_sampling_variance() -> None:
    """`weight` varies less than `reject`; and importance less than uniform sampling at the same b."""
    weight, reject = (moments_by_enumeration(*unequal(way), PlainSums(3)).variance for way in WAYS)
    assert weight < 0.95 * reject
    norms = [0.9, 0.1, 0.2, 0.05]
    kappa = sum(norms) / (4 * 0.9)  # so that b records are expected, as in uniform sampling
    shared = {"n_public": 4, "batch_size": 1, "clip_norm": 0.9, "floor": 0.05}
    by_norm = config(kappa=kappa, headroom=1.0, **shared)
    uniform = config(headroom=math.inf, **shared)
    candidates = sum(importance(n, by_norm) / 0.9 for n in norms) / (4 * kappa)
    assert math.isclose(candidates, by_norm.batch_size)
    chosen, all_alike = (
        moments_by_enumeration(c, rows(*norms), norms, PlainSums(3)).variance
        for c in (by_norm, uniform)
    )
    assert chosen < 0.7 * all_alike


def law_the_scale_of_noise(drawn: int = 3) -> None:
    """Variance and mean of the released noise, by exact tests: a false alarm in 5e5 (rules 15, 19)."""
    width = 4000
    c = config(clip_norm=0.5, equivalent_batch=4)
    system = Small(c, torch.zeros(5, width).double(), Key.from_seed(8), gradients=PlainSums(width))
    terms = system.begin()
    noise = system.step(range(drawn)) / (terms.clip_norm / terms.equivalent_batch)
    std = APPLIED * plan_of(c).privacy.noise_multipliers[0]
    tail = stats.chi2(width).cdf(float((noise / std).square().sum()))
    assert FALSE_ALARM / 2 < tail < 1 - FALSE_ALARM / 2
    score = float(noise.sum()) / (std * math.sqrt(width))
    assert abs(score) < stats.norm.isf(FALSE_ALARM / 2)


def law_the_applied_noise() -> None:
    """1.001 times what is accounted for, exactly, in every epoch (rule 19)."""
    for c in (config(clip_norm=0.3), config(Method.DPIS_ADAPTIVE), config(Method.DP_SGD_DECAY)):
        system = Small(c, rows(0.1, 0.2), rigged(noise=1.0))
        for _ in range(c.epochs):
            terms = system.begin()
            charged = system.journal.entries[-1].event.noise_multiplier
            for _ in range(system.mechanism.steps_left):
                std = system.step([]) * terms.equivalent_batch / terms.clip_norm
                assert torch.allclose(std, torch.full_like(std, APPLIED * charged), rtol=1e-12)
            system.mechanism.end_epoch()


def law_an_empty_batch_is_a_normal_step() -> None:
    """Pure noise of the usual scale; and a sum is never divided by who happens to be in it (rule 15)."""
    law_the_scale_of_noise(drawn=0)
    system = Small(config(), rows(0.2, 0.4, 0.6), rigged(noise=1.0))
    system.begin()
    before = list(system.journal.log)
    empty = system.step([])
    assert (system.mechanism.step, system.mechanism.steps_left) == (1, 4)
    assert system.journal.log == before
    alone = [system.step([i]) - empty for i in range(3)]
    together = Small(config(), rows(0.2, 0.4, 0.6), rigged(noise=1.0))
    together.begin()
    assert torch.allclose(together.step([0, 1, 2]) - empty, sum(alone), rtol=1e-12)


def law_one_record_moves_a_sum_by_at_most_one() -> None:
    """Whatever its gradient and whatever was known of it (rule 2); in units of C/B."""
    others = rows(0.2, 3.0, 0.5)
    direction = rows(1.0)[0]
    for way in WAYS:
        c = config(clip_norm=0.5, contribution=way)
        for scale in (1.0, 1e6, 1e30, 1e-12, 1e-30, 0.0, math.nan, math.inf, -math.inf):
            for last_norm in (math.inf, 0.3, 1e-6):
                caps = [importance(math.inf, c)] * 3 + [importance(last_norm, c)]
                everybody = torch.cat([others, scale * direction[None]])
                moved = moved_by_the_last(c, everybody, caps)
                assert moved <= 1 + 1e-9
                if scale in (1.0, 1e6, 1e30):
                    assert moved == 1 or abs(moved - 1) < 1e-6  # else clipping would be too much


def moved_by_the_last(c: Config, records: Tensor, caps: list[float]) -> float:
    sums = []
    for count in (len(records) - 1, len(records)):
        system = Small(c, records[:count], rigged(0.0, accept=1e-40))
        terms = system.begin()
        update = system.step(range(count), caps[:count])
        sums.append(update * terms.equivalent_batch / terms.clip_norm)
    assert sums[1].isfinite().all()
    return float((sums[1] - sums[0]).norm())


def law_the_rounding_of_a_contribution() -> None:
    """``| ||v|| - 1 | < 5e-4`` where a clipped record stands alone: float32, and under autocast (rule 19)."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )
    for model, inputs in ((mlp, torch.randn(4, 20)), (cnn, torch.randn(4, 3, 8, 8))):
        for half in (False, True):
            gradients = RecordGradients(model, nn.CrossEntropyLoss())
            for record in range(4):
                system = Small(config(clip_norm=1e-3), torch.zeros(4, 1))
                terms = system.begin()
                one = Draw(torch.tensor([record]), torch.tensor([1e-3], dtype=torch.float64))
                with forced(system.mechanism.sampler, one):
                    draw = system.mechanism.draw()
                batch = inputs[record : record + 1], torch.tensor([record])
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                    update = released(system.mechanism, gradients, batch, draw)
                flat = torch.cat([part.flatten() for part in update.values()])
                length = float(flat.norm()) * terms.equivalent_batch / terms.clip_norm
                assert abs(length - 1) < ROUNDING


def law_coins_are_fresh_and_as_probable_as_they_say() -> None:
    """Through the real mechanism: frequency q, ``q <= π``, no memory, no coupling (rules 1, 3)."""
    norms = (0.01, 0.05, 0.1, 0.18, 0.3, 2.0, 1e9, math.inf)
    c = config(
        n_public=8, batch_size=1, epochs=100, equivalent_batch=3.2, headroom=2.0, clip_norm=0.5
    )
    gradients = rows(*(n if math.isfinite(n) else 1.0 for n in norms))
    system = Small(c, gradients, Key.from_seed(5), gradients=PlainSums(3)).seen(norms)
    caps = np.array([importance(norm, c) for norm in norms])
    included = np.zeros((system.mechanism.plan.workload.steps, len(norms)))
    for _ in range(c.epochs):
        system.begin()
        while system.mechanism.steps_left:
            drawn = system.mechanism.draw()
            told = caps[drawn.indices.numpy()]
            assert (drawn.importance <= c.clip_norm).all()
            assert (np.abs(drawn.importance.numpy() - told) <= 1e-6 * told).all()
            included[system.mechanism.step, drawn.indices.numpy()] = 1
            system.release(drawn)
        system.mechanism.end_epoch()
    probabilities = 0.4 * caps / c.clip_norm
    accept_frequencies(included, probabilities)
    accept_freshness(included, probabilities)
    accept_independence(included, probabilities)


def law_a_draw_made_ahead_is_weighed_as_it_was_drawn() -> None:
    """Records that grew in between were drawn with the chance they had before (rule 12)."""
    c = config(clip_norm=1.0, headroom=2.0, n_public=60, batch_size=6, equivalent_batch=60)
    records = rows(*[0.9] * 60)
    system = Small(c, records, rigged(0.0)).seen([0.1] * 60)
    system.begin()
    draws = [system.mechanism.draw_ahead() for _ in range(3)]
    for draw in draws:
        assert len(draw) > 0
        expected = sum(clipped(records[i], 0.2) / 0.2 for i in draw.indices.tolist()) / 60
        assert torch.allclose(system.release(draw), expected, atol=1e-9)
    assert set(draws[0].indices.tolist()) & set(draws[2].indices.tolist())  # some have grown


def law_a_record_that_grew_is_held_back_once() -> None:
    """By its old estimate at the first visit; from then on it counts in full (rule 16)."""
    c = config(n_public=4, batch_size=2, epochs=40, equivalent_batch=4, headroom=1.5, floor=0.1)
    system = Small(c, rows(0.9), Key.from_seed(2), gradients=PlainSums(3)).seen([0.1])
    estimates = []
    for _ in range(c.epochs):
        system.begin()
        while system.mechanism.steps_left:
            drawn = system.mechanism.draw()
            estimates += drawn.importance.tolist()
            system.release(drawn)
    assert len(estimates) > 30
    assert math.isclose(estimates[0], 0.15, rel_tol=1e-6)
    assert all(estimate == 1.0 for estimate in estimates[1:])


def law_no_stream_serves_twice() -> None:
    """Coins, second coins and noise of all steps and releases come from different streams (rule 18)."""
    with recorded_ciphers() as opened:
        system = Small(everything_at_once(), rows(0.2, 0.5, 3.0, 1.0), Key.from_seed(1), Listener())
        system.run()
    workload = system.mechanism.plan.workload
    releases = workload.epochs + (workload.epochs - 1)
    keys = [one.key for one in opened]
    assert len(set(keys)) == len(keys)
    assert 3 * workload.steps + releases >= len(keys) > 2 * workload.steps + releases
