"""Held-out data have no row of the training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from dpis.dropin.loader import checked_loader
from dpis.errors import InputError
from tests.training.toys import (
    fit,
    points,
)

DATA = points()


@pytest.mark.parametrize(
    "held_out",
    [
        DATA,
        TensorDataset(*(tensor[:10] for tensor in DATA.tensors)),
        TensorDataset(*(tensor[::2] for tensor in DATA.tensors)),
        TensorDataset(DATA.tensors[0][:, 2:], DATA.tensors[1]),
        Subset(DATA, range(60)),
        Subset(Subset(DATA, [3, 62]), [0]),
        ConcatDataset([points(8, seed=1), Subset(DATA, [-60])]),
        Subset(TensorDataset(*(tensor[60:] for tensor in DATA.tensors)), [0]),
    ],
    ids=[
        "itself",
        "first",
        "strided",
        "columns",
        "subset",
        "subset of it",
        "sum",
        "part of a view",
    ],
)
@pytest.mark.parametrize("part", [False, True])
def test_training_data_is_not_held_out_data(tmp_path: Path, held_out: Any, part: bool) -> None:
    trained = Subset(DATA, range(62)) if part else DATA
    with pytest.raises(InputError, match="held_out is the training data"):
        fit(tmp_path / "run", dataset=trained, held_out=held_out)


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [
        (Subset(DATA, range(54)), Subset(DATA, range(54, 64))),
        (Subset(DATA, range(54)), ConcatDataset([Subset(DATA, range(54, 64)), points(8, seed=1)])),
        (
            TensorDataset(*(t[:54] for t in DATA.tensors)),
            TensorDataset(*(t[54:] for t in DATA.tensors)),
        ),
        (
            TensorDataset(*(t[::2] for t in DATA.tensors)),
            TensorDataset(*(t[1::2] for t in DATA.tensors)),
        ),
    ],
    ids=["subsets", "sum", "views", "every other row"],
)
def test_other_rows_of_one_data_set_may_be_held_out(
    tmp_path: Path, trained: Any, held_out: Any
) -> None:
    fit(tmp_path / "run", dataset=trained, held_out=held_out, epochs=1)


TWICE = {
    "one record 32 times": Subset(DATA, [5] * 32),
    "counted from the end": Subset(DATA, [0, -len(DATA)]),
    "a part of a part": Subset(Subset(DATA, [1, 1, 2]), [0, 1]),
    "two parts": ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [2, 3])]),
    "all, twice": ConcatDataset([DATA, DATA]),
}


@pytest.mark.parametrize("dataset", TWICE.values(), ids=TWICE)
def test_a_row_named_twice_is_refused_in_both_entries(dataset: Any, tmp_path: Path) -> None:
    """The claim is for an item: 32 items of one person are 32 times as much."""
    with pytest.raises(InputError, match="every row must be named once"):
        fit(tmp_path / "run", dataset=dataset)
    with pytest.raises(InputError, match="every row must be named once"):
        checked_loader(DataLoader(dataset, batch_size=1))


def test_parts_that_name_every_row_once_are_taken() -> None:
    parts = ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [0, 3]), points(8, seed=1)])
    checked_loader(DataLoader(parts, batch_size=1))
