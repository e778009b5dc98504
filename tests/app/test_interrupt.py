"""Ctrl-C on the real command, in a pseudo-terminal: it says how to go on, and going on ends as if nothing had been."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpis.app.commands.train import INTERRUPTED

pytestmark = pytest.mark.slow

LONG = ["--epochs", "400", "--batch-size", "100", "--model", "linear", "--accountant", "rdp"]


def interrupted(*words: str) -> tuple[int, str]:
    """The exit code of a training that Ctrl-C ends after some steps, and what stood on the screen."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dpis", "train", *words]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ)
    os.close(theirs)
    shown, end = "", time.monotonic() + 120
    while "epoch" not in shown.lower() and time.monotonic() < end:
        shown += os.read(ours, 4096).decode(errors="replace")
    process.send_signal(signal.SIGINT)
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not more:
            break
        shown += more.decode(errors="replace")
    os.close(ours)
    return process.wait(60), shown


def test_the_screen_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, shown = interrupted(*LONG, "--out", str(folder))
    assert code == INTERRUPTED, shown
    said = " ".join(shown.split())
    assert "interrupted and saved in epoch" in said
    assert "dpis train --resume" in said
    assert "Traceback" not in shown
    assert (folder / "checkpoint.secret").exists()
    code, shown = interrupted("--resume", str(folder))
    assert code == INTERRUPTED, shown
    assert "interrupted and saved in epoch" in " ".join(shown.split())
