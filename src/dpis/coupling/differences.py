"""In which rows two batches of any structure differ."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dpis import batches
from dpis.batches import Batch

FEW, MORE = 5, 7
"""Copies of one item: what has the first size, and then the second, counts rows."""
NO_ROW = -1
NUMBERS = "biufc"
"""Kinds of numpy arrays that are tensors."""


def differ(a: Any, b: Any) -> bool:
    """Whether two items differ in anything, the shapes of their tensors included."""
    return shapes(a) != shapes(b) or bool(differing_rows(a, b, a, a))


def shapes(batch: Batch) -> list[torch.Size]:
    """Those of all its tensors."""
    return [tensor.shape for tensor in batches.tensors(batch)]


def copied(item: Any) -> Any:
    """The item, not to be changed with it."""
    try:
        return copy.deepcopy(item)
    except Exception:
        return item  # what cannot be copied (an open file) is hardly changed by collating


def differing_rows(a: Any, b: Any, few: Any, more: Any) -> set[int]:
    """The rows in which two batches differ, and `NO_ROW` for what is no row of them.

    Args:
        a: one batch.
        b: another, of as many items.
        few: a batch of `FEW` copies of an item.
        more: one of `MORE` copies: where it has this size, rows are counted.
    """
    four = a, b, few, more
    if isinstance(a, PackedSequence):
        return differing_rows(*(pad_packed_sequence(packed, batch_first=True) for packed in four))
    if isinstance(a, np.ndarray) and a.dtype.kind not in NUMBERS:
        return differing_rows(*(array.tolist() for array in four))
    if isinstance(a, Tensor | np.ndarray):
        return _differing_tensors(*(torch.as_tensor(tensor) for tensor in four))
    if isinstance(a, Mapping):
        if any(mapping.keys() != a.keys() for mapping in four):
            return {NO_ROW}
        return set().union(*(differing_rows(*(m[key] for m in four)) for key in a))
    if isinstance(a, tuple | list):
        if len(few) == FEW and len(more) == MORE and len(a) == len(b):
            pairs = enumerate(zip(a, b, strict=True))
            return {row for row, (x, y) in pairs if differing_rows(x, y, x, x)}
        if any(len(several) != len(a) for several in four):
            return {NO_ROW}
        return set().union(*map(differing_rows, *four))
    if isinstance(a, str | bytes | int | float):
        return set() if a == b or (a != a and b != b) else {NO_ROW}
    if all(hasattr(batch, "__dict__") for batch in four):
        return differing_rows(*map(vars, four))
    return set()


def _differing_tensors(a: Tensor, b: Tensor, few: Tensor, more: Tensor) -> set[int]:
    if not a.ndim == b.ndim == few.ndim == more.ndim:
        return {NO_ROW}
    sizes = zip(few.shape, more.shape, strict=True)
    grown = [dim for dim, both in enumerate(sizes) if both == (FEW, MORE)]
    if not grown:
        return {NO_ROW} if _rows_apart(a[None], b[None]) else set()
    a, b = a.movedim(grown[0], 0), b.movedim(grown[0], 0)
    return {NO_ROW} if len(a) != len(b) else _rows_apart(a, b)


def _rows_apart(a: Tensor, b: Tensor) -> set[int]:
    """The rows that differ; where one batch is padded further, in what both have, before the padding or behind it."""
    common = [min(sizes) for sizes in zip(a.shape[1:], b.shape[1:], strict=True)]

    def apart(at_end: bool) -> set[int]:
        x, y = (overlap(rows, common, at_end).reshape(len(rows), -1) for rows in (a, b))
        unequal = (x != y) & ~((x != x) & (y != y))
        return set(unequal.any(1).nonzero()[:, 0].tolist())

    return min((apart(at_end) for at_end in (False, True)), key=len)


def overlap(rows: Tensor, common: list[int], at_end: bool) -> Tensor:
    """The first positions of every row, or the last: as many as two forms of it have in common."""
    for dim, size in enumerate(common, start=1):
        rows = rows.narrow(dim, rows.shape[dim] - size if at_end else 0, size)
    return rows
