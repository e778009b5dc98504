"""HTML and SVG by construction: whatever is not markup already is escaped, so no name can become a tag."""

from __future__ import annotations

import html
from collections.abc import Iterable

_EMPTY = {"meta", "br", "line", "path", "circle", "rect", "polyline", "polygon"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | float | int | None


def escaped(child: Child) -> Markup:
    """A child as markup; None is nothing."""
    if child is None:
        return Markup("")
    return child if isinstance(child, Markup) else Markup(html.escape(str(child), quote=True))


def join(children: Iterable[Child], between: str = "") -> Markup:
    """All children, escaped where they need it."""
    return Markup(html.escape(between).join(escaped(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: Child | bool) -> Markup:
    """An element. ``class_`` is the class; ``_`` in other names is ``-``; None and False leave an attribute out.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        words.append(shown if value is True else f'{shown}="{escaped(value)}"')
    opening = " ".join(words)
    if not children and name in _EMPTY:
        return Markup(f"<{opening}>" if name in ("meta", "br") else f"<{opening}/>")
    return Markup(f"<{opening}>{join(children)}</{name}>")
