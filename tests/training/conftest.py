"""A quick engine: its comparisons with autograd have tests of their own, and take most of a toy's time."""

from __future__ import annotations

import pytest

from dpis.gradients.recorder import Recorder


@pytest.fixture
def checked_engine() -> None:
    """Asked for by tests in which the engine's checks might disturb."""


@pytest.fixture(autouse=True)
def _quick_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "checked_engine" not in request.fixturenames:
        monkeypatch.setattr(Recorder, "_compare_with_autograd", lambda *_: None)
        monkeypatch.setattr(Recorder, "_probe_ownership", lambda *_: None)
