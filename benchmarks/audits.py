"""What audits find: how much of epsilon, which bugs with how many runs, and who leaks less under importance sampling.

    PYTHONPATH=. python benchmarks/audits.py tightness          bounds over the true epsilon
    PYTHONPATH=. python benchmarks/audits.py bugs               bug, bound, runs that are needed
    PYTHONPATH=. python benchmarks/audits.py canaries           one run: bounds and ceilings by number of canaries
    PYTHONPATH=. python benchmarks/audits.py records --svg docs/who-leaks.svg

Seeds are fixed. A number of runs is enough if nine audits of ten find the bug.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

from dpis.accounting import Composition, PoissonGaussian, epsilon_by_pld
from dpis.auditing import Findings, audit_mechanism
from dpis.auditing.bounds import best_threshold, epsilon_of_rates, rates_of
from dpis.auditing.mechanism_audit import Diagonal
from dpis.auditing.scores import Scored, log_ratio
from dpis.mechanism import Config, EventCounter, Mechanism, Method, make_plan, noisy_update
from dpis.randomness import Key
from tests.auditing.attacks import BUGS, less_noise
from tests.auditing.test_one_run import audited

SEEDS = range(10)
ENOUGH = 9


def tightness() -> Iterator[tuple[str, ...]]:
    """One step and a hundred, at epsilon 1 and 4."""
    yield "steps", "rate", "epsilon", "runs", "by curve", "share", "at delta", "bound", "share"
    plans = ((1, 1, 1), (1, 9, 5), (100, 1000, 10))
    for steps, n, batch in plans:
        for epsilon in (1.0, 4.0):
            tried = Config(epsilon=epsilon, delta=1e-5, n_public=n, batch_size=batch, epochs=1)
            found = audit_mechanism(tried, runs=1_000_000, key=Key.from_seed(1))
            assert found.curve_bound is not None
            rate = make_plan(tried).workload.sampling_rate[0]
            yield (
                f"{steps}",
                f"{rate:g}",
                f"{epsilon:g}",
                "1,000,000",
                f"{found.curve_bound:.3f}",
                f"{found.curve_bound / epsilon:.1%}",
                f"{found.bound_delta:g}",
                f"{found.bound:.3f} of {found.claim_at_bound_delta:.3f}",
                f"{found.bound / found.claim_at_bound_delta:.1%}",
            )


def bugs() -> Iterator[tuple[str, ...]]:
    """How many runs each takes."""
    yield "bug", "claim", "bound", "runs"
    for bug in BUGS:
        runs, found = _enough(lambda runs, seed, b=bug: b.bound(runs, seed))
        yield bug.name, f"{found.epsilon:g}", f"{found.curve_bound:.2f}", f"{runs:,}"


def _enough(audit: Callable[[int, int], Findings]) -> tuple[int, Findings]:
    for runs in (300, 1000, 3000, 10_000, 30_000, 100_000, 300_000):
        found = [audit(runs, seed) for seed in SEEDS]
        if sum(one.refuted for one in found) >= ENOUGH:
            return runs, found[0]
    return runs, found[0]


def canaries() -> Iterator[tuple[str, ...]]:
    """One run: what so many canaries show of right code, and with a part of the noise."""
    yield "claim", "noise", "canaries", "bound", "ceiling", "by curves", "ceiling", "estimate"
    for epsilon in (3.0, 8.0):
        tried = Config(
            epsilon=epsilon, delta=1e-5, n_public=10_000, batch_size=1000, epochs=4
        )  # 40 steps
        for factor in (1.0, 0.5):
            for count in (100, 1000, 10_000):
                with pytest.MonkeyPatch.context() as patch:
                    if factor < 1:
                        patch.setattr(noisy_update, "add_noise", less_noise(factor))
                    found = audited(tried, count, Key.from_seed(1), width=count).findings()
                yield (
                    f"{epsilon:g}",
                    f"x {factor:g}",
                    f"{count:,}",
                    f"{found.bound:.2f}",
                    f"{found.ceiling:.2f}",
                    f"{found.curve_bound:.2f}",
                    f"{found.curve_ceiling:.2f}",
                    f"{found.estimate:.2f}",
                )


# ── who leaks less ───────────────────────────────────────────────────────────────────────────────────

DELTA, HEADROOM = 1e-3, 2.0
NORMS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)
"""Of a record's gradient, in units of the clip norm."""


@dataclass(frozen=True)
class Leak:
    """Epsilon of a record whose gradient always has one norm: exactly, and as an audit bounds it."""

    norm: float
    exact: float
    bound: float


def leak(tried: Config, norm: float, runs: int) -> Leak:
    """Of a record that was seen before, under the plan of a config; the attacker knows its norm."""
    plan = make_plan(tried)
    terms, config = plan.privacy.terms(1, tried.clip_norm, None, {}), plan.config
    importance = min(1.0, HEADROOM * norm) if config.method.by_importance else 1.0
    rate, length = terms.sampling_rate * importance, min(1.0, norm / importance)
    event = PoissonGaussian(sampling_rate=rate, noise_multiplier=terms.noise_multiplier / length)
    exact = epsilon_by_pld(Composition(((event, plan.workload.steps),)), DELTA)
    seen = _scores(tried, norm, rate, length, runs)
    thirds = [
        (own[: len(own) // 3], own[len(own) // 3 :]) for own in (seen.with_canary, seen.without)
    ]
    (first_in, last_in), (first_out, last_out) = thirds
    chosen = best_threshold(first_in, first_out, lambda a, b: epsilon_of_rates(a, b, DELTA))
    return Leak(norm, exact, rates_of(chosen, last_in, last_out).epsilon(DELTA))


def _scores(tried: Config, norm: float, rate: float, length: float, runs: int) -> Scored:
    """As the mechanism's audit, for records of this norm."""
    plan, key = make_plan(tried), Key.from_seed(round(1000 * norm))
    places = torch.arange(runs // 2) * 2
    lengths = torch.full((len(places),), norm * tried.clip_norm, dtype=torch.float64)
    mechanism = Mechanism(plan, len(places), key, EventCounter())
    mechanism.sampler.observe(torch.arange(len(places)), lengths)
    parameters, scores = {"canaries": torch.zeros(runs)}, np.zeros(runs)
    terms = mechanism.begin_epoch()
    unit = terms.clip_norm / terms.equivalent_batch
    while mechanism.steps_left:
        draw = mechanism.draw()
        total = mechanism.start_sum(draw, parameters)
        mechanism.add(total, Diagonal(places[draw.indices], lengths[draw.indices], runs))
        released = mechanism.release_sum(total)["canaries"].double().numpy() / unit
        scores += log_ratio(released / length, rate, terms.noise_multiplier / length)
    return Scored(scores[::2], scores[1::2])


def records(runs: int) -> dict[str, list[Leak]]:
    """By sampler, for the same claim."""
    tried = Config(
        epsilon=4.0,
        delta=1e-5,
        n_public=1000,
        batch_size=50,
        epochs=1,
        headroom=HEADROOM,
        floor=0.01,
    )
    return {
        "importance": [leak(tried, norm, runs) for norm in NORMS],
        "uniform": [leak(replace(tried, method=Method.DP_SGD), norm, runs) for norm in NORMS],
    }


def records_table(leaks: dict[str, list[Leak]]) -> Iterator[tuple[str, ...]]:
    """One row a norm."""
    yield "norm / C", "importance", "audited", "uniform", "audited"
    for own, other in zip(leaks["importance"], leaks["uniform"], strict=True):
        cells = (own.exact, own.bound, other.exact, other.bound)
        yield f"{own.norm:g}", *(f"{cell:.3f}" for cell in cells)


def drawn(leaks: dict[str, list[Leak]]) -> str:
    """The same as a picture: lines are exact, marks are audited."""
    most = max(one.exact for line in leaks.values() for one in line)

    def place(norm: float, epsilon: float) -> tuple[float, float]:
        across = (np.log(norm) - np.log(NORMS[0])) / (np.log(NORMS[-1]) - np.log(NORMS[0]))
        return 60 + 380 * float(across), 260 - 220 * epsilon / most

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 310" font-family="sans-serif" font-size="12">',
        '<rect width="560" height="310" fill="#fff"/>',
        '<path d="M60 40V260H440" fill="none" stroke="#666"/>',
        f'<text x="60" y="24">epsilon of one record, at delta = {DELTA:g}; claim: epsilon = 4, delta = 1e-5</text>',
        '<text x="250" y="302" text-anchor="middle">norm of its gradient / clip norm</text>',
    ]
    for norm in NORMS:
        x, _ = place(norm, 0)
        parts.append(f'<text x="{x:.0f}" y="278" text-anchor="middle">{norm:g}</text>')
    for tick in np.linspace(0, most, 5):
        _, y = place(1, tick)
        parts.append(f'<text x="52" y="{y + 4:.0f}" text-anchor="end">{tick:.2f}</text>')
    for (name, line), colour in zip(leaks.items(), ("#c2410c", "#1d4ed8"), strict=True):
        points = [place(one.norm, one.exact) for one in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if name == "uniform" else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        for one in line:
            x, y = place(one.norm, one.bound)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
        y = 60 if name == "importance" else 78
        parts.append(f'<text x="450" y="{y}" fill="{colour}">{name}</text>')
    parts.append(
        '<text x="450" y="96">line: exact</text><text x="450" y="112">dot: audited</text></svg>'
    )
    return "\n".join(parts) + "\n"


def show(rows: Iterator[tuple[str, ...]]) -> None:
    head = next(rows)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tightness", "bugs", "canaries", "records"))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--runs", type=int, default=1_000_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "records":
        leaks = records(asked.runs)
        show(records_table(leaks))
        if asked.svg is not None:
            asked.svg.write_text(drawn(leaks), encoding="utf-8")
        return
    show({"tightness": tightness, "bugs": bugs, "canaries": canaries}[asked.what]())


if __name__ == "__main__":
    main()
