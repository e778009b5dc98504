"""A fingerprint tells data apart row by row, and does not read again what files are known to hold."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dpis
from dpis.errors import InputError
from dpis.randomness import Key
from dpis.sampling import Shards
from dpis.stored_rows import MappedRows, RowsDataset
from dpis.training import data_fingerprint
from dpis.training.data_fingerprint import DataFingerprint, chunks
from dpis.training.records import Records
from tests.training.toys import Crash, crash_at, fit, linear, released

KEY = Key.from_seed(1)
N, CHUNK = 64, 10


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_fingerprint, "RECORDS_A_CHUNK", CHUNK)


def rows_file(folder: Path, age: float = 3600.0) -> Path:
    """Inputs on disk that nobody has touched for an hour; their times of change are those of now."""
    path = folder / "x.npy"
    np.save(path, torch.randn(N, 4, generator=torch.Generator().manual_seed(3)).numpy())
    os.utime(path, (time.time() - age,) * 2)
    return path


def mapped(path: Path) -> MappedRows:
    array = np.load(path, mmap_mode="r")
    return MappedRows(path, array.dtype, array.shape, array.offset)


LABELS = torch.arange(N) % 2


def dataset(path: Path) -> RowsDataset:
    return RowsDataset(mapped(path), LABELS)


def fingerprint(records: Records, key: Key = KEY, known: Any = None) -> DataFingerprint:
    """Over one shard, so that chunks are easy to count."""
    return DataFingerprint(records, key, Shards.whole(len(records), 1), known or {})


def whole(seen: DataFingerprint) -> str:
    return seen.combined(seen.own_digests())


def text(data: Any, known: Any = None, **more: Any) -> str:
    return whole(fingerprint(Records(data, **more), KEY, known))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are old at once: what a test wrote a moment ago is not doubted."""
    monkeypatch.setattr(data_fingerprint, "SETTLED_SECONDS", -1e9)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were read from disk for a fingerprint, chunk by chunk."""
    seen: list[int] = []
    add = data_fingerprint.Fingerprint.add_rows

    def counted(self: Any, column: Any, places: Any) -> None:
        if not isinstance(column, torch.Tensor):
            seen.append(len(places))
        add(self, column, places)

    monkeypatch.setattr(data_fingerprint.Fingerprint, "add_rows", counted)
    return seen


def edit(path: Path, row: int, *, quietly: bool = False) -> None:
    """Change a row in place; quietly: with the old time of modification."""
    before = path.stat()
    array = np.load(path, mmap_mode="r+")
    array[row] += 1
    array.flush()
    del array
    if quietly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# ── what it tells apart ──────────────────────────────────────────────────────────────────────────────


def test_rows_on_disk_are_the_rows_in_memory(tmp_path: Path) -> None:
    path = rows_file(tmp_path)
    assert text(dataset(path)) == text(TensorDataset(torch.from_numpy(np.load(path)), LABELS))


class Items(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self.rows = torch.from_numpy(np.load(path))

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> Any:
        return self.rows[place], LABELS[place]


@pytest.mark.parametrize("make", [dataset, Items], ids=["on disk", "items"])
@pytest.mark.parametrize("row", [0, CHUNK - 1, CHUNK, N - 1])
@pytest.mark.parametrize("users", [None, [n % 7 for n in range(N)]], ids=["rows", "users"])
def test_every_row_counts(tmp_path: Path, make: Any, row: int, users: Any) -> None:
    path = rows_file(tmp_path)
    before = text(make(path), user_ids=users)
    assert text(make(path), user_ids=users) == before
    edit(path, row)
    assert text(make(path), user_ids=users) != before


def test_order_length_owners_and_key_count(tmp_path: Path) -> None:
    path, users = rows_file(tmp_path), [n % 7 for n in range(N)]
    rows, order = mapped(path), np.arange(N)
    swapped = order.copy()
    swapped[[3, CHUNK + 3]] = swapped[[CHUNK + 3, 3]]
    same = torch.zeros(N)
    texts = [
        text(RowsDataset(rows.taken(order), same)),
        text(RowsDataset(rows.taken(swapped), same)),
        text(RowsDataset(rows.taken(order[:-1]), same[:-1])),
        text(RowsDataset(rows, same), user_ids=users),
        text(RowsDataset(rows, same), user_ids=[f"{user}" for user in users[:-1]] + ["9"]),
        whole(fingerprint(Records(RowsDataset(rows, same)), Key.from_seed(2))),
    ]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_several_processes_make_it_of_their_own_chunks(tmp_path: Path, ranks: int) -> None:
    """Each hashes the shards that it owns, in chunks; in their order they are the whole."""
    records = Records(dataset(rows_file(tmp_path)))
    seen = DataFingerprint(records, KEY, Shards.whole(N, 4))
    digests: list[str] = []
    for rank in range(ranks):
        own = Shards.of_rank(N, 4, rank, ranks)
        digests += DataFingerprint(records, KEY, own).own_digests()
        assert all(len(chunk) <= CHUNK for chunk in chunks(own))
    assert len(digests) == 8
    assert seen.combined(digests) == whole(seen)
    assert seen.combined(digests[::-1]) != whole(seen)


# ── what it reads ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("settled")
def test_files_that_are_as_they_were_are_not_read_again(tmp_path: Path, reads: list[int]) -> None:
    path = rows_file(tmp_path)
    first = fingerprint(Records(dataset(path)), KEY)
    before = whole(first)
    assert sum(reads) == N
    assert text(dataset(path), first.known) == before
    assert sum(reads) == N
    for touched in range(2, 4):  # touched, and the same: read, and the same
        os.utime(path)
        again = fingerprint(Records(dataset(path)), KEY, first.known)
        assert whole(again) == before
        assert sum(reads) == touched * N
    assert text(dataset(path), again.known) == before
    assert sum(reads) == 3 * N


@pytest.mark.usefixtures("settled")
def test_only_chunks_of_changed_files_are_read(tmp_path: Path, reads: list[int]) -> None:
    """One part of several files; and other labels in memory are seen though no file changed."""

    class TwoFiles(MappedRows):
        def files(self, places: Any) -> tuple[Path, ...]:
            return tuple(self.path.with_suffix(f".{half}") for half in np.unique(places // 30 % 2))

    path = rows_file(tmp_path)
    for half in range(2):
        path.with_suffix(f".{half}").write_text("")
    rows = mapped(path)
    data = RowsDataset(TwoFiles(path, rows.dtype, rows.shape, rows.offset), LABELS)
    first = fingerprint(Records(data), KEY)
    before = whole(first)
    reads.clear()
    os.utime(path.with_suffix(".1"))
    assert text(data, first.known) == before
    assert sum(reads) == 30
    reads.clear()
    assert text(RowsDataset(data.columns[0], 1 - LABELS), first.known) != before


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("quietly", [False, True], ids=["plainly", "with the old time"])
def test_an_edited_row_is_seen(tmp_path: Path, quietly: bool) -> None:
    """A program that puts the time of modification back cannot put back that of the change."""
    path = rows_file(tmp_path)
    first = fingerprint(Records(dataset(path)), KEY)
    before = whole(first)
    edit(path, 33, quietly=quietly)
    assert text(dataset(path), first.known) != before


@pytest.mark.usefixtures("settled")
def test_other_rows_or_another_way_to_make_them_are_not_taken_for_known(tmp_path: Path) -> None:
    path, order = rows_file(tmp_path), np.arange(N)
    first = fingerprint(Records(dataset(path)), KEY)
    before = whole(first)
    others = [
        mapped(path).taken(order[::-1]),
        mapped(path).each(lambda rows: rows + 1, "plus one"),
        mapped(path).each(lambda rows: rows + 1, "plus one").each(lambda rows: rows + 1, "again"),
    ]
    for other in others:
        assert text(RowsDataset(other, LABELS), first.known) != before


def test_a_file_that_was_changed_just_now_is_not_taken_for_known(tmp_path: Path) -> None:
    first = fingerprint(Records(dataset(rows_file(tmp_path))), KEY)
    whole(first)
    assert first.known == {}


# ── resume ───────────────────────────────────────────────────────────────────────────────────────────


def interrupted(folder: Path, data: Any) -> None:
    with pytest.raises(Crash):
        fit(folder, linear(), data, progress=crash_at(3))


@pytest.mark.usefixtures("settled")
def test_a_run_over_rows_on_disk_goes_on_and_reads_what_changed(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_file(tmp_path)
    fit(tmp_path / "whole", linear(), dataset(path))
    in_memory = TensorDataset(torch.from_numpy(np.load(path)), LABELS)
    fit(tmp_path / "memory", linear(), in_memory)
    assert released(tmp_path / "memory") == released(tmp_path / "whole")
    interrupted(tmp_path / "run", dataset(path))
    reads.clear()
    original = path.read_bytes()
    edit(path, 40)
    with pytest.raises(InputError, match="the data or its order changed since it was interrupted"):
        fit(tmp_path / "run", linear(), dataset(path), resume=True)
    path.write_bytes(original)
    reads.clear()
    fit(tmp_path / "run", linear(), dataset(path), resume=True)
    assert sum(reads) == N
    assert released(tmp_path / "run") == released(tmp_path / "whole")


def test_the_full_check_reads_everything(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that changed in a file whose times did not is seen by the full check alone."""
    monkeypatch.setattr(data_fingerprint, "SETTLED_SECONDS", -1e9)
    path = rows_file(tmp_path)
    known = data_fingerprint.FileIdentity.of(path)
    monkeypatch.setattr(data_fingerprint.FileIdentity, "of", lambda path: known)
    interrupted(tmp_path / "run", dataset(path))
    interrupted_again = tmp_path / "again"
    interrupted(interrupted_again, dataset(path))
    edit(path, 40)
    reads.clear()
    with pytest.raises(InputError, match="the data or its order changed"):
        fit(tmp_path / "run", linear(), dataset(path), resume=True, check_data=True)
    assert sum(reads) == N
    reads.clear()
    fit(interrupted_again, linear(), dataset(path), resume=True)
    assert reads == []


def test_a_check_without_a_run_to_go_on_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="check_data compares data with that of an interrupted run"
    ):
        dpis.train(nn.Linear(4, 2), dataset(rows_file(tmp_path)), nn.CrossEntropyLoss(),
                   training=dpis.Training(check_data=True), out=tmp_path / "run")  # fmt: skip
