"""`dpis train` on several processes: one bar, one summary, one line of error, one way to stop and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from dpis.accounting import verify_ledger
from dpis.app.entry import main
from dpis.app.jobs.job_options import JobOptions
from dpis.app.jobs.training import start_job
from dpis.app.processes import INTERRUPTED
from dpis.features.cache import FeatureCache
from dpis.group import current_group
from dpis.training.progress import Silent
from tests.ranks import on_ranks

from .test_interrupt import LONG, interrupted

QUICK = ["--model", "linear", "--epochs", "2", "--batch-size", "100", "--accountant", "rdp"]
QUICK += ["--device", "cpu", "--seed", "3"]
TWO = ["--processes", "2"]


def dpis(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpis", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def events(folder: Path) -> list[str]:
    """The ledger but for its end, which names the model."""
    return (folder / "ledger.jsonl").read_text().splitlines()[:-1]


@pytest.mark.slow
def test_two_processes_spend_what_one_does_and_speak_with_one_voice(tmp_path: Path) -> None:
    done = dpis("train", *TWO, *QUICK, "--json", "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == ["1/2", "2/2"]
    assert all(line.startswith("epoch") for line in lines), done.stderr
    (told,) = done.stdout.splitlines()
    assert json.loads(told)["run_dir"] == str(tmp_path / "two")
    assert main(["train", *QUICK, "--out", str(tmp_path / "one")]) == 0
    assert events(tmp_path / "one") == events(tmp_path / "two")
    verify_ledger(tmp_path / "two" / "ledger.jsonl")


@pytest.mark.parametrize("words", [["--epsilon", "-1"], ["--processes", "0"]])
def test_what_shows_at_once_starts_no_process(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TWO, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dpis: error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothere.csv"], "there is no file nothere.csv"),
        (["--model", "nonsense"], "--model must be one of"),
        (["--resume", "nowhere"], "nothing to resume"),
    ],
    ids=["data", "model", "resume"],
)
def test_bad_input_is_one_line_through_the_launcher(words: list[str], told: str) -> None:
    done = dpis("train", *TWO, *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dpis: error: {told}")


@pytest.mark.slow
def test_torchrun_starts_them_too(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [
        sys.executable,
        *torchrun,
        "-m",
        "dpis",
        "train",
        *QUICK,
        "--out",
        str(tmp_path / "a"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Guarantee:") == 1
    refused = subprocess.run([*command, *TWO], capture_output=True, text=True, timeout=300)
    assert refused.returncode
    assert refused.stderr.count("dpis: error: torchrun says how many processes there are") >= 1


def _features_saved(rank: int, folder: str) -> int:
    os.environ["DPIS_CACHE"] = folder
    saved, save = list[str](), FeatureCache.save

    def counted(cache: FeatureCache, key: str, features: Tensor) -> None:
        saved.append(key)
        save(cache, key, features)

    FeatureCache.save = counted  # type: ignore[method-assign]
    options = JobOptions(
        model="scatter-linear", epochs=1, batch_size=500, accountant="rdp", out=f"{folder}/run"
    )
    start_job(options, Silent(), group=current_group())
    return len(saved)


@pytest.mark.slow
def test_features_are_computed_by_rank_0_alone(tmp_path: Path) -> None:
    assert on_ranks(2, _features_saved, str(tmp_path)) == [2, 0]


@pytest.mark.slow
def test_ctrl_c_saves_and_any_number_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, shown = interrupted(*TWO, *LONG, "--out", str(folder))
    said = " ".join(shown.split())
    assert code == INTERRUPTED, shown
    assert said.count("interrupted and saved in epoch") == 1
    assert "Traceback" not in shown
    for processes in ("3", "1"):
        code, shown = interrupted("--resume", str(folder), "--processes", processes)
        assert code == INTERRUPTED, shown
        assert "interrupted and saved in epoch" in " ".join(shown.split())


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", *TWO, *QUICK, "--epochs", "6", "--out", str(folder)]
    command = [sys.executable, "-m", "dpis", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("epoch 1/6")
    os.kill(_rank(1, process.pid), signal.SIGKILL)
    told = process.communicate(timeout=100)[1]
    assert process.returncode == 1
    assert "dpis: error: rank 1 was ended by SIGKILL. Nothing more was released." in told
    assert "Traceback" not in told
    done = dpis("train", "--resume", str(folder), "--processes", "3")
    assert done.returncode == 0, done.stderr
    verify_ledger(folder / "ledger.jsonl")


def _rank(rank: int, parent: int) -> int:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True
    )
    for child in listed.stdout.split():
        environment = Path(f"/proc/{child}/environ").read_text().split("\0")
        if f"RANK={rank}" in environment:
            return int(child)
    raise AssertionError(listed.stdout)
