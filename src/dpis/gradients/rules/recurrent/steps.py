"""Which records are at work at each step of a recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Neighbouring steps at which the same records are at work.

    Attributes:
        step: the first of the steps.
        steps: how many there are.
        active: the first ``active`` places of the batch are at work.
        row: where the block begins among the rows (see ``Timetable``).
    """

    step: int
    steps: int
    active: int
    row: int

    def of(self, rows: Tensor) -> Tensor:
        """This block's part of ``rows``, shape ``[steps, active, ...]``."""
        part = rows[self.row : self.row + self.steps * self.active]
        return part.view(self.steps, self.active, *rows.shape[1:])


@dataclass(frozen=True)
class Timetable:
    """How many records are at work at each step: the layout of a ``PackedSequence``.

    The places of the batch are sorted by length, longest first, so that step ``t`` works on the
    first ``active[t]`` of them. A sequence is stored as *rows*: ``active[0]`` rows of step 0, then
    ``active[1]`` rows of step 1, and so on. A padded batch is the special case where every step
    works on every record.

    Attributes:
        active: the number of records at work at each step; it never grows.
        packed: whether records may have different lengths.
    """

    active: tuple[int, ...]
    packed: bool = False

    @property
    def steps(self) -> int:
        """The length of the longest record."""
        return len(self.active)

    @property
    def records(self) -> int:
        """The number of records."""
        return self.active[0]

    def blocks(self, most_steps: int) -> Iterator[Block]:
        """Cut the steps into blocks of at most ``most_steps``.

        Example:
            >>> [(b.step, b.steps, b.active) for b in Timetable((3, 3, 3, 1)).blocks(2)]
            [(0, 2, 3), (2, 1, 3), (3, 1, 1)]
        """
        step = row = 0
        while step < self.steps:
            active = self.active[step]
            stop = step + 1
            while stop < min(self.steps, step + most_steps) and self.active[stop] == active:
                stop += 1
            yield Block(step, stop - step, active, row)
            row += (stop - step) * active
            step = stop

    def take(self, rows: Tensor, block: Block, backwards: bool) -> Tensor:
        """A block's part of ``rows``, shape ``[steps, active, ...]``.

        Backwards, every record begins with its own last step.

        Example:
            >>> rows, block = torch.tensor([1, 10, 2]), Block(step=0, steps=1, active=2, row=0)
            >>> Timetable((2, 1), packed=True).take(rows, block, backwards=True)  # 1 and 2; 10
            tensor([[ 2, 10]])
        """
        if not backwards:
            return block.of(rows)
        if not self.packed:
            return self._mirrored(block).of(rows).flip(0)
        own = rows[self._reversed_rows(block, rows.device)]
        return own.view(block.steps, block.active, *rows.shape[1:])

    def put(self, rows: Tensor, block: Block, backwards: bool, values: Tensor) -> None:
        """Set what ``take`` reads, in place."""
        if not backwards:
            block.of(rows).copy_(values)
        elif not self.packed:
            self._mirrored(block).of(rows).copy_(values.flip(0))
        else:
            rows[self._reversed_rows(block, rows.device)] = values.flatten(0, 1)

    def _mirrored(self, block: Block) -> Block:
        """The same steps counted from the end; for a padded batch."""
        step = self.steps - block.step - block.steps
        return Block(step, block.steps, block.active, row=step * block.active)

    def _reversed_rows(self, block: Block, device: torch.device) -> Tensor:
        return self._reversal[block.row : block.row + block.steps * block.active].to(device)

    @cached_property
    def _reversal(self) -> Tensor:
        """The order of the rows in which every record runs backwards."""
        active = torch.tensor(self.active)
        first_row = active.cumsum(0) - active
        step = torch.arange(self.steps).repeat_interleave(active)
        place = torch.arange(step.numel()) - first_row[step]
        length = (active[:, None] > torch.arange(self.records)).sum(0)
        return first_row[length[place] - 1 - step] + place
