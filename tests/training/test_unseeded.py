"""A run with a key of the operating system goes on with that key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpis.randomness import Key
from tests.training.toys import Crash, crash_at, fit, ledger, released

SECRET = bytes(range(32))


class Keys:
    """In place of the operating system: a known key first, then others."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Key:
        self.made += 1
        return Key(bytes([*SECRET[:-1], 30 + self.made]))


@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive", "dp-sgd"])
@pytest.mark.parametrize("step", [1, 6])
def test_an_unseeded_run_goes_on_with_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, step: int
) -> None:
    """Fresh noise for steps that the ledger holds once would be a release that nobody paid for."""
    settings = {"seed": None, "method": method, "release_n": method == "dpis"}
    monkeypatch.setattr(Key, "fresh", Keys())
    whole = released(fit(tmp_path / "whole", **settings).folder)
    keys = Keys()
    monkeypatch.setattr(Key, "fresh", keys)
    with pytest.raises(Crash):
        fit(tmp_path / "run", **settings, progress=crash_at(step))
    fit(tmp_path / "run", **settings, resume=True)
    assert keys.made == 1
    assert not ledger(tmp_path / "run").header.seeded
    assert released(tmp_path / "run") == whole


def test_other_keys_give_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail."""
    monkeypatch.setattr(Key, "fresh", Keys())
    one, other = (released(fit(tmp_path / name, seed=None).folder) for name in "ab")
    assert one["model.safetensors"] != other["model.safetensors"]
