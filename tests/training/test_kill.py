"""SIGKILL and SIGINT from outside: what a power cut, a scheduler or a person does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.toys import fit, released

ROOT = Path(__file__).parents[2]


def _kill(tmp_path: Path, kills: int | str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "tests.training.kills", str(tmp_path), str(kills)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_killed_at_six_moments(tmp_path: Path) -> None:
    assert len(_kill(tmp_path, 6)) >= 6


@pytest.mark.reproduction
def test_killed_at_fifty_moments(tmp_path: Path) -> None:
    """Every resumed run ends bit by bit as the unbroken one; no ledger ever claims less than was released."""
    found = _kill(tmp_path, 50)
    assert len(found) >= 50
    steps = [kill["steps"] for kill in found]
    assert len(set(steps)) >= 8  # all over the run
    assert any(not kill["recorded"] for kill in found)  # before the first epoch
    assert any("model.safetensors" in kill["files"] for kill in found)  # type: ignore[operator]


@pytest.mark.slow
def test_killed_after_every_part_of_a_release(tmp_path: Path) -> None:
    """The ledger's end comes before the model; a kill between them is made good by resuming."""
    found = {kill["moment"]: kill for kill in _kill(tmp_path, "release")}
    seen = {
        moment: (kill["end"], "model.safetensors" in kill["files"])  # type: ignore[operator]
        for moment, kill in found.items()
    }
    assert seen == {
        "model beside": (False, False),
        "end": (True, False),
        "model": (True, True),
        "loader": (True, True),
        "summary": (True, True),
    }


CTRL_C = """
import sys
from pathlib import Path
from tests.training.toys import Each, fit
import time
def slowly(standing):
    print(standing.step, flush=True)
    time.sleep(0.2)
fit(Path(sys.argv[1]), progress=Each(slowly))
"""


@pytest.mark.slow
def test_an_interrupt_from_the_keyboard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "3\n":
        assert process.poll() is None
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    last = errors.strip().splitlines()[-1]
    assert "interrupted and saved in epoch 1" in last
    assert f"dpis train --resume {folder}" in last
    assert (folder / "checkpoint.secret").exists()
    whole = released(fit(tmp_path / "whole").folder)
    assert released(fit(folder, resume=True).folder) == whole
