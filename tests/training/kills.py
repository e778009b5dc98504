"""Kills runs with SIGKILL at random moments and resumes them; run by test_kill.py, in a process of its own.

``python -m tests.training.kills FOLDER KILLS``: prints one JSON object a kill. Every run is a fork of this process,
which has imported and planned everything already, so that most of a run's time is the run. The disk is made slow, so
that kills fall into what it does, too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ExponentialLR

from dpis.mechanism import AdaptiveClipping
from tests.training.toys import Each, fit, ledger, mlp, points, released

CLIPPING = AdaptiveClipping(ceiling=2.0, lowest=0.1)
RUNS: tuple[dict[str, Any], ...] = (
    {"ema": 0.9, "held_out": points(10), "clipping": CLIPPING},
    {"method": "dpis-adaptive", "release_n": True, "optimizer": "adam"},
    {"contribution": "reject", "scheduler": partial(ExponentialLR, gamma=0.5), "kappa": 0.5},
)
EPOCHS = 3
SLOW_DISK = 0.01  # seconds for every wait for the disk


def run(folder: Path, settings: dict[str, Any], steps: Path | None = None) -> None:
    """Start, or go on; the number of steps ever taken is written down after each."""

    def count(standing: Any) -> None:
        if steps is not None:
            steps.write_text(str(standing.step))

    resume = (folder / "checkpoint.secret").exists()
    each = Each(count)
    fit(folder, mlp(dropout=0.3), epochs=EPOCHS, progress=each, resume=resume, **settings)


def in_a_fork(folder: Path, settings: dict[str, Any], steps: Path) -> int:
    child = os.fork()
    if child:
        return child
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(SLOW_DISK), fsync(file))[1]  # type: ignore[assignment]
    try:
        run(folder, settings, steps)
    except BaseException as error:
        print(json.dumps({"error": repr(error)}), flush=True)
        os._exit(1)
    os._exit(0)


def gradients_in(folder: Path) -> int:
    return sum(entry.label == "gradient" for entry in ledger(folder).entries)


def check(folder: Path, steps: Path, of: int) -> dict[str, Any]:
    """What a kill left: the ledger covers every step, and there is no model before the last ``of`` them."""
    taken = int(steps.read_text() or "0") if steps.exists() else 0
    path = folder / "ledger.jsonl"
    begun = path.exists() and b"\n" in path.read_bytes()
    recorded = gradients_in(folder) if begun else 0
    assert recorded >= taken, f"{taken} steps were taken, the ledger has {recorded}"
    files = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if "model.safetensors" in files:
        assert recorded == of, f"a model after {recorded} of {of} steps: {files}"
    return {"steps": taken, "recorded": recorded, "files": files}


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(20221107)
    whole, seconds, planned = [], [], []
    for number, settings in enumerate(RUNS):
        path = folder / f"whole-{number}"
        run(path, settings)  # plans, so that the next is no slower than a fork
        whole.append(released(path))
        planned.append(gradients_in(path))  # a released count decides how long an epoch is
        began = time.monotonic()
        child = in_a_fork(folder / f"timed-{number}", settings, folder / "unused")
        assert os.waitpid(child, 0)[1] == 0
        seconds.append(time.monotonic() - began)
        assert released(folder / f"timed-{number}") == whole[-1]
    done, number = 0, 0
    while done < kills:
        which = number % len(RUNS)
        path, steps = folder / f"run-{number}", folder / f"steps-{number}"
        number += 1
        finished = False
        times = chance.choice((1, 1, 2, 3))
        for _ in range(times):
            child = in_a_fork(path, RUNS[which], steps)
            time.sleep(chance.uniform(0, 1.05 * seconds[which]))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            finished = os.WIFEXITED(status)
            if finished:
                assert os.WEXITSTATUS(status) == 0
                break
            done += 1
            print(json.dumps(check(path, steps, planned[which])), flush=True)
        ended = (path / "summary.json").exists() and not (path / "checkpoint.secret").exists()
        if not finished and not ended:
            child = in_a_fork(path, RUNS[which], steps)
            assert os.waitpid(child, 0)[1] == 0, "a killed run could not be resumed"
        assert released(path) == whole[which], f"run {number} ended differently"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
