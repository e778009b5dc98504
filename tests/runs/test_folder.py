"""A run's folder: one run at a time, nothing half-written, nothing of others touched."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dpis.errors import InputError
from dpis.runs.checkpoint import read_checkpoint, write_checkpoint
from dpis.runs.folder import FolderLock, Replacement, RunFolder, next_run_folder


def test_a_folder_is_locked_until_it_is_released(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(InputError, match="another process"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    with FolderLock(tmp_path), pytest.raises(InputError, match="another process"):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_new_run_takes_an_empty_folder_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.claim_new().release()
    folder.claim_new().release()  # nothing was written: still empty
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        folder.claim_new()
    folder.checkpoint.write_bytes(b"")
    with pytest.raises(InputError, match="unfinished run: go on with it by resume"):
        folder.claim_new()
    folder.remove()
    assert [file.name for file in folder.path.iterdir()] == ["notes.txt"]


def test_a_refused_folder_is_not_left_locked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty") as refusal:
        RunFolder(tmp_path).claim_new()
    FolderLock(tmp_path).release()
    assert refusal.tb is not None  # which holds on to all that was there


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / ".checkpoint.secret.unfinished").write_bytes(b"half")
    (tmp_path / ".model.safetensors.unfinished").write_bytes(b"half")
    folder.claim().release()
    assert not list(tmp_path.iterdir())


def test_a_replacement_that_is_given_up_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError), Replacement(path, b"after"):
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


def test_numbers_that_are_taken_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").touch()
    assert next_run_folder(tmp_path) == tmp_path / "3"


@pytest.mark.parametrize("state", [b"", b"\n", bytes(range(256)) * 100])
def test_a_checkpoint_gives_back_its_bytes(tmp_path: Path, state: bytes) -> None:
    path = tmp_path / "checkpoint.secret"
    write_checkpoint(path, state)
    assert bytes(read_checkpoint(path)) == state
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
