"""The ledger's end is decided before a model file takes its place."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from dpis.accounting import verify_ledger
from dpis.errors import LedgerError
from dpis.mechanism.secret_state import load_secret_state, save_secret_state
from dpis.training import EarlyStop
from dpis.training.run import Run
from tests.training.toys import Crash, assert_verifies, crash_at, fit, ledger, points, released


def _with_other_weights(path: Path) -> None:
    state = load_secret_state(path)
    state["training"]["model"]["weight"][0, 0] += 1
    save_secret_state(path, state)


def test_a_second_end_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(folder, keep_checkpoint=True)
    _with_other_weights(folder / "checkpoint.secret")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(LedgerError, match="closed over another model") as refusal:
        fit(folder, resume=True)
    assert "\n" not in str(refusal.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert_verifies(folder)


def test_no_model_is_in_place_before_the_ledgers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = tmp_path / "run", []
    finish = Run.finish

    def look(run: Run, sha256: str) -> None:
        names = {path.name for path in folder.iterdir()}
        seen.append(names)
        finish(run, sha256)

    monkeypatch.setattr(Run, "finish", look)
    fit(folder)
    assert len(seen) == 1
    assert not seen[0] & {"model.safetensors", "model.py", "summary.json"}
    assert ".model.safetensors.unfinished" in seen[0]  # on the disk already


def test_a_crash_between_the_end_and_the_model_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = released(fit(tmp_path / "whole").folder)
    folder, replace = tmp_path / "run", os.replace

    def crash(source: Any, target: Any) -> None:
        if Path(target).name == "model.safetensors":
            raise Crash
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(Crash):
        fit(folder)
    monkeypatch.setattr(os, "replace", replace)
    end = ledger(folder).end
    assert end is not None
    assert not (folder / "model.safetensors").exists()
    fit(folder, resume=True)
    assert released(folder) == whole
    assert end.model_sha256 == hashlib.sha256(whole["model.safetensors"]).hexdigest()


def test_an_early_stop_keeps_the_whole_claim(tmp_path: Path) -> None:
    """In the result, the summary and the ledger, to the last bit."""
    stop = EarlyStop(patience=1, larger_is_better=False)
    settings = {"epsilon": 1.7, "delta": 3e-6, "epochs": 9, "held_out": points(20, seed=5)}
    result = fit(tmp_path / "run", **settings, early_stop=stop, lr=0.5)
    assert result.summary.stopped_early
    assert result.epochs < 9
    assert result.claim is not None
    assert (result.claim.epsilon, result.claim.delta) == (1.7, 3e-6)
    found = ledger(result.folder)
    assert found.header.claim == result.claim
    assert result.summary.claim is not None
    assert (result.summary.claim["epsilon"], result.summary.claim["delta"]) == (1.7, 3e-6)
    assert len(found.entries) == 4 * result.epochs
    assert sum(run.count for run in found.header.planned) == 4 * 9
    verdict = verify_ledger(result.folder / "ledger.jsonl")
    assert verdict.holds
    assert verdict.epsilon_spent < verdict.epsilon_claimable <= 1.7


@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive"])
def test_a_torn_event_is_the_next_one_and_no_other(tmp_path: Path, method: str) -> None:
    """It may have been released: verify counts it, and resuming writes the same event in its place."""
    whole = released(fit(tmp_path / "whole", method=method).folder)
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        fit(folder, method=method, progress=crash_at(3))
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    torn = verify_ledger(path)
    assert torn.ledger.torn
    assert "counts as spent" in str(torn.problem)
    less = path.read_bytes()
    path.write_bytes(less[: less.rindex(b"\n") + 1])
    assert torn.epsilon_spent > verify_ledger(path).epsilon_spent
    path.write_bytes(less)
    fit(folder, method=method, resume=True)
    assert released(folder) == whole
