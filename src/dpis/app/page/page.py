"""One file that holds everything: style inside, no script, nothing to fetch. Good on a phone, in the dark, on paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources

from dpis.app.page.markup import Child, Markup, join, tag

STYLE = resources.files("dpis.app.page").joinpath("page.css").read_text(encoding="utf-8")


def page(title: str, *body: Child, footer: Sequence[Child] = ()) -> str:
    """A whole HTML document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Markup(f"<style>\n{STYLE}</style>"),
    )
    content = tag("main", *body)
    end = tag("footer", *footer) if footer else None
    document = tag("html", head, tag("body", content, end), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def section(title: str, *body: Child, whole: bool = False) -> Markup:
    """A heading and what belongs to it; ``whole``: on one sheet of paper."""
    return tag("section", tag("h2", title), *body, class_="whole" if whole else None)


def box(kind: str, strong: str, *text: Child) -> Markup:
    """A remark that must be seen: ``good``, ``bad`` or ``warn``; its first words say which, not its colour alone."""
    paragraphs = [tag("p", tag("strong", strong), " ", text[0] if text else None)]
    paragraphs += [tag("p", more) for more in text[1:]]
    return tag("div", *paragraphs, class_=f"box {kind}".strip(), role="note")


def bullets(items: Iterable[Child]) -> Markup:
    """A list."""
    return tag("ul", *(tag("li", item) for item in items))


def scrolled(table: Markup, name: str) -> Markup:
    """A table that is wider than a phone scrolls inside itself, by finger or by keyboard."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=name)


def facts(pairs: Iterable[tuple[Child, Child]], name: str, kind: str = "facts") -> Markup:
    """Names and values, one a line; of the kind ``facts settings`` in two columns where there is room."""
    lines = (tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in pairs)
    return scrolled(tag("table", tag("tbody", join(lines)), class_=kind), name)
