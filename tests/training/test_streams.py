"""The purposes of random streams are part of the format: by another name all draws and noise would be others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpis.randomness import Key
from tests.dropin.loops import private

from .toys import fit, mlp

OURS = {"coins:accept", "coins:draw", "fingerprint-key", "model:#", "normals:noise"}
ADAPTIVE = {"model-all:#", "normals:release:clip-sum", "normals:release:norm-sum"}
DROP_IN = {"chance:items:#", "chance:model:#:#", "coins:draw", "normals:noise"}


def purposes(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> set[str]:
    """Those of all streams that are opened, without the numbers of rows."""
    seen, real = set[str](), Key._derived

    def derived(self: Key, purpose: str, step: int) -> bytes:
        seen.add(re.sub(r"\d+", "#", purpose))
        return real(self, purpose, step)

    monkeypatch.setattr(Key, "_derived", derived)
    run()
    return seen


def test_of_our_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "dpis-adaptive", "clip_ceiling": 2.0}
    found = purposes(
        monkeypatch,
        lambda: fit(tmp_path / "run", mlp(0.5), contribution="reject", **settings),
    )
    assert found == OURS | ADAPTIVE


def test_of_the_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert purposes(monkeypatch, lambda: private().train()) == DROP_IN
