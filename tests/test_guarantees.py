"""docs/guarantees.md names tests and laws: every one of them exists, and is one that runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
GUARANTEES = (TOP / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", GUARANTEES)))
LAWS = sorted(set(re.findall(r"`(law_\w+)`", GUARANTEES)))


@cache
def functions(path: Path) -> set[str]:
    """Those that a module defines, its classes' too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {part.name for part in ast.walk(tree) if isinstance(part, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=map("::".join, NAMED))
def test_a_test_that_guarantees_names_exists(file: str, name: str) -> None:
    assert (TOP / file).is_file(), file
    if name:
        assert name in functions(TOP / file), f"{file} has no {name}"


@pytest.mark.parametrize("name", LAWS)
def test_a_law_that_guarantees_names_exists(name: str) -> None:
    """Where laws are run on the real code, and on broken code."""
    assert any(name in functions(path) for path in (TOP / "tests").glob("*/laws_of_*.py"))


def test_nothing_is_named_in_another_form() -> None:
    """Else it would not be looked for."""
    whole = {text for text in re.findall(r"`([^`\n]+)`", GUARANTEES) if "test" in text}
    found = {f"{file}::{name}" if name else file for file, name in NAMED}
    assert whole == found
    assert len(found) > 50
    assert len(LAWS) > 15
