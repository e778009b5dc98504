"""The laws are exact: they are tried on a grid so fine that it rounds nothing. `test_grid` has the real one."""

from __future__ import annotations

import pytest

EXACT = {"test_laws", "test_broken_on_purpose"}


@pytest.fixture(autouse=True)
def fine_grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__.rpartition(".")[2] in EXACT:
        monkeypatch.setattr("dpis.noise.GRID_BITS", 70)
