"""The documentation names what exists, and its prose fits on a screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples", "results")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
CODE = [
    file
    for folder in ("src", "reproduction", "tests", "examples")
    for file in (ROOT / folder).rglob("*.py")
]
HISTORY = "CHANGELOG.md"
"""Names what is gone, too."""
LONGEST = 100

every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def lines_of(page: Path, *, code: bool) -> Iterator[str]:
    """The lines of its code blocks, or all others."""
    inside = False
    for line in text_of(page).splitlines():
        fence = line.lstrip().startswith("```")
        if (inside or fence) == code:
            yield line
        inside ^= fence


def names_in(page: Path) -> Iterator[str]:
    """Whatever stands in backticks, and the modules that examples import."""
    yield from re.findall(r"`([^`\s]+)`", "\n".join(lines_of(page, code=False)))
    yield from re.findall(
        r"^\s*(?:from|import) (dpis[\w.]*)", "\n".join(lines_of(page, code=True)), re.MULTILINE
    )


def exists(name: str) -> bool:
    """Whether a path, a test, a law or a module is there; True for a name of anything else."""
    path, _, test = name.partition("::")
    if re.fullmatch(
        r"(src|tests|docs|reproduction|benchmarks|examples|tools|results)/[\w./-]+", path
    ):
        return (ROOT / path).exists() and (not test or defines(ROOT / path, test))
    if re.fullmatch(r"\w+/[\w/]+\.py", path):
        return any(file.as_posix().endswith(f"/{path}") for file in CODE)
    if re.fullmatch(r"\w+/", path):
        return (ROOT / path).is_dir() or (ROOT / "src/dpis" / path).is_dir()
    if re.fullmatch(r"law_\w+", name):
        return any(defines(file, name) for file in CODE)
    return module_exists(name.split(".")) if re.fullmatch(r"dpis(\.\w+)+", name) else True


def module_exists(parts: list[str]) -> bool:
    """Whether the first parts are a module, and the next one stands in it."""
    place = ROOT / "src"
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").exists():
        place /= f"{parts.pop(0)}.py"
    else:
        place /= "__init__.py"
    return not parts or bool(re.search(rf"\b{parts[0]}\b", text_of(place)))


def defines(file: Path, name: str) -> bool:
    return bool(re.search(rf"^\s*(def|class) {name}\b|^{name}\b.*=", text_of(file), re.MULTILINE))


@every_page
def test_what_a_page_names_exists(page: Path) -> None:
    if page.name != HISTORY:
        gone = [name for name in names_in(page) if not exists(name)]
        assert not gone, gone


@every_page
def test_what_a_page_places_in_a_file_is_there(page: Path) -> None:
    """Such as "`Tape.norms` in `src/dpis/gradients/tape.py`"."""
    prose = "\n".join(lines_of(page, code=False))
    placed = re.findall(r"`(?:\w+\.)*(\w+)`\s+in\s+`(src/[\w/]+\.py)`", prose)
    gone = [f"{name} in {path}" for name, path in placed if not defines(ROOT / path, name)]
    assert not gone, gone


@every_page
def test_what_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", "\n".join(lines_of(page, code=False)))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone, gone


@every_page
def test_prose_fits_on_a_screen(page: Path) -> None:
    """Tables and links cannot be wrapped, nor can a single long name."""
    long = [line for line in lines_of(page, code=False) if len(line) > LONGEST]
    prose = [line for line in long if not line.lstrip().startswith("|") and "](" not in line]
    wide = [line for line in prose if " " in line.strip().removeprefix("- ")]
    assert not wide, wide


@pytest.mark.parametrize(
    "name",
    [
        "src/dpis/gone.py",
        "tests/test_docs.py::test_gone",
        "gone/gone.py",
        "gone/",
        "law_gone",
        "dpis.gone",
        "dpis.noise.gone",
    ],
)
def test_what_is_gone_is_noticed(name: str) -> None:
    assert not exists(name)
