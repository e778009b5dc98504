"""The report: the paper's tables beside our rows, and where all comes from; as a page with figures, and as Markdown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from dpis.app.page.charts import figures
from dpis.app.page.markup import Child, Markup, join, tag
from dpis.app.page.page import box, bullets, page, scrolled, section
from reproduction import published
from reproduction.figures import epsilon_charts, kappa_charts, noise_charts, work_charts
from reproduction.rows import Row, counted, mixed, runs_of
from reproduction.table_cells import in_todays_words
from reproduction.tables import (
    ACCOUNTS,
    Comparison,
    Line,
    PaperTable,
    Section,
    sections,
    signed,
    verdict,
)

TITLE = "The paper's evaluation, run again"

HOW_TO_RUN = "python -m reproduction table3"
"""The command that fills in what is missing."""

NOT_PRIVATE_ROWS = (
    "The rows are research runs: seeded, with diagnostics, on public data. Choosing settings on this data spends a "
    "budget of its own, which no row accounts for."
)


def render_page(rows: Sequence[Row]) -> str:
    """The whole page; without rows it shows what was published and says what to run."""
    return page(
        TITLE,
        tag("h1", TITLE),
        tag("p", _lead(rows), class_="lead"),
        *_warnings(rows),
        *(_section(one) for one in sections(rows)),
        section("Figures", *_figures(rows)),
        section("Where the numbers come from", *_origin(rows)),
        footer=[tag("p", NOT_PRIVATE_ROWS)],
    )


def _lead(rows: Sequence[Row]) -> str:
    """What the report is, in two sentences."""
    return (
        "DPIS (CCS 2022): test accuracies as published, and as measured here with accounting that holds. "
        f"{len(runs_of(filter(counted, rows))):,} runs, each with its command and commit; "
        "the ledger of every private one was verified before its row was written."
    )


def _warnings(rows: Sequence[Row]) -> Iterator[Markup]:
    if not rows:
        yield box(
            "warn",
            "Nothing has been run yet.",
            join(["Run ", tag("code", HOW_TO_RUN), " to fill the tables."]),
        )
    left_out = [row for row in rows if not counted(row)]
    if left_out:
        yield box(
            "bad",
            f"Not counted: {len(left_out)} of {len(rows)} rows.",
            "They have no verified ledger, or no accuracy on the test set. They are listed at the end.",
        )
    if odd := mixed(rows):
        yield tag("div", box("warn", "Rows that do not belong together:"), bullets(odd))


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────


def _section(one: Section) -> Markup:
    body: list[Child] = [tag("p", one.intro)]
    if said := verdict(one):
        body.append(tag("p", said))
    if one.key == "table3":
        body += [tag("p", *_how_to_read(), class_="soft")]
    for block in one.blocks:
        if len(one.blocks) > 1:
            body.append(tag("p", tag("strong", ACCOUNTS[block.account] + "."), class_="account"))
        body += [_table(table, f"{one.title}, {block.account.upper()}") for table in block.tables]
    if one.key == "table3":
        other = published.DE_ET_AL
        body.append(
            tag(
                "p",
                f"Elsewhere: {other.source} reach {other.figure:g} % on {published.DATASETS[other.dataset]} at "
                f"epsilon = {other.epsilon:g}, with {other.remark}.",
                class_="soft",
            )
        )
    return section(one.title, *body, whole=len(one.blocks) == 1)


def _how_to_read() -> Iterator[Child]:
    yield "Bold: our mean. Below it the paper's figure and the difference: "
    yield tag("span", "+0.12", class_="up")
    yield " is at or above the paper, −0.12 below it. Then the spread over seeds (std from three on, "
    yield "the range of two) and how many there are."


def _table(table: PaperTable, name: str) -> Markup:
    head = tag(
        "tr",
        tag("th", table.corner, scope="col"),
        *(tag("th", text, scope="col") for text in table.heads),
    )
    lines: list[Markup] = []
    beyond = False
    for line in table.lines:
        if table.title and (line.beyond or line.reference) and not beyond:
            beyond = True
            lines.append(
                tag(
                    "tr",
                    tag("th", "Beyond the paper", colspan=len(table.heads) + 1, scope="colgroup"),
                    class_="group",
                )
            )
        lines.append(_table_line(line))
    made = tag("table", tag("thead", head), tag("tbody", *lines))
    shown = join([tag("h3", table.title), scrolled(made, f"{name}, {table.title}")])
    return shown if table.title else scrolled(made, name)


def _table_line(line: Line) -> Markup:
    header = tag("th", line.name, tag("small", line.detail) if line.detail else None, scope="row")
    cells = (tag("td", *_cell(cell, line.reference), class_="cell") for cell in line.cells)
    return tag("tr", header, *cells, class_="reference" if line.reference else None)


def _cell(cell: Comparison, reference: bool) -> Iterator[Child]:
    if reference:
        yield "–" if cell.published is None else f"{cell.published:.2f}"
        return
    ours, difference = cell.ours, cell.difference
    if ours is None:
        yield tag("span", cell.absent, class_="absent")
    else:
        yield tag("b", f"{ours.mean:.2f}")
    if cell.published is not None:
        gap = None
        if difference is not None:
            gap = tag("span", signed(difference), class_="up" if difference >= 0 else "down")
        yield tag("small", f"{cell.published_text} ", gap)
    if ours is not None:
        yield tag("small", ", ".join(filter(None, (ours.spread_text, ours.seeds_text))))


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────


FIGURES = {
    "Why the noise falls (the paper's Figure 1)": (
        "DPIS lowers sigma_G over the epochs for two reasons, shown apart: importance sampling needs less noise at the "
        "kappa that was released, and the schedule moves budget from early epochs to late ones, which DP-SGD could do "
        "too. All three lines cost the same Renyi budget at the run's one order; the first pays for no other release.",
        noise_charts,
    ),
    "Accuracy by epsilon": (
        "Means of the rows accounted by RDP (filled) and the paper's figures (hollow).",
        epsilon_charts,
    ),
    "Norm utilisation kappa": (
        "The mean gradient norm over the clip norm, as each epoch released it. At 1 DPIS is DP-SGD.",
        kappa_charts,
    ),
    "Accuracy by work": (
        "What a run computed, from its diagnostics: gradients of single records, norm passes included.",
        work_charts,
    ),
}


def _figures(rows: Sequence[Row]) -> Iterator[Markup]:
    for title, (text, charts_of) in FIGURES.items():
        charts = list(charts_of(rows))
        yield join([tag("h3", title), tag("p", text)])
        yield figures(charts) if charts else tag("p", "Not run.", class_="absent")


# ── origin ───────────────────────────────────────────────────────────────────────────────────────────


def _origin(rows: Sequence[Row]) -> Iterator[Markup]:
    yield bullets(_origin_lines(rows))
    if rows:
        yield tag(
            "p",
            "Each row names the command that gave it, in today's words: type it to run that cell again.",
        )
        yield tag(
            "details",
            tag("summary", f"All {len(rows):,} rows and their commands"),
            _every_row(rows),
        )


def _origin_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Commits, machines, number of rows, time: a sentence each."""
    runs = runs_of(rows)
    # Of a run that was taken up, the time of its last part alone is known.
    whole = [run for run in runs if not run.get("resumed")]
    seconds = sum(float(run.get("wall_seconds") or 0) for run in whole)
    yield (
        f"{len(rows):,} rows, {sum(map(counted, rows)):,} of them counted, from {len(runs):,} runs; "
        f"{duration(seconds)} of wall time for the {len(whole):,} that ran without a break."
    )
    for name, what in (("commit", "Commits"), ("machine", "Machines")):
        found = Counter(str(row.get(name) or "not said") for row in rows)
        if found:
            yield f"{what}: " + "; ".join(
                f"{value} ({n:,} row{'' if n == 1 else 's'})" for value, n in found.most_common()
            )
    yield "Published figures: section 5 of the DPIS paper (CCS 2022), means of five runs; DPSUR (VLDB 2024)."


def duration(seconds: float) -> str:
    """Hours and minutes."""
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {rest} min"


def _every_row(rows: Sequence[Row]) -> Markup:
    heads = (
        "table",
        "data",
        "method",
        "recipe",
        "ε",
        "account",
        "seed",
        "accuracy",
        "seconds",
        "command",
    )
    head = tag("tr", *(tag("th", text, scope="col") for text in heads))
    names = ("table", "dataset", "method", "recipe", "epsilon", "accountant", "seed")
    lines = []
    for row in sorted(rows, key=lambda row: [str(row.get(name)) for name in names]):
        accuracy, wall = row.get("test_accuracy"), row.get("wall_seconds")
        cells: list[Child] = [_plain(row.get(name)) for name in names]
        cells.append(f"{100 * accuracy:.2f}" if isinstance(accuracy, int | float) else "none")
        known = isinstance(wall, int | float) and not row.get("resumed")
        cells.append(f"{wall:.0f}" if known else "")
        cells[-2] = cells[-2] if counted(row) else join([cells[-2], tag("small", "not counted")])
        cells.append(tag("code", in_todays_words(str(row.get("command")))))
        lines.append(tag("tr", *(tag("td", cell) for cell in cells)))
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="numbers rows")
    return scrolled(table, "All rows")


def _plain(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ── Markdown, for documents and terminals ────────────────────────────────────────────────────────────


def render_text(rows: Sequence[Row]) -> str:
    """Tables 3 to 6 in Markdown."""
    return "\n".join(_text_lines(rows)).rstrip() + "\n"


def _text_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"# {TITLE}"
    yield ""
    how_to_read = "A cell: our mean (spread; seeds), then the paper's figure and the difference."
    yield from _wrapped(f"{_lead(rows)} {how_to_read}")
    if not rows:
        yield ""
        yield f"Nothing has been run yet: run `{HOW_TO_RUN}`."
    for one in sections(rows):
        yield from ("", f"## {one.title}")
        for paragraph in filter(None, (one.intro, verdict(one))):
            yield from ("", *_wrapped(paragraph))
        for block in one.blocks:
            if len(one.blocks) > 1:
                yield from ("", *_wrapped(f"**{ACCOUNTS[block.account]}.**"))
            for table in block.tables:
                yield from _text_table(table)
    yield from ("", "## Where the numbers come from", "")
    odd = (f"Do not belong together: {text}" for text in mixed(rows))
    for line in (*_origin_lines(rows), *odd):
        yield from _wrapped(f"- {_escaped(line)}", "  ")


def _text_table(table: PaperTable) -> Iterator[str]:
    if table.title:
        yield from ("", f"### {_escaped(table.title)}")
    yield ""
    yield _text_row([table.corner, *table.heads])
    yield _text_row(["---"] * (len(table.heads) + 1))
    for line in table.lines:
        name = _escaped(f"{line.name} ({line.detail})" if line.detail else line.name)
        yield _text_row([name, *(_text_cell(cell, line.reference) for cell in line.cells)])


def _text_cell(cell: Comparison, reference: bool) -> str:
    if reference:
        return "–" if cell.published is None else f"{cell.published:.2f}"
    said = [cell.absent]
    if cell.ours is not None:
        detail = "; ".join(filter(None, (cell.ours.spread_text, cell.ours.seeds_text)))
        said = [f"**{cell.ours.mean:.2f}** ({detail})"]
    if cell.published is not None:
        said.append(cell.published_text)
    if cell.difference is not None:
        said.append(signed(cell.difference))
    return ", ".join(filter(None, said))


def _wrapped(text: str, indent: str = "") -> list[str]:
    """As Markdown is written: lines of at most 100 characters."""
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _text_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """A name must not end a cell, start a tag or a link."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
