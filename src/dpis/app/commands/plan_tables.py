"""A plan, made as `dpis plan` was asked to, and shown: as tables, or as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpis.accounting import (
    Accountant,
    AdaptivePlan,
    Adjacency,
    Budget,
    Cadence,
    Composition,
    PlannedRun,
    PredeclaredPlan,
    Release,
    Workload,
    epsilon_by_pld,
    epsilon_by_rdp,
    exponential_decay,
    plan_adaptive,
    plan_predeclared,
)
from dpis.accounting.header import Mode
from dpis.accounting.renyi import renyi_divergence
from dpis.accounting.workload import releases_over_run
from dpis.app.jobs.job_options import PlanOptions
from dpis.errors import InputError


def made_plan(
    asked: PlanOptions, *, mode: str, adjacency: str, releases: Sequence[str]
) -> PredeclaredPlan | AdaptivePlan:
    """The plan that was asked for.

    Args:
        asked: the options that training has too.
        mode: what the claim rests on.
        adjacency: between which datasets the promise holds.
        releases: other noisy statistics, as ``NAME=MULTIPLIER[@epoch]``.
    """
    assert asked.n_public is not None
    assert asked.batch_size is not None
    budget = Budget(asked.epsilon, asked.delta)
    workload = Workload.create(
        n_public=asked.n_public,
        batch_size=asked.batch_size,
        epochs=asked.epochs,
        kappa=asked.kappa,
        equivalent_batch=asked.equivalent_batch,
    )
    common: dict[str, Any] = {
        "adjacency": Adjacency.parse(adjacency),
        "releases": [_parse_release(text) for text in releases],
    }
    if _parse_mode(mode) is Mode.PREDECLARED:
        _refuse(asked, "reserve_share", "the adaptive mode")
        decays = "decay_rate" in asked.said
        return plan_predeclared(
            budget,
            workload,
            accountant=Accountant(asked.accountant),
            noise_shape=exponential_decay(asked.decay_rate, asked.epochs) if decays else None,
            **common,
        )
    _refuse(asked, "decay_rate", "the predeclared mode")
    if "accountant" in asked.said and asked.accountant != Accountant.RDP:
        raise InputError(
            "the adaptive mode is accounted by a Renyi filter alone: leave --accountant out or use rdp"
        )
    return plan_adaptive(budget, workload, reserve_share=asked.reserve_share, **common)


def _refuse(asked: PlanOptions, name: str, where: str) -> None:
    if name in asked.said:
        raise InputError(
            f"--{name.replace('_', '-')} belongs to {where}: it would have no effect here"
        )


def _parse_mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        raise InputError(f"mode must be predeclared or adaptive, found {name!r}") from None


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


def plan_as_json(plan: PredeclaredPlan | AdaptivePlan) -> dict[str, Any]:
    """The plan as one JSON object; per-epoch values are lists of length E."""
    workload, composition = plan.workload, plan.composition
    epsilon_rdp = epsilon_by_rdp(composition, plan.budget.delta)
    common = {
        "epsilon_target": plan.budget.epsilon,
        "delta": plan.budget.delta,
        "adjacency": plan.adjacency.value,
        "n_public": workload.n_public,
        "batch_size": workload.batch_size,
        "epochs": workload.epochs,
        "steps_per_epoch": workload.steps_per_epoch,
        "steps": workload.steps,
        "kappa": list(workload.kappa),
        "sampling_rate": list(workload.sampling_rate),
        "equivalent_batch": list(workload.equivalent_batch),
        "epsilon_rdp": epsilon_rdp,
        "epsilon_pld": _epsilon_pld(plan, composition),
        "releases": [
            {
                "label": r.label,
                "noise_multiplier": r.noise_multiplier,
                "times": releases_over_run(workload, [r]).events,
            }
            for r in plan.releases
        ],
    }
    return {
        "mode": (Mode.ADAPTIVE if plan.adapts else Mode.PREDECLARED).value,
        "accountant": plan.accountant.value,
        "epsilon": plan.epsilon,
        **common,
        "grad_noise_multiplier": list(plan.grad_noise_multipliers),
        "noise_multiplier_z": list(plan.planned_noise),
        **plan.filter_facts,
    }


def _epsilon_pld(plan: PredeclaredPlan | AdaptivePlan, composition: Composition) -> float | None:
    if plan.accountant is Accountant.PLD:
        return plan.epsilon
    try:
        return epsilon_by_pld(composition, plan.budget.delta)
    except InputError:  # delta too small for it
        return None


def print_plan(plan: PredeclaredPlan | AdaptivePlan) -> None:
    """The plan for a reader: the claim, what each kind of event spends, the noise of each epoch."""
    console, data = Console(), plan_as_json(plan)
    console.print(
        f"[bold]{data['mode']} plan[/bold]  epsilon = {data['epsilon_target']:g}, delta = {data['delta']:g}"
    )
    console.print(_claim_in_words(data))
    console.print(_spending_table(plan))
    console.print(_epoch_table(data))


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


def _spending_table(plan: PredeclaredPlan | AdaptivePlan) -> Table:
    """What each kind of event spends, as a share of the Renyi divergence at the plan's best order."""
    order = plan.order
    spent: dict[str, tuple[int, float]] = {}
    for run in plan.runs:
        count, cost = spent.get(run.label, (0, 0.0))
        spent[run.label] = (count + run.count, cost + _cost(run, order))
    total = sum(cost for _, cost in spent.values())
    table = Table("event", "count", f"spends (at Renyi order {order})", title_justify="left")
    for label, (count, cost) in spent.items():
        table.add_row(escape(label), f"{count:,}", f"{100 * cost / total:.2f} %")
    return table


def _cost(run: PlannedRun, order: int) -> float:
    return run.count * renyi_divergence(run.event, order)


def _epoch_table(data: dict[str, Any]) -> Table:
    """Noise and sampling by epoch; epochs that are alike share a row."""
    table = Table(
        "epochs",
        "kappa",
        "noise sigma_G",
        "noise z",
        "sampling rate",
        "same privacy as DP-SGD with batch",
    )
    keys = (
        "kappa",
        "grad_noise_multiplier",
        "noise_multiplier_z",
        "sampling_rate",
        "equivalent_batch",
    )
    rows = list(zip(*(data[key] for key in keys), strict=True))
    first = 0
    for epoch, row in enumerate(rows):
        if epoch + 1 < len(rows) and rows[epoch + 1] == row:
            continue
        span = f"{first + 1}" if first == epoch else f"{first + 1}-{epoch + 1}"
        kappa, sigma, z, rate, batch = row
        table.add_row(
            span, f"{kappa:.4g}", f"{sigma:.4f}", f"{z:.4f}", f"{rate:.6f}", f"{batch:,.1f}"
        )
        first = epoch + 1
    return table
