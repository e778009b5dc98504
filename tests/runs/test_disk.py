"""A full disk, a folder that cannot be written: one clear line, what was there stays, and the run goes on later."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpis.errors import DpisError, InputError
from dpis.runs.folder import write_whole
from tests.training.toys import Each, fit, released


class FullDisk:
    """Every wait for the disk fails from the n-th on, until there is room again."""

    def __init__(self, last: int) -> None:
        self.last, self.count, self._fsync = last, 0, os.fsync

    def fsync(self, file: int) -> None:
        self.count += 1
        if self.count > self.last:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fsync(file)


def _waits(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(10**9)
        patch.setattr(os, "fsync", disk.fsync)
        fit(tmp_path / "counted")
    return disk.count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a new ledger
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_at_any_time(tmp_path: Path, every: int) -> None:
    whole = released(fit(tmp_path / "whole").folder)
    for last in range(0, _waits(tmp_path), every):
        folder, stepped = tmp_path / str(last), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", FullDisk(last).fsync)
            with pytest.raises(DpisError, match="No space left on device") as failure:
                fit(folder, progress=Each(stepped.append))
        assert "\n" not in str(failure.value)
        if not stepped:
            assert not folder.exists()  # nothing half-written
            continue
        assert not any(path.name.endswith(".unfinished") for path in folder.iterdir())
        fit(folder, resume=True)
        assert released(folder) == whole


def test_what_was_there_before_is_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", b"before")
    monkeypatch.setattr(os, "fsync", FullDisk(0).fsync)
    with pytest.raises(InputError, match="What was there before is untouched"):
        write_whole(tmp_path / "file", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of its own; gives its folder, filled up to so many free bytes."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or not _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)):
        pytest.skip("needs the right to mount a file system")

    def fill(free: int) -> Path:
        stats = os.statvfs(mount)
        room = stats.f_bavail * stats.f_frsize - free
        (mount / "full").write_bytes(bytes(max(0, room)))
        return mount

    yield fill
    _run("umount", str(mount))


@pytest.mark.parametrize("free", [0, 4096, 12288])
def test_a_disk_that_is_really_full(
    tmp_path: Path, small_disk: Callable[[int], Path], free: int
) -> None:
    disk = small_disk(free)
    with pytest.raises(DpisError) as failure:
        fit(disk / "run")
    assert "No space left on device" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (disk / "run").exists()


def test_a_disk_that_fills_up_in_between(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1 << 20)
    whole = released(fit(tmp_path / "whole").folder)

    def fill(standing: Any) -> None:
        if standing.step == 6:
            (disk / "full").unlink()
            small_disk(0)

    with pytest.raises(DpisError, match="No space left on device"):
        fit(disk / "run", progress=Each(fill))
    assert sorted(path.name for path in (disk / "run").iterdir()) == [
        "checkpoint.secret",
        "ledger.jsonl",
    ]
    (disk / "full").unlink()
    assert released(fit(disk / "run", resume=True).folder) == whole


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot"):
        fit(tmp_path)
    with pytest.raises(InputError, match="cannot"):
        fit(tmp_path / "run")
    tmp_path.chmod(0o700)


def test_a_folder_on_a_disk_that_is_read_only(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(1 << 20)
    (disk / "full").unlink()
    assert _run("mount", "-o", "remount,ro", str(disk))
    with pytest.raises(InputError, match="Read-only file system") as failure:
        fit(disk / "run")
    assert "\n" not in str(failure.value)
