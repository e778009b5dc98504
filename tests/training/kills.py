"""Kills runs with SIGKILL at random moments and resumes them; run by test_kill.py, in a process of its own.

``python -m tests.training.kills FOLDER KILLS``: prints one JSON object a kill. With ``release`` in the place of a
number runs are killed between the steps of a release, each once. Every run is a fork of this process,
which has imported and planned everything already, so that most of a run's time is the run. The disk is made slow, so
that kills fall into what it does, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import ExponentialLR

from dpis.accounting import LedgerWriter
from dpis.accounting.ledger import End
from dpis.runs.folder import Replacement
from tests.training.toys import Each, fit, ledger, mlp, points, released

CLIPPING = {"clip_ceiling": 2.0, "clip_lowest": 0.1}
RUNS: tuple[dict[str, Any], ...] = (
    {"ema": 0.9, "held_out": points(10), **CLIPPING},
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
    in_this_process(folder, settings, steps)


def in_this_process(folder: Path, settings: dict[str, Any], steps: Path) -> NoReturn:
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


def recorded_in(folder: Path) -> int:
    return len(ledger(folder).entries)


def check(folder: Path, steps: Path, of: int) -> dict[str, Any]:
    """What a kill left: the ledger covers every step, and there is no model before the last ``of`` them."""
    taken = int(steps.read_text() or "0") if steps.exists() else 0
    path = folder / "ledger.jsonl"
    begun = path.exists() and b"\n" in path.read_bytes()
    recorded = gradients_in(folder) if begun else 0
    assert recorded >= taken, f"{taken} steps were taken, the ledger has {recorded}"
    files = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if "model.safetensors" in files:
        model = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert ledger(folder).end == End(recorded_in(folder), model), (
            "a model before the ledger's end"
        )
        assert recorded == of, f"a model after {recorded} of {of} steps: {files}"
    return {"steps": taken, "recorded": recorded, "files": files}


def _killed_after(owner: Any, name: str, when: Callable[..., bool]) -> None:
    """The process is gone once this function has returned from such a call."""
    real = getattr(owner, name)

    def then_gone(*args: Any) -> Any:
        result = real(*args)
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, then_gone)


def _puts(name: str) -> Callable[..., bool]:
    return lambda source, target: Path(target).name == name


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "model beside": (Replacement, "__init__", lambda new, path, *_: path.suffix == ".safetensors"),
    "end": (LedgerWriter, "finish", lambda *_: True),
    "model": (os, "replace", _puts("model.safetensors")),
    "loader": (os, "replace", _puts("model.py")),
    "summary": (os, "replace", _puts("summary.json")),
}
"""Of a release, in their order."""


def at_releases(folder: Path) -> None:
    """Killed after every step of a release, and then once more after the same: what is there, and how it ends."""
    torch.set_num_threads(1)
    run(folder / "whole", RUNS[0])
    whole = released(folder / "whole")
    for moment, place in MOMENTS.items():
        path, steps = folder / moment, folder / f"steps-{moment}"
        child = os.fork()
        if not child:
            _killed_after(*place)
            in_this_process(path, RUNS[0], steps)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"not killed after {moment}"
        found = check(path, steps, gradients_in(folder / "whole"))
        print(
            json.dumps({"moment": moment, "end": ledger(path).end is not None, **found}), flush=True
        )
        assert os.waitpid(in_a_fork(path, RUNS[0], steps), 0)[1] == 0, f"stuck after {moment}"
        assert released(path) == whole, f"killed after {moment}, it ended differently"


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
    if sys.argv[2] == "release":
        at_releases(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
