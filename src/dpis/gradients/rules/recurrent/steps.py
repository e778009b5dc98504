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
        row: where the block begins in a packed sequence.
    """

    step: int
    steps: int
    active: int
    row: int


@dataclass(frozen=True)
class Timetable:
    """How many records are at work at each step.

    The places of the batch are sorted by length, longest first, so that step ``t`` works on the
    first ``active[t]`` of them. A *sequence* is a tensor of shape

    - ``[steps, records, ...]`` for a padded batch, where every step works on every record;
    - ``[rows, ...]`` for a packed batch: the records of step 0, then those of step 1, and so on.

    Attributes:
        active: the number of records at work at each step; it never grows.
        packed: whether records may have different lengths.
    """

    active: tuple[int, ...]
    packed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions of a sequence."""
        return (sum(self.active),) if self.packed else (self.steps, self.records)

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

    def take(self, sequence: Tensor, block: Block, backwards: bool) -> Tensor:
        """A block's part of a sequence, shape ``[steps, active, ...]``.

        Backwards, every record begins with its own last step.

        Example:
            >>> sequence, block = torch.tensor([1, 10, 2]), Block(step=0, steps=1, active=2, row=0)
            >>> Timetable((2, 1), packed=True).take(sequence, block, backwards=True)
            tensor([[ 2, 10]])
        """
        if self.packed:
            rows = sequence[self._rows(block, backwards, sequence.device)]
            return rows.view(block.steps, block.active, *sequence.shape[1:])
        if backwards:
            return sequence[self._mirrored_steps(block)].flip(0)
        return sequence[block.step : block.step + block.steps]

    def put(self, sequence: Tensor, block: Block, backwards: bool, values: Tensor) -> None:
        """Set what ``take`` reads, in place."""
        if self.packed:
            sequence[self._rows(block, backwards, sequence.device)] = values.flatten(0, 1)
        elif backwards:
            sequence[self._mirrored_steps(block)] = values.flip(0)
        else:
            sequence[block.step : block.step + block.steps] = values

    def _mirrored_steps(self, block: Block) -> slice:
        """The steps of the block counted from the end."""
        return slice(self.steps - block.step - block.steps, self.steps - block.step)

    def _rows(self, block: Block, backwards: bool, device: torch.device) -> slice | Tensor:
        rows = slice(block.row, block.row + block.steps * block.active)
        return self._reversal[rows].to(device) if backwards else rows

    @cached_property
    def _reversal(self) -> Tensor:
        """The order of the rows in which every record runs backwards."""
        active = torch.tensor(self.active)
        first_row = active.cumsum(0) - active
        step = torch.arange(self.steps).repeat_interleave(active)
        place = torch.arange(step.numel()) - first_row[step]
        length = (active[:, None] > torch.arange(self.records)).sum(0)
        return first_row[length[place] - 1 - step] + place
