"""The figures of the reproduction: noise and its causes, accuracy by epsilon, kappa, accuracy by work. From rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from dpis.app.page.charts import STYLES, Chart, Series, over_epochs
from dpis.errors import DpisError
from reproduction import published
from reproduction.noise_causes import NoiseCauses, causes_of
from reproduction.recipes import PAPER
from reproduction.rows import Row, measured, of_last_setting, select
from reproduction.tables import at_epsilon, method_name


def method_style(method: str) -> int:
    """The same colour and shape for a method in every chart."""
    order = [*published.METHODS]
    return order.index(method) % STYLES if method in order else order.index("sgd")


# ── noise ────────────────────────────────────────────────────────────────────────────────────────────


def noise_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """sigma_G by epoch, and which part of its fall has which cause; one chart an epsilon of the paper's Figure 1."""
    for epsilon in published.FIGURE_1_EPSILONS:
        row = _run_of_dpis(rows, published.FIGURE_1_DATASET, epsilon, ("figure1", "table3"))
        series, note = ([], None) if row is None else _explained(row, epsilon)
        shown = published.DATASETS[published.FIGURE_1_DATASET]
        key = f"noise-{epsilon:g}".replace(".", "-")
        title = f"Noise by epoch, {shown}, {at_epsilon(epsilon)}"
        yield over_epochs(key, title, "noise multiplier sigma_G", series, note=note)


def _run_of_dpis(
    rows: Sequence[Row], dataset: str, epsilon: float, tables: Sequence[str]
) -> Row | None:
    """The paper's DPIS with what it released by epoch: the first seed, of the first table that has one."""
    for table in tables:
        same = select(
            rows,
            table=table,
            dataset=dataset,
            method="dpis-adaptive",
            recipe=PAPER,
            epsilon=epsilon,
        )
        told = [row for row in same if row.get("history")]
        if told:
            return min(told, key=lambda row: row.get("seed") or 0)
    return None


def _explained(row: Row, epsilon: float) -> tuple[list[Series], str]:
    """The lines of a noise chart and what to see in them; or no lines, and why not."""
    try:
        causes = causes_of(row)
    except DpisError as error:
        return (
            [],
            f"Not drawn, since the causes cannot be told from the run of seed {row.get('seed')}: {error}.",
        )
    return _noise_series(causes), _noise_note(row, causes, epsilon)


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
        yield Chart(
            key=f"epsilon-{dataset}",
            title=f"{shown}: accuracy by epsilon",
            x="epsilon",
            y="test accuracy, %",
            series=[
                series
                for method in ("dpis-adaptive", rival, "dp-sgd")
                for series in _ours_and_the_papers(rows, dataset, method)
            ],
            x_ticks=published.TABLE_3_EPSILONS,
        )


def _ours_and_the_papers(rows: Sequence[Row], dataset: str, method: str) -> tuple[Series, Series]:
    name, style = published.METHODS[method], method_style(method)
    label, grid = name.removeprefix("DP-SGD-"), published.TABLE_3[dataset][method]
    ours = _means_by_epsilon(rows, dataset, method)
    paper = list(zip(grid.values, grid.figures, strict=True))
    own_label = "" if ours else label
    return (
        Series(f"{name}, ours", ours, label, style=style, dashed=False),
        Series(f"{name}, paper", paper, own_label, style=style, hollow=True, dashed=False),
    )


def _means_by_epsilon(rows: Sequence[Row], dataset: str, method: str) -> list[tuple[float, float]]:
    mine = select(
        rows, table="table3", dataset=dataset, method=method, recipe=PAPER, accountant="rdp"
    )
    results = {e: measured(select(mine, epsilon=e)) for e in sorted({r["epsilon"] for r in mine})}
    return [(float(e), result.mean) for e, result in results.items() if result is not None]


# ── kappa ────────────────────────────────────────────────────────────────────────────────────────────


def kappa_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Norm utilisation by epoch of the adaptive runs, a chart a data set and a line an epsilon."""
    for dataset, shown in published.DATASETS.items():
        series = list(_kappa_series(rows, dataset))
        if series:
            yield over_epochs(f"kappa-{dataset}", f"{shown}: kappa by epoch", "kappa", series)


def _kappa_series(rows: Sequence[Row], dataset: str) -> Iterator[Series]:
    for style, epsilon in enumerate(published.TABLE_3_EPSILONS):
        row = _run_of_dpis(rows, dataset, epsilon, ("table3", "figure1"))
        if row is None:
            continue
        told = [epoch for epoch in row["history"] if epoch.get("kappa") is not None]
        yield Series(
            f"{at_epsilon(epsilon)}, seed {row.get('seed')}",
            [(float(epoch["epoch"]), float(epoch["kappa"])) for epoch in told],
            f"{epsilon:g}",
            style=style,
        )


# ── work ─────────────────────────────────────────────────────────────────────────────────────────────


Kind = tuple[str, str, str]
"""Method, recipe and accountant."""


def work_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Accuracy against gradients computed, at the epsilon with the most kinds of runs; a chart a data set."""
    for dataset, shown in published.DATASETS.items():
        by_epsilon = _kinds_by_epsilon(select(rows, table="table3", dataset=dataset))
        if by_epsilon:
            epsilon = max(by_epsilon, key=lambda e: (len(by_epsilon[e]), -abs(e - 1)))
            yield _work_chart(dataset, shown, epsilon, by_epsilon[epsilon])


def _kinds_by_epsilon(rows: Sequence[Row]) -> dict[float, dict[Kind, list[Row]]]:
    """Rows with a budget that say how many gradients were computed."""
    found: dict[float, dict[Kind, list[Row]]] = {}
    for row in rows:
        work = row.get("gradient_evaluations")
        if row.get("epsilon") is not None and isinstance(work, int) and work > 0:
            kind = (row["method"], row["recipe"], str(row.get("accountant")))
            found.setdefault(row["epsilon"], {}).setdefault(kind, []).append(row)
    return found


def _work_chart(
    dataset: str, shown: str, epsilon: float, kinds: Mapping[Kind, Sequence[Row]]
) -> Chart:
    series = []
    for (method, recipe, account), group in sorted(kinds.items()):
        result = measured(group)
        if result is None:
            continue
        work = statistics.fmean(row["gradient_evaluations"] for row in of_last_setting(group))
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
        title=f"{shown}: accuracy by work, {at_epsilon(epsilon)}",
        x="gradients computed",
        y="test accuracy, %",
        series=series,
        lines=False,
        log_x=True,
    )
