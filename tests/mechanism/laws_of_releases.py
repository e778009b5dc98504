"""What epochs and the releases beside the gradients must satisfy. Every law raises where it is broken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dpis.accounting import Gaussian, PoissonGaussian
from dpis.accounting.workload import GRADIENT, NORM_SUM
from dpis.mechanism import Config, Contribution, Method, NormSum
from dpis.randomness import Key

from .systems import (
    PRIVATE,
    Constant,
    Listener,
    PlainSums,
    Small,
    config,
    plan_of,
    rigged,
    rows,
    watching,
)

LOWEST, CEILING = 0.05, 2.0
CLIPPING: dict[str, Any] = {
    "clip_norm": 0.25,
    "clip_ceiling": CEILING,
    "clip_scale": 1.5,
    "clip_lowest": LOWEST,
}
EXTREMES = (math.nan, -1e9, 1e9, 0.0, math.inf, -math.inf)
NORMS = (0.05, 0.2, 0.3, 1.0, 0.4, 0.1, 0.2)


def everything_at_once(**changes) -> Config:
    """The adaptive method with an adaptive clip norm and second coins."""
    return config(
        Method.DPIS_ADAPTIVE,
        **{
            "epochs": 3,
            "clip_norm": 0.25,
            **CLIPPING,
            "contribution": Contribution.REJECT,
            "norm_sum": NormSum.STALE,
            **changes,
        },
    )


def header_of(c: Config):
    return plan_of(c).header(versions={}, seeded=True, diagnostics=False)


def law_released_norm_sums_stay_in_their_bounds() -> None:
    """Through the mechanism, for whatever K' the noise gives; and the filter is never overrun (rule 4)."""
    for norm_sum in NormSum:
        c = config(Method.DPIS_ADAPTIVE, epochs=3, norm_sum=norm_sum)
        for extreme in EXTREMES:
            journal = Listener(header_of(c).guard())
            system = Small(c, rows(*NORMS), rigged(extreme), journal, PlainSums(3))
            for _ in range(c.epochs):
                terms = system.begin()
                smallest = c.batch_size / (c.rate_cap * c.n_public)
                assert smallest * (1 - 1e-12) <= terms.kappa <= 1
                assert terms.sampling_rate <= c.rate_cap * (1 + 1e-12)
                assert math.isclose(terms.equivalent_batch, c.n_public * terms.sampling_rate)
                if math.isnan(extreme) or extreme > 1:
                    assert terms.kappa == 1
                elif extreme < 0:
                    assert math.isclose(terms.kappa, smallest)
                for _ in range(system.mechanism.steps_left):
                    system.step()
                system.mechanism.end_epoch()


def law_the_number_of_records_decides_nothing() -> None:
    """n and n + 1 records, the last one of no weight: plan, header, events, terms, updates (rule 5)."""
    everybody = rows(*NORMS)
    for method in PRIVATE:
        c = config(method, n_public=6, batch_size=2, rate_cap=1.0)
        if method is not Method.DPIS_ADAPTIVE:
            c = config(method, n_public=6, batch_size=2, equivalent_batch=6)  # all are drawn
        runs = []
        for records in (everybody, torch.cat([everybody, torch.zeros(1, 3).double()])):
            system = Small(c, records, rigged(noise=0.0))
            before = header_of(c)
            terms, updates = [], []
            for _ in range(c.epochs):
                terms.append(system.begin())
                caps = [c.clip_norm] * len(records)
                left = system.mechanism.steps_left
                updates += [system.step(range(len(records)), caps) for _ in range(left)]
                system.mechanism.end_epoch()
            runs.append((before, header_of(c), terms, len(updates), system.journal.log, updates))
        *public, first = runs[0]
        *public_too, second = runs[1]
        assert public == public_too
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(first, second, strict=True))


def law_noise_over_sensitivity_is_what_is_charged() -> None:
    """For K' and K*: the noise there is, over the most that one record changes (rules 6, 7)."""
    for c, cadence in (
        (config(Method.DPIS_ADAPTIVE, clip_norm=0.25, norm_sum=NormSum.STALE), "K'"),
        (config(Method.DPIS, **CLIPPING), "K*"),
    ):
        released, charged = norm_sum_of(c, [0.1, 0.2], noise=0.0)
        noisy, _ = norm_sum_of(c, [0.1, 0.2], noise=1.0)
        neighbours = [
            norm_sum_of(c, [0.1, 0.2, norm], noise=0.0)[0]
            for norm in (0.0, 0.2, 0.25, 1.9, 1e9, math.inf)
        ]
        sensitivity = max(abs(other - released) for other in neighbours)
        assert isinstance(charged, Gaussian), cadence
        actual = (noisy - released) / sensitivity
        assert math.isclose(actual, 1.001 * charged.noise_multiplier, rel_tol=1e-6), cadence


def norm_sum_of(c: Config, last_norms: Sequence[float], noise: float):
    """The first norm sum a run releases, and its event."""
    system = Small(c, rows(*[0.1] * len(last_norms)), rigged(noise), gradients=PlainSums(3))
    system.seen(last_norms)
    with watching() as seen:
        system.begin()
        if c.clipping is not None:
            for _ in range(system.mechanism.steps_left):
                system.step([])
            system.mechanism.end_epoch()
    value = next(value for name, value in seen if name == NORM_SUM)
    event = next((e.event for e in system.journal.entries if e.label == NORM_SUM), None)
    return value, event


def law_norm_sums_follow_the_clip_norm() -> None:
    """When C has moved, K' is clipped at the new C and its noise is in units of it (rules 6, 8)."""
    for norm_sum in NormSum:
        c = everything_at_once(norm_sum=norm_sum)
        for star, C in ((1e9, CEILING), (-1e9, LOWEST)):  # whatever the records

            def second(norms, noise, c=c, star=star):
                return second_norm_sum(c, norms, noise, star)

            released, charged = second([0.01, 0.02], 0.0)
            noisy, _ = second([0.01, 0.02], 1.0)
            neighbours = [second([0.01, 0.02, norm], 0.0)[0] for norm in (0.0, 0.25, C, 1e9)]
            sensitivity = max(abs(other - released) for other in neighbours)
            assert math.isclose(sensitivity, C, rel_tol=1e-6)
            actual = (noisy - released) / sensitivity
            assert math.isclose(actual, 1.001 * charged.noise_multiplier, rel_tol=1e-6)


def second_norm_sum(c: Config, norms: Sequence[float], noise: float, noise_of_star: float):
    """K' of the second epoch and its event, after a K* that was all noise."""
    key = rigged(noise)
    key = replace(key, streams={"release:clip": Constant(noise_of_star), **key.streams})
    system = Small(c, rows(*norms), key, gradients=PlainSums(3)).seen(norms)
    with watching() as seen:
        system.begin()
        for _ in range(system.mechanism.steps_left):
            system.step([])
        system.mechanism.end_epoch()
        system.begin()
    values = [value for name, value in seen if name == NORM_SUM]
    events = [entry.event for entry in system.journal.entries if entry.label == NORM_SUM]
    assert len(values) == len(events) == 3  # K', K*, K'
    return values[-1], events[-1]


def law_unseen_records_count_the_clip_norm() -> None:
    """In K' and in K*, whose bound is larger (rule 8); a norm that is not finite is unseen."""
    unseen = [math.inf, math.nan, 0.1, 1.9]
    stale = config(Method.DPIS_ADAPTIVE, clip_norm=0.25, norm_sum=NormSum.STALE)
    assert math.isclose(norm_sum_of(stale, unseen, 0.0)[0], 3 * 0.25 + 0.1, rel_tol=1e-6)
    clipping = config(**CLIPPING)
    assert math.isclose(norm_sum_of(clipping, unseen, 0.0)[0], 2 * 0.25 + 0.1 + 1.9, rel_tol=1e-6)


def law_the_clip_norm_stays_in_its_bounds() -> None:
    """Whatever K* the noise gives (rule 8); and the sampler goes along."""
    for method in (Method.DPIS, Method.DPIS_ADAPTIVE):
        c = config(method, epochs=4, **CLIPPING)
        for extreme in EXTREMES:
            system = Small(c, rows(*NORMS), rigged(extreme), gradients=PlainSums(3))
            for _ in range(c.epochs):
                terms = system.begin()
                assert LOWEST <= terms.clip_norm <= CEILING
                assert terms.clip_norm == system.mechanism.sampler.clip_norm
                for _ in range(system.mechanism.steps_left):
                    system.step()
                system.mechanism.end_epoch()
            if extreme == 0.0 and method is Method.DPIS:
                assert terms.clip_norm not in (LOWEST, CEILING, c.clip_norm)


def law_every_event_is_charged_in_its_order() -> None:
    """What the journal gets is what the plan has: one K an epoch, K* between epochs, every step (6, 7, 8, 15)."""
    clipped = {**CLIPPING, "epochs": 3}
    for c in (
        config(),
        config(**clipped),
        config(Method.DP_SGD_DECAY),
        config(Method.DPIS_ADAPTIVE),
        everything_at_once(),
        everything_at_once(norm_sum=NormSum.FULL_PASS, contribution=Contribution.WEIGHT),
    ):
        system = Small(c, rows(*NORMS), Key.from_seed(4), gradients=PlainSums(3))
        system.run()
        runs = plan_of(c).privacy.runs
        planned = [(run.label, run.event) for run in runs for _ in range(run.count)]
        found = [(entry.label, entry.event) for entry in system.journal.entries]
        if plan_of(c).privacy.adapts:  # steps are solved as they come
            planned = [(label, kind(label, event)) for label, event in planned]
            found = [(label, kind(label, event)) for label, event in found]
        assert found == planned


def kind(label: str, event):
    return PoissonGaussian if label == GRADIENT and isinstance(event, PoissonGaussian) else event


def law_events_come_before_their_outputs() -> None:
    """No draw and no noise whose event the journal does not hold yet (rule 21)."""
    system = Small(everything_at_once(), rows(*NORMS), Key.from_seed(4), gradients=PlainSums(3))
    log, sampler = system.journal.log, system.mechanism.sampler
    draw = sampler.draw
    sampler.draw = lambda rate, stream: (log.append("draw"), draw(rate, stream))[1]
    with watching() as seen:
        for _ in range(3):
            system.begin()
            check_order(log, sum(name == NORM_SUM for name, _ in seen))
            while system.mechanism.steps_left:
                system.step()
                check_order(log, sum(name == NORM_SUM for name, _ in seen))
            system.mechanism.end_epoch()
            check_order(log, sum(name == NORM_SUM for name, _ in seen))


def check_order(log, norm_sums: int) -> None:
    paid = {GRADIENT: 0, NORM_SUM: 0}
    drawn = 0
    for item in log:
        if item == "draw":
            drawn += 1
        else:
            paid[item.label] += 1
        assert drawn <= paid[GRADIENT]
    assert norm_sums <= paid[NORM_SUM]
