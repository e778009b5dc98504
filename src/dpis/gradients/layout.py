"""Where the records are in a tensor: which dimension counts them, and in what order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One dimension of a tensor counts rows; each record owns ``per_record`` of them.

    Attributes:
        dim: the dimension that grows with the batch, counted from the front.
        per_record: how many entries of that dimension belong to one record (more than one where
            the model flattened records and positions into one dimension).
        record_major: the entries of one record are neighbours (``[record, position]`` flattened);
            otherwise the records of one position are (``[position, record]``).
    """

    dim: int
    per_record: int = 1
    record_major: bool = True

    def rows_first(self, tensor: Tensor) -> Tensor:
        """The tensor with its rows in front, those of one record next to one another.

        Example:
            >>> Layout(dim=1).rows_first(torch.zeros(7, 2, 5)).shape  # 7 steps, 2 records
            torch.Size([2, 7, 5])
        """
        rows = tensor.movedim(self.dim, 0) if self.dim else tensor
        if self.record_major or self.per_record == 1:
            return rows
        by_position = rows.reshape(self.per_record, -1, *rows.shape[1:])
        return by_position.transpose(0, 1).flatten(0, 1)

    def by_unit(self, tensor: Tensor) -> Tensor:
        """The tensor with its rows in front, each holding all of its entries: a view."""
        along = tensor.movedim(self.dim, 0) if self.dim else tensor
        if self.per_record == 1:
            return along
        if self.record_major:
            return torch.unflatten(along, 0, (-1, self.per_record))
        return torch.unflatten(along, 0, (self.per_record, -1)).transpose(0, 1)


@dataclass(frozen=True)
class Growth:
    """How a tensor grows with the batch: a layout that does not yet know the batch size.

    Attributes:
        dim: the dimension that grows.
        rows_per_unit: 1 if it counts rows of the batch; K if it counts records of K rows each.
        merged: several entries belong to one unit: records and positions share the dimension.
        record_major: as in ``Layout``; None as long as that is not known.
    """

    dim: int
    rows_per_unit: int
    merged: bool
    record_major: bool | None

    def layout(self, shape: torch.Size, rows: int) -> Layout | None:
        """The layout of a tensor of this shape in a batch of so many rows; None: it cannot be."""
        units = rows // self.rows_per_unit
        if self.dim >= len(shape) or shape[self.dim] % units:
            return None
        per_unit = shape[self.dim] // units
        if per_unit != 1 and not self.merged:
            return None
        return Layout(self.dim, per_unit, bool(self.record_major))

    def orders(self) -> Iterator[Growth]:
        """The orders in which entries may stand, as far as is known."""
        for record_major in (True, False) if self.record_major is None else (self.record_major,):
            yield replace(self, record_major=record_major)

    @property
    def settled(self) -> bool:
        """Whether the order is known."""
        return self.record_major is not None

    def owners(self, entries: Tensor, rows: int, rows_per_record: int) -> Tensor:
        """Which record each entry of the dimension belongs to, if this is the order."""
        units = torch.arange(rows // self.rows_per_unit, device=entries.device)
        owner = units * self.rows_per_unit // rows_per_record
        times = len(entries) // len(owner)
        return owner.repeat_interleave(times) if self.record_major else owner.repeat(times)


def find_growth(two: torch.Size, three: torch.Size, rows_per_record: int) -> Growth | None:
    """Compare a tensor's shapes for two and for three records; None: no single dimension grew.

    Example:
        >>> find_growth(torch.Size([7, 2, 5]), torch.Size([7, 3, 5]), 1)
        Growth(dim=1, rows_per_unit=1, merged=False, record_major=True)
    """
    if len(two) != len(three):
        return None
    grown = [dim for dim, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if len(grown) != 1 or 3 * two[grown[0]] != 2 * three[grown[0]]:
        return None
    per_record = two[grown[0]] // 2
    counts_rows = per_record % rows_per_record == 0
    merged = per_record > (rows_per_record if counts_rows else 1)
    rows_per_unit = 1 if counts_rows else rows_per_record
    return Growth(grown[0], rows_per_unit, merged, record_major=None if merged else True)
