"""What every page must satisfy, asked of its parsed HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "br"}


class Parsed(HTMLParser):
    """Tags in order, checked for nesting; text; ids."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.text = [], [], [], []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check_page(page):
    """Well nested, ids unique and resolved, no script, nothing that would be fetched."""
    parsed = Parsed(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    for tag, attributes in parsed.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "data", "poster", "xlink:href"):
            assert name not in attributes
        for target in (attributes.get("aria-labelledby") or "").split():
            assert target in parsed.ids
    assert not re.search(r"url\(|@import|https?:", page)
    assert 'name="viewport"' in page
    return parsed
