"""A plan, made as `dpis train` would make it, and shown: as tables, or as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpis.accounting import (
    Accountant,
    AdaptivePlan,
    Adjacency,
    Cadence,
    Mode,
    PredeclaredPlan,
    Release,
    epsilon_by_pld,
    epsilon_by_rdp,
)
from dpis.accounting.renyi import renyi_divergence
from dpis.accounting.workload import releases_over_run
from dpis.app.jobs.job_options import JobOptions
from dpis.errors import InputError
from dpis.mechanism import Config, make_plan

Plan = PredeclaredPlan | AdaptivePlan


def made_plan(asked: JobOptions, adjacency: str, releases: Sequence[str]) -> Plan:
    """The plan that a run with these options follows.

    Args:
        asked: the options of the run.
        adjacency: between which datasets the promise holds; zero-out is that of a count read from the data.
        releases: other noisy statistics, as ``NAME=MULTIPLIER[@epoch]``.
    """
    assert asked.n_public is not None
    privacy = asked.privacy
    if Adjacency.parse(adjacency) is Adjacency.ZERO_OUT:
        privacy = replace(privacy, n_public=None)
    config = Config.settle(
        privacy,
        records=asked.n_public,
        batch_size=asked.batch_size,
        epochs=asked.epochs,
        releases=tuple(_parse_release(text) for text in releases),
    )
    plan = make_plan(config).privacy
    if not isinstance(plan, Plan):
        raise InputError(f"--method {asked.method} is not private: there is no noise to plan")
    return plan


def _parse_release(text: str) -> Release:
    name, separator, rest = text.partition("=")
    number, at, cadence = rest.partition("@")
    try:
        multiplier = float(number)
    except ValueError:
        multiplier = float("nan")
    if not (separator and name and multiplier > 0) or (at and cadence != "epoch"):
        raise InputError(
            f"--release takes NAME=MULTIPLIER or NAME=MULTIPLIER@epoch, found {text!r}"
        )
    release = Release(name, multiplier, Cadence.EACH_EPOCH if at else Cadence.ONCE)
    _ = release.event  # a multiplier that cannot be accounted for is refused here, by name
    return release


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object; per-epoch values are lists of length E."""
    workload = plan.workload
    return {
        "mode": Mode.ADAPTIVE if plan.adapts else Mode.PREDECLARED,
        "accountant": plan.accountant,
        "epsilon": plan.epsilon,
        "epsilon_target": plan.budget.epsilon,
        "delta": plan.budget.delta,
        "adjacency": plan.adjacency,
        "n_public": workload.n_public,
        "batch_size": workload.batch_size,
        "epochs": workload.epochs,
        "steps_per_epoch": workload.steps_per_epoch,
        "steps": workload.steps,
        "kappa": workload.kappa,
        "sampling_rate": workload.sampling_rate,
        "equivalent_batch": workload.equivalent_batch,
        "epsilon_rdp": epsilon_by_rdp(plan.composition, plan.budget.delta),
        "epsilon_pld": _epsilon_pld(plan),
        "releases": [
            {
                "label": r.label,
                "noise_multiplier": r.noise_multiplier,
                "times": releases_over_run(workload, [r]).events,
            }
            for r in plan.releases
        ],
        "grad_noise_multiplier": plan.grad_noise_multipliers,
        "noise_multiplier_z": plan.planned_noise,
        **plan.filter_facts,
    }


def _epsilon_pld(plan: Plan) -> float | None:
    if plan.accountant is Accountant.PLD:
        return plan.epsilon
    try:
        return epsilon_by_pld(plan.composition, plan.budget.delta)
    except InputError:  # delta too small for it
        return None


def print_plan(plan: Plan) -> None:
    """The plan for a reader: the claim, what each kind of event spends, the noise of each epoch."""
    console, data = Console(), plan_as_json(plan)
    console.print(
        f"[bold]{data['mode']} plan[/bold]  epsilon = {data['epsilon_target']:g}, delta = {data['delta']:g}"
    )
    console.print(_claim_in_words(data))
    console.print(_spending_table(plan))
    console.print(_epoch_table(plan))


def _claim_in_words(data: dict[str, Any]) -> str:
    pld = "not computed" if data["epsilon_pld"] is None else f"{data['epsilon_pld']:.4f}"
    lines = [
        f"  {data['steps']:,} steps ({data['epochs']} epochs of {data['steps_per_epoch']}) on {data['n_public']:,} "
        f"records, {data['adjacency']} adjacency",
        f"  epsilon by PLD {pld}, by RDP {data['epsilon_rdp']:.4f}",
    ]
    if data["mode"] == Mode.ADAPTIVE:
        lines += [
            f"  Renyi filter at order alpha = {data['alpha']}, rho budget {data['rho_budget']:.6g}",
            f"  {100 * data['reserve_share']:g} % of the epochs reserve as if kappa were 1",
            f"  norm sums are released with noise multiplier {data['norm_noise_multiplier']:g}",
            "  noise below: for kappa = 1; a run lowers it as the released norms fall",
            "  the claim is the budget; PLD does not apply to noise chosen during the run",
        ]
    return "\n".join(lines)


def _spending_table(plan: Plan) -> Table:
    """What each kind of event spends, as a share of the Renyi divergence at the plan's best order."""
    spent: dict[str, tuple[int, float]] = {}
    for run in plan.runs:
        count, cost = spent.get(run.label, (0, 0.0))
        more = run.count * renyi_divergence(run.event, plan.order)
        spent[run.label] = (count + run.count, cost + more)
    total = sum(cost for _, cost in spent.values())
    table = Table("event", "count", f"spends (at Renyi order {plan.order})", title_justify="left")
    for label, (count, cost) in spent.items():
        table.add_row(escape(label), f"{count:,}", f"{100 * cost / total:.2f} %")
    return table


def _epoch_table(plan: Plan) -> Table:
    """Noise and sampling by epoch; epochs that are alike share a row."""
    columns = {
        "kappa": (plan.workload.kappa, ".4g"),
        "noise sigma_G": (plan.grad_noise_multipliers, ".4f"),
        "noise z": (plan.planned_noise, ".4f"),
        "sampling rate": (plan.workload.sampling_rate, ".6f"),
        "same privacy as DP-SGD with batch": (plan.workload.equivalent_batch, ",.1f"),
    }
    table = Table("epochs", *columns)
    epochs = enumerate(zip(*(values for values, _ in columns.values()), strict=True), start=1)
    for values, alike in groupby(epochs, key=lambda epoch: epoch[1]):
        first, *others = (number for number, _ in alike)
        span = f"{first}-{others[-1]}" if others else f"{first}"
        shown = zip(values, columns.values(), strict=True)
        table.add_row(span, *(f"{value:{form}}" for value, (_, form) in shown))
    return table
