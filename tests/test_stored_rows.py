"""Rows on disk are the rows they would be in memory, in whatever order they are asked for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from dpis import stored_rows
from dpis.errors import InputError
from dpis.stored_rows import MappedRows, RowsDataset, StackedRows, StoredRows, blocks_of

N = 23
PLACES = [np.array([5, 0, 22, 7, 7]), np.arange(4, 19), np.arange(0), np.array([3])]


@pytest.fixture(params=["<f4", "u1", ">f8", "<i2"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MappedRows, torch.Tensor]:
    array = (np.arange(N * 6).reshape(N, 2, 3) % 101).astype(request.param)
    array.tofile(tmp_path / "rows")
    rows = MappedRows(tmp_path / "rows", array.dtype, array.shape)
    return rows, torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def plus_one(rows: torch.Tensor) -> torch.Tensor:
    return rows.double() + 1


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_rows_come_in_the_order_of_their_places(stored: Any, places: np.ndarray) -> None:
    rows, whole = stored
    some = np.array([20, 3, 3, 8, *range(N)])
    pairs: list[tuple[StoredRows, torch.Tensor]] = [
        (rows, whole),
        (rows.each(plus_one, "plus one"), whole.double() + 1),
        (rows.taken(some), whole[some]),
        (rows.taken(some[::-1]).taken(np.arange(N)), whole[some[::-1].copy()][:N]),
        (rows.taken(some).each(plus_one, "plus one"), whole[some].double() + 1),
        (StackedRows([rows, rows]), torch.stack([whole, whole], 1)),
    ]
    for on_disk, in_memory in pairs:
        assert on_disk.shape == tuple(in_memory.shape)
        assert torch.equal(on_disk.fetch(places), in_memory[places])
        assert torch.equal(torch.cat(list(on_disk.blocks())), in_memory)


def test_where_rows_stand_in_their_file_is_known(stored: Any) -> None:
    rows, _ = stored
    some = rows.taken(np.array([9, 2, 4])).each(plus_one, "plus one").taken(np.array([2, 0]))
    assert some.origin(np.arange(2)).tolist() == [4, 9]
    assert some.files(np.arange(2)) == (rows.path,)
    assert some.recipe != rows.recipe


def test_blocks_are_small(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, whole = stored
    monkeypatch.setattr(stored_rows, "BLOCK_BYTES", 4 * 6 * 5)
    blocks = list(blocks_of(rows, 1024))
    assert [len(block) for block in blocks] == [5, 5, 5, 5, 3]
    assert torch.equal(torch.cat(blocks), whole)


def test_a_dataset_gives_items_one_by_one_and_at_once(stored: Any) -> None:
    rows, whole = stored
    dataset = RowsDataset(rows, torch.arange(N))
    places = [4, 1, 22]
    assert all(
        torch.equal(a, b) for a, b in zip(dataset[-1], (whole[-1], torch.tensor(22)), strict=True)
    )
    together = default_collate(dataset.__getitems__(places))
    assert torch.equal(together[0], whole[places])
    assert together[1].tolist() == places
    with pytest.raises(IndexError):
        dataset[N]
    loaded = list(DataLoader(dataset, batch_size=10))
    assert torch.equal(torch.cat([batch[0] for batch in loaded]), whole)


def test_a_map_does_not_travel(stored: Any) -> None:
    """To another process goes where the file is, not what it holds."""
    rows, whole = stored
    assert torch.equal(rows.fetch(np.array([3, 1])), whole[[3, 1]])
    sent = pickle.dumps(rows)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent).fetch(np.arange(N)), whole)


def test_a_file_that_was_cut_short_since(stored: Any) -> None:
    rows, _ = stored
    rows.path.write_bytes(b"\0")
    with pytest.raises(InputError, match=r"cannot read .*rows, which was there"):
        rows.fetch(np.arange(3))
