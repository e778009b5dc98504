"""Rows are read with suspicion: what is no row is named by its place."""

import json
import subprocess
from pathlib import Path

import pytest

from dpis.errors import InputError
from reproduction import runner
from reproduction.__main__ import main
from reproduction.results import Results, load_rows
from tests.app.page.made_up import row


def written(folder, *lines):
    folder.mkdir(exist_ok=True)
    (folder / "table3.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


@pytest.mark.parametrize("command", ["verify", "report"])
@pytest.mark.parametrize("there", [False, True], ids=["no folder", "no rows"])
def test_no_rows_are_an_error(tmp_path, capsys, command, there):
    folder = tmp_path / "nope"
    if there:
        folder.mkdir()
    assert main([command, "--results", str(folder)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert f"no rows in {folder}" in said.err


def test_a_new_folder_can_be_filled(tmp_path):
    assert list(Results(tmp_path / "new")) == []


def test_a_folder_that_cannot_be_written_is_found_before_a_cell_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_cell", lambda *_: pytest.fail("a cell was run"))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "rows", Path("/proc/rows")):
        with pytest.raises(InputError, match=r"cannot write rows to .* --results"):
            runner.run_missing(
                [], Results(folder), tmp_path, processes=1, budget_minutes=0, say=print
            )
    assert main(["table3", "--results", str(tmp_path / "file")]) == 2


def test_the_commit_is_that_of_the_package_alone(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "of another project")
    package = tmp_path / "src"
    package.mkdir()
    installed = tmp_path / "reproduction" / "runner.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(runner, "__file__", str(installed))
    assert runner.commit_of_code() == "unknown"
    git("add", ".")
    git("commit", "-m", "its own")
    commit = runner.commit_of_code()
    assert len(commit) == 12
    (tmp_path / "results.jsonl").write_text("a row that was written meanwhile")
    assert runner.commit_of_code() == commit
    (package / "new.py").write_text("")
    assert runner.commit_of_code() == f"{commit}-dirty"


def test_rows_are_read(tmp_path):
    made = [row(), row(method="sgd", epsilon=None, claim=None, ledger_sha256=None)]
    folder = written(tmp_path, *(json.dumps(one).encode() for one in made))
    assert load_rows(folder) == made


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b'{"table": "table3"}', b"\xff", b"[" * 100_000, b'{"epsilon": NaN}'],
    ids=["torn", "list", "short", "not utf-8", "deep", "nan"],
)
def test_a_broken_line_is_named(tmp_path, line):
    folder = written(tmp_path, json.dumps(row()).encode(), line)
    with pytest.raises(InputError, match=r"table3.jsonl, line 2"):
        load_rows(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epsilon": "1"}, 'epsilon must be a number above 0, or null, found "1"'),
        ({"epsilon": None}, "does not go with the method dp-sgd"),
        ({"method": "sgd"}, "does not go with the method sgd"),
        ({"ledger_sha256": None}, "a private row needs ledger_sha256"),
        ({"ledger_sha256": "../x"}, "ledger_sha256 must be 64 hexadecimal digits"),
        ({"dataset": "svhn"}, 'dataset must be one of mnist, .* found "svhn"'),
        ({"dataset": ["mnist"]}, "dataset must be one of"),
        ({"table": "table9"}, "table must be one of table3"),
        ({"seed": True}, "seed must be an integer, found true"),
        ({"test_accuracy": 90.0}, "test_accuracy must be a number in 0..1"),
        ({"options": []}, "options must be an object"),
        ({"history": [1]}, "history must be a list of objects"),
        ({"history": [{"epoch": "1"}]}, "history must be a list of objects"),
        ({"claim": None}, "a private row needs claim"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_damaged_value_is_one_clear_line(tmp_path, capsys, changes, problem, command):
    folder = written(tmp_path, json.dumps(row(**changes)).encode())
    assert main([command, "--results", str(folder)]) == 2
    with pytest.raises(InputError, match=problem):
        load_rows(folder)
    assert "line 1: " in capsys.readouterr().err


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "table3.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*table3.jsonl"):
        load_rows(tmp_path)
