"""The reproduction's tables as Markdown, for documents and terminals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reproduction.page import HOW_TO_RUN, TITLE, lead, origin_lines
from reproduction.rows import Row, counted, mixed
from reproduction.tables import ACCOUNTS, Cell, Line, Table, sections, signed, verdict


def render_text(rows: Sequence[Row]) -> str:
    """Tables 3 to 6 in Markdown."""
    return "\n".join(_lines(rows)).rstrip() + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"# {TITLE}"
    yield ""
    yield lead(rows)
    yield "A cell: our mean (spread; seeds), then the paper's figure and the difference."
    if not rows:
        yield ""
        yield f"Nothing has been run yet: run `{HOW_TO_RUN}`."
    for one in sections(rows):
        yield from ("", f"## {one.title}", "", " ".join(filter(None, (one.intro, verdict(one)))))
        for block in one.blocks:
            yield from ("", f"**{ACCOUNTS[block.account]}.**" if len(one.blocks) > 1 else "")
            for table in block.tables:
                yield from _table(table)
    yield from ("", "## Where the numbers come from", "")
    odd = mixed([row for row in rows if counted(row)])
    for line in (*origin_lines(rows), *(f"Do not belong together: {text}" for text in odd)):
        yield f"- {_plain(line)}"


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield from ("", f"### {_plain(table.title)}")
    yield ""
    yield _row([table.corner, *table.heads])
    yield _row(["---"] * (len(table.heads) + 1))
    for line in table.lines:
        yield _row([_name(line), *(_cell(cell, line.reference) for cell in line.cells)])


def _name(line: Line) -> str:
    return _plain(f"{line.name} ({line.detail})" if line.detail else line.name)


def _cell(cell: Cell, reference: bool) -> str:
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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """A name must not end a cell, start a tag or a link."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
