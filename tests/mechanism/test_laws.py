"""The laws of the mechanism hold for the real code; which are for which rule stands in docs/guarantees.md."""

from __future__ import annotations

import pytest

from . import laws_of_releases, laws_of_steps

LAWS = {
    name: law
    for laws in (laws_of_steps, laws_of_releases)
    for name, law in vars(laws).items()
    if name.startswith("law_")
}


@pytest.mark.parametrize("name", LAWS)
def test_law(name: str) -> None:
    LAWS[name]()
