"""Bugs are planted in code that training and `dpis verify` run: elsewhere they would prove nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accounting.test_broken_on_purpose import PLANTS as OF_ACCOUNTING
from tests.mechanism.test_broken_on_purpose import PLANTS as OF_THE_MECHANISM
from tests.training.toys import assert_verifies, fit

pytestmark = pytest.mark.slow

PLACES = sorted(
    {(plant.target, plant.name) for plant in (*OF_ACCOUNTING, *OF_THE_MECHANISM)},
    key=lambda place: (place[0].__name__, place[1]),
)
RUNS: dict[str, dict[str, Any]] = {
    "predeclared": {"accountant": "pld", "clip_ceiling": 2.0},
    "adaptive": {"method": "dpis-adaptive", "contribution": "reject"},
}


def listened_to(original: Any, heard: Callable[[], None]) -> Any:
    """The same function or property, which says when it is used; a constant as it is."""
    if isinstance(original, property):
        return property(listened_to(original.fget, heard))
    if not callable(original):
        heard()
        return original

    def listening(*positional: Any, **named: Any) -> Any:
        heard()
        return original(*positional, **named)

    return listening


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[Any, str]]:
    """Through which places runs come that are trained and verified."""
    seen: set[tuple[Any, str]] = set()
    with pytest.MonkeyPatch.context() as patch:
        for target, name in PLACES:
            original = inspect.getattr_static(target, name)
            bound = getattr(target, name) if isinstance(original, classmethod) else original
            patch.setattr(target, name, listened_to(bound, lambda p=(target, name): seen.add(p)))
        for name, settings in RUNS.items():
            folder: Path = tmp_path_factory.mktemp(name) / "run"
            fit(folder, **settings)
            assert_verifies(folder)
    return seen


@pytest.mark.parametrize(
    "place", PLACES, ids=[f"{target.__name__}.{name}" for target, name in PLACES]
)
def test_a_planted_bug_stands_in_the_way(place: tuple[Any, str], passed: set[Any]) -> None:
    assert place in passed
