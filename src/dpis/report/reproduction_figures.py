"""The figures of the reproduction: noise and its causes, accuracy by epsilon, kappa, accuracy by work. From rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from dpis.accounting import Budget, Cadence, Release, plan_adaptive
from dpis.accounting.adaptive import count_noise_multiplier
from dpis.accounting.verify import COUNT
from dpis.errors import DpisError
from dpis.report.charts import STYLES, Chart, Series
from dpis.report.rows import (
    Row,
    clips_adaptively,
    counted,
    measured,
    method_name,
    option,
)
from dpis.reproduce import published
from dpis.reproduce.noise_causes import NoiseCauses, noise_causes, workload_of
from dpis.reproduce.settings import PAPER


def method_style(method: str) -> int:
    """The same colour and shape for a method in every chart."""
    order = [*published.METHODS]
    return order.index(method) % STYLES if method in order else order.index("sgd")


# ── noise ────────────────────────────────────────────────────────────────────────────────────────────


def noise_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """sigma_G by epoch, and which part of its fall has which cause; one chart an epsilon of the paper's Figure 1."""
    for epsilon in published.FIGURE_1_EPSILONS:
        row = _noise_row(rows, epsilon)
        causes = None if row is None else causes_of(row)
        title = f"Noise by epoch, {published.DATASETS[published.FIGURE_1_DATASET]}, ε\u00a0=\u00a0{epsilon:g}"
        yield Chart(
            key=f"noise-{epsilon:g}".replace(".", "-"),
            title=title,
            x="epoch",
            y="noise multiplier sigma_G",
            epochs=True,
            y_from_zero=True,
            series=() if causes is None else _noise_series(causes),
            note=None if causes is None or row is None else _noise_note(row, causes, epsilon),
        )


def _noise_row(rows: Sequence[Row], epsilon: float) -> Row | None:
    fitting = [
        row
        for row in rows
        if counted(row)
        and row.get("method") == "dpis-adaptive"
        and row.get("dataset") == published.FIGURE_1_DATASET
        and row.get("epsilon") == epsilon
        and row.get("recipe") == PAPER
        and row.get("history")
        and row.get("table") in ("figure1", "table3")
    ]
    return min(
        fitting, key=lambda row: (row["table"] != "figure1", row.get("seed") or 0), default=None
    )


def causes_of(row: Row) -> NoiseCauses | None:
    """The two causes of an adaptive row's noise; None where the row does not say enough."""
    if option(row, "normalise") == "channel":  # releases of its own, which a row does not tell
        return None
    try:
        claim, history = row["claim"], row["history"]
        budget = Budget(float(claim["epsilon"]), float(claim["delta"]))
        pairs = [(float(e["sampling_rate"]), float(e["kappa"])) for e in history]
        workload = workload_of(int(claim["n_public"]), pairs)
        releases: tuple[Release, ...] = ()
        if claim.get("n_public_source") == "released":
            releases += (Release(COUNT, count_noise_multiplier(workload.n_public)),)
        cadences = [Cadence.EACH_EPOCH] + [Cadence.BETWEEN_EPOCHS] * clips_adaptively(row)
        order = plan_adaptive(
            budget, workload, releases=releases, norm_releases_per_epoch=cadences
        ).order
        sigmas = [float(e["grad_noise_multiplier"]) for e in history]
        return noise_causes(budget, workload, order, [kappa for _, kappa in pairs], sigmas)
    except (KeyError, TypeError, ValueError, DpisError):
        return None


def _noise_series(causes: NoiseCauses) -> list[Series]:
    def over_epochs(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(float(epoch), value) for epoch, value in enumerate(values, start=1)]

    return [
        Series("DP-SGD, same batch and epochs", over_epochs(causes.uniform), "DP-SGD", style=4),
        Series("importance sampling alone", over_epochs(causes.importance), "sampling", style=1),
        Series(
            "as run: and budget moved to late epochs", over_epochs(causes.actual), "as run", style=0
        ),
    ]


def _noise_note(row: Row, causes: NoiseCauses, epsilon: float) -> str:
    uniform, alone, actual = causes.uniform[-1], causes.importance[-1], causes.actual[-1]
    batch = round(
        row["history"][0]["sampling_rate"] * row["history"][0]["kappa"] * row["claim"]["n_public"]
    )
    note = f"Batch {batch:,}, {len(causes.actual)} epochs, seed {row.get('seed')}. "
    if actual < min(uniform, alone):
        share = (uniform - alone) / (uniform - actual)
        note += (
            f"Last epoch: {uniform:.2f} falls to {actual:.2f}; importance sampling gives {100 * share:.0f} % of the "
            f"fall, the schedule the other {100 - 100 * share:.0f} %."
        )
    else:
        note += f"Last epoch: {uniform:.2f} for DP-SGD, {actual:.2f} as run."
    stated = published.FIGURE_1.get(epsilon, {}).get("dpis-adaptive")
    if stated is not None:
        note += f" The paper states {stated.first:g} to {stated.last:g} for DPIS at a batch it does not name."
    return note


# ── accuracy by epsilon ──────────────────────────────────────────────────────────────────────────────


def epsilon_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Ours and the paper's, a chart a data set; three methods, so that it stays readable."""
    for dataset, shown in published.DATASETS.items():
        grids = published.TABLE_3[dataset]
        rival = "dp-sgd-hf" if "dp-sgd-hf" in grids else "dp-sgd-decay"
        series = []
        for method in ("dpis-adaptive", rival, "dp-sgd"):
            name, style = published.METHODS[method], method_style(method)
            ours = _means_by_epsilon(rows, dataset, method)
            label = name.removeprefix("DP-SGD-")
            paper = list(zip(grids[method].values, grids[method].figures, strict=True))
            series.append(Series(f"{name}, ours", ours, label, style=style, dashed=False))
            series.append(
                Series(
                    f"{name}, paper",
                    paper,
                    "" if ours else label,
                    style=style,
                    hollow=True,
                    dashed=False,
                )
            )
        yield Chart(
            key=f"epsilon-{dataset}",
            title=f"{shown}: accuracy by epsilon",
            x="epsilon",
            y="test accuracy, %",
            series=series,
            x_ticks=published.TABLE_3_EPSILONS,
        )


def _means_by_epsilon(rows: Sequence[Row], dataset: str, method: str) -> list[tuple[float, float]]:
    mine = [
        row
        for row in rows
        if counted(row)
        and (row.get("table"), row.get("recipe")) == ("table3", PAPER)
        and (row.get("dataset"), row.get("method")) == (dataset, method)
        and row.get("accountant") == "rdp"
    ]
    found = []
    for epsilon in sorted({row["epsilon"] for row in mine}):
        result = measured(row for row in mine if row["epsilon"] == epsilon)
        if result is not None:
            found.append((float(epsilon), result.mean))
    return found


# ── kappa ────────────────────────────────────────────────────────────────────────────────────────────


def kappa_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Norm utilisation by epoch of the adaptive runs, a chart a data set and a line an epsilon."""
    for dataset, shown in published.DATASETS.items():
        series = []
        for style, epsilon in enumerate(published.TABLE_3_EPSILONS):
            fitting = [
                row
                for row in rows
                if counted(row)
                and (row.get("method"), row.get("dataset")) == ("dpis-adaptive", dataset)
                and (row.get("epsilon"), row.get("recipe")) == (epsilon, PAPER)
                and row.get("table") in ("table3", "figure1")
                and row.get("history")
            ]
            if not fitting:
                continue
            row = min(fitting, key=lambda row: (row["table"] != "table3", row.get("seed") or 0))
            points = [
                (float(e["epoch"]), float(e["kappa"]))
                for e in row["history"]
                if e.get("kappa") is not None
            ]
            series.append(
                Series(
                    f"ε\u00a0=\u00a0{epsilon:g}, seed {row.get('seed')}",
                    points,
                    f"{epsilon:g}",
                    style=style,
                )
            )
        if series:
            yield Chart(
                key=f"kappa-{dataset}",
                title=f"{shown}: kappa by epoch",
                x="epoch",
                y="kappa",
                series=series,
                epochs=True,
                y_from_zero=True,
            )


# ── work ─────────────────────────────────────────────────────────────────────────────────────────────


def work_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Accuracy against gradients computed, at the epsilon with the most kinds of runs; a chart a data set."""
    for dataset, shown in published.DATASETS.items():
        by_epsilon: dict[float, dict[tuple[str, str, str], list[Row]]] = {}
        for row in rows:
            work = row.get("gradient_evaluations")
            here = (row.get("table"), row.get("dataset")) == ("table3", dataset) and counted(row)
            if here and row.get("epsilon") is not None and isinstance(work, int) and work > 0:
                kind = (row["method"], row["recipe"], str(row.get("accountant")))
                by_epsilon.setdefault(row["epsilon"], {}).setdefault(kind, []).append(row)
        if not by_epsilon:
            continue
        epsilon = max(by_epsilon, key=lambda e: (len(by_epsilon[e]), -abs(e - 1)))
        yield _work_chart(dataset, shown, epsilon, by_epsilon[epsilon])


def _work_chart(
    dataset: str, shown: str, epsilon: float, kinds: dict[tuple[str, str, str], list[Row]]
) -> Chart:
    series = []
    for (method, recipe, account), group in sorted(kinds.items()):
        result = measured(group)
        if result is None:
            continue
        work = statistics.fmean(row["gradient_evaluations"] for row in group)
        name = method_name(method) + (f", {recipe}" if recipe != PAPER else "")
        label = published.METHODS.get(method, method) if recipe == PAPER else recipe
        series.append(
            Series(
                f"{name}, {account.upper()}",
                [(work, result.mean)],
                label.removeprefix("DP-SGD-") + (" PLD" if account == "pld" else ""),
                method_name(method),
                method_style(method),
            )
        )
    return Chart(
        key=f"work-{dataset}",
        title=f"{shown}: accuracy by work, ε\u00a0=\u00a0{epsilon:g}",
        x="gradients computed",
        y="test accuracy, %",
        series=series,
        lines=False,
        log_x=True,
    )
