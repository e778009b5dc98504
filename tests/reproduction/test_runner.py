"""Cells become rows, once each, with a ledger that holds."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dpis.errors import DpisError, InputError
from dpis.runs.folder import FolderLock, RunFolder
from reproduction import runner
from reproduction.__main__ import main
from reproduction.ledgers import check_ledgers
from reproduction.results import Results, ledger_path, load_rows
from reproduction.rows import NEEDED
from reproduction.table_cells import TableCell

pytestmark = pytest.mark.slow

SETTINGS = {"batch_size": 2500, "epochs": 1, "model": "linear", "lr": 0.1, "ema": 0.0}

ROOT = Path(__file__).parents[2]


def cell(**changes):
    made = TableCell(
        table="table3",
        dataset="fmnist-sample",
        method="dpis",
        recipe="paper",
        epsilon=2.0,
        accountant="rdp",
        seed=3,
        settings=SETTINGS,
    )
    return replace(made, **changes)


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results")


@pytest.fixture
def in_process(monkeypatch):
    """Cells run here, not in processes of their own."""

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

        def submit(self, function, *arguments):
            from concurrent.futures import Future

            future = Future()
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
            return future

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Pool)


def run(cells, results, tmp_path, minutes=10.0):
    said = []
    outcome = runner.run_missing(
        cells, results, tmp_path / "runs", processes=2, budget_minutes=minutes, say=said.append
    )
    return outcome, said


@pytest.mark.usefixtures("in_process")
def test_a_row_has_what_a_reader_needs_and_its_ledger_holds(results, tmp_path):
    outcome, _ = run([cell()], results, tmp_path)
    assert (outcome.run, outcome.failed, outcome.left) == (1, (), 0)
    (row,) = load_rows(results.folder)
    assert set(NEEDED) <= set(row)
    assert 0.1 < row["test_accuracy"] < 1
    assert row["gradient_evaluations"] > 1000
    assert row["verified"] is True
    assert row["history"][0]["epoch"] == 1
    assert row["command"].startswith("dpis train fmnist-sample --method dpis")
    assert check_ledgers(results.folder) == (1, [])


@pytest.mark.usefixtures("in_process")
def test_what_is_there_is_not_run_again_and_a_shared_run_is_shared(results, tmp_path):
    run([cell()], results, tmp_path)
    outcome, _ = run([cell(), cell(table="table5")], Results(results.folder), tmp_path)
    assert (outcome.there, outcome.run) == (2, 0)
    rows = load_rows(results.folder)
    assert [row["table"] for row in rows] == ["table3", "table5"]
    assert rows[0]["ledger_sha256"] == rows[1]["ledger_sha256"]


@pytest.mark.usefixtures("in_process")
def test_a_cell_that_fails_leaves_the_others_alone(results, tmp_path):
    broken = cell(settings={**SETTINGS, "model": "no-such-model"})
    outcome, said = run([broken, cell()], results, tmp_path)
    assert outcome.run == 1
    assert "no-such-model" in outcome.failed[0]
    assert any(line.startswith("failed") for line in said)


@pytest.mark.usefixtures("in_process")
def test_two_runners_do_not_write_one_row_twice(results, tmp_path):
    another = Results(results.folder)
    run([cell()], results, tmp_path)
    (row,) = results
    another.add(dict(row))
    assert len(load_rows(results.folder)) == 1


@pytest.mark.usefixtures("in_process")
def test_an_error_nobody_foresaw_costs_its_own_cell_alone(results, tmp_path, monkeypatch):
    real = runner.run_cell

    def sometimes(cell, *more):
        if cell.seed == 3:
            raise OSError("the disk is gone")
        return real(cell, *more)

    monkeypatch.setattr(runner, "run_cell", sometimes)
    outcome, _ = run([cell(), cell(seed=4)], results, tmp_path)
    assert outcome.run == 1
    assert "the disk is gone" in outcome.failed[0]


@pytest.mark.usefixtures("in_process")
def test_no_cell_begins_when_the_time_is_up(results, tmp_path):
    outcome, _ = run([cell()], results, tmp_path, minutes=0.0)
    assert (outcome.run, outcome.left) == (0, 1)


@pytest.mark.usefixtures("in_process")
def test_what_is_not_private_has_no_ledger(results, tmp_path):
    run([cell(method="sgd", epsilon=None, accountant=None)], results, tmp_path)
    (row,) = load_rows(results.folder)
    assert row["claim"] is None
    assert row["ledger_sha256"] is None
    assert row["verified"] is False
    assert check_ledgers(results.folder) == (0, [])


@pytest.mark.usefixtures("in_process")
def test_validation_rows_stay_out_of_the_tables(results, tmp_path):
    run([cell(validation=True)], results, tmp_path)
    assert load_rows(results.folder) == []
    (row,) = load_rows(results.folder, with_tuning=True)
    assert "training records" in row["measured_on"]


@pytest.mark.usefixtures("in_process")
def test_an_interrupted_cell_is_taken_up(results, tmp_path, monkeypatch):
    from dpis.training.trainer import Trainer

    release = Trainer._release
    monkeypatch.setattr(
        Trainer, "_release", lambda self: (_ for _ in ()).throw(DpisError("killed"))
    )
    outcome, _ = run([cell()], results, tmp_path)
    assert outcome.failed
    monkeypatch.setattr(Trainer, "_release", release)
    outcome, _ = run([cell()], results, tmp_path)
    assert outcome.run == 1


@pytest.mark.usefixtures("in_process")
def test_a_ledger_that_was_changed_lost_or_claims_less_is_found(results, tmp_path, capsys):
    run([cell()], results, tmp_path)
    (row,) = load_rows(results.folder)
    path = results.folder / "table3.jsonl"
    path.write_text(json.dumps({**row, "epsilon": 1.0}) + "\n")
    count, problems = check_ledgers(results.folder)
    assert count == 1
    assert "claims" in problems[0]
    path.write_text(
        json.dumps({**row, "ledger_sha256": row["ledger_sha256"][:16] + "0" * 48}) + "\n"
    )
    assert "another one" in check_ledgers(results.folder)[1][0]
    ledger_path(results.folder, row).unlink()
    assert "cannot be read" in check_ledgers(results.folder)[1][0]
    assert main(["verify", "--results", str(results.folder)]) == 1
    assert "0 of 1 ledgers hold" in capsys.readouterr().out


def test_commands_for_people(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["table6", "--datasets", "mnist", "--list"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 4
    assert all(line.startswith("dpis train mnist --method dpis-adaptive") for line in commands)
    assert main(["table3", "--epsilons", "one"]) == 2
    assert "--epsilons must be numbers" in capsys.readouterr().err
    assert main(["table3", "--datasets", "svhn"]) == 2


def test_a_killed_runner_takes_its_cells_along_and_they_can_be_taken_up(tmp_path, results):
    long = cell(settings={**SETTINGS, "batch_size": 100, "epochs": 300})
    script = tmp_path / "runner.py"
    script.write_text(
        "from pathlib import Path\n"
        "from reproduction import runner\n"
        "from reproduction.table_cells import TableCell\n"
        "from reproduction.results import Results\n"
        "if __name__ == '__main__':\n"
        f"    runner.run_missing([{long!r}], Results(Path('results')), Path('runs'), processes=1,\n"
        "        budget_minutes=10.0, say=lambda line: None)\n"
    )
    ignored = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    with subprocess.Popen(
        [sys.executable, script],
        cwd=tmp_path,
        preexec_fn=ignored,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the package stands beside the library
    ) as parent:
        checkpoints = partial((tmp_path / "runs").glob, "*/checkpoint.secret")
        _until(lambda: any(checkpoints()))
        parent.kill()
    (folder,) = (path.parent for path in checkpoints())
    _until(lambda: _is_free(folder))
    assert RunFolder(folder).checkpoint.exists()
    assert not load_rows(results.folder)


def test_a_run_is_taken_up_by_the_code_that_began_it_alone(tmp_path):
    folders = set()
    for commit in ("one", "another"):
        row, _ = runner.run_cell(cell(), tmp_path, commit)
        assert row["commit"] == commit
        folders |= {path for path in tmp_path.iterdir() if path.is_dir()}
    assert len(folders) == 2


@pytest.mark.usefixtures("in_process")
def test_rows_name_the_commit_that_the_runner_began_with(results, tmp_path, monkeypatch):
    """Code that is committed while cells run is not what they run."""
    commits = iter(["first", "second"])
    monkeypatch.setattr(runner, "commit_of_code", lambda: next(commits))
    run([cell(), cell(seed=4)], results, tmp_path)
    assert [row["commit"] for row in load_rows(results.folder)] == ["first", "first"]


def _until(happened, seconds=60.0):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_free(folder):
    try:
        FolderLock(folder).release()
    except InputError:
        return False
    return True


def test_two_processes_make_the_same_rows_as_one(results, tmp_path):
    cells = [cell(), cell(seed=4)]
    outcome, _ = run(cells, results, tmp_path)
    assert outcome.run == 2
    here, _ = runner.run_cell(cells[0], tmp_path / "here", "here")
    there = next(row for row in load_rows(results.folder) if row["seed"] == 3)
    assert there["ledger_sha256"] == here["ledger_sha256"]
    assert there["test_accuracy"] == pytest.approx(here["test_accuracy"], abs=0.01)
