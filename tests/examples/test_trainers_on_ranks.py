"""Trainers of others on two processes: one model, one account, batch sizes as those trainers mean them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.trainers_on_ranks import SCRIPTS

pytestmark = pytest.mark.slow


def launched(which: str, folder: Path, processes: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = ["-m", "tests.examples.trainers_on_ranks", which, str(folder)]
    command = [sys.executable, *torchrun, *script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def on_ranks(which: str, folder: Path, processes: int) -> list[dict[str, Any]]:
    done = launched(which, folder, processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize(
    ("which", "package", "batch"),
    [("lightning", "lightning", 32), ("hugging_face", "transformers", 32), ("accelerate", "accelerate", 16)],
)  # fmt: skip
def test_all_processes_train_one_model(
    which: str, package: str, batch: int, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    one, other = on_ranks(which, tmp_path, 2)
    assert one == other  # weights bit by bit
    assert (one["ranks"], one["batch"]) == (2, batch)
    assert one["events"] == one["steps"] == 2 * 64 // batch


def test_accelerate_on_two_processes_is_accelerate_on_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks = on_ranks("accelerate", tmp_path, 2)
    alone = SCRIPTS["accelerate"](tmp_path)
    for found in ranks:
        torch.testing.assert_close(
            torch.tensor(found["weights"]), torch.tensor(alone["weights"]), rtol=1e-4, atol=1e-5
        )


def test_a_lightning_rank_that_raises_stops_the_others(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    done = launched("lightning_raises", tmp_path, 2)
    assert done.returncode
    assert "rank 1 stopped: ArithmeticError: for a try." in done.stderr
