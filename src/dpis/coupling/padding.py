"""Rows as they are padded in their batch, and as they are by themselves: a model must not see the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from dpis.batches import Batch
from dpis.coupling.differences import copied, differ
from dpis.coupling.items import Chance, Collate
from dpis.coupling.looks import Looks
from dpis.generators import GeneratorStates

ASKED = 4
"""Of a batch: how many items are collated by themselves."""
DEEPEST = 4
"""Objects within objects: no further."""

SEES_PADDING = (
    "the gradient of a record depends on how far it is padded, and so on the longest record of its batch: records "
    "couple, and the privacy guarantee would not hold. Mask what is padded (in means, attention, last positions, and "
    "in the loss; padding_idx alone does not serve, noise moves that row of an embedding too) so that neither the "
    "model's output nor the loss changes with it, or pad to one public length"
)


class PaddedOtherwise(NamedTuple):
    """One row of a batch in two forms: the tensors of the batch, and those of the same item collated by itself.

    Attributes:
        place: of the row.
        padded: as in the batch; what counts rows has one, rows first.
        alone: by itself, in the same order.
    """

    place: int
    padded: list[Tensor]
    alone: list[Tensor]


class PaddingProbe:
    """Collates some items by themselves, at the 1st, 2nd, 4th, 8th, … batch and wherever rows are longer than ever.

    Where all shapes are as in the batch, there is nothing to see; where an item by itself is never the same twice, it
    is made at random and nothing to compare with.

    Args:
        collate: the function; torch's default does not pad.
        row_dim: the dimension of rows in what it makes.
    """

    def __init__(self, collate: Collate, row_dim: int = 0) -> None:
        self._collate, self._row_dim = collate, row_dim
        self._looks, self._largest = Looks(), 0.0

    def keep(self, items: Sequence[Any]) -> dict[int, Any]:
        """Copies of some items of a batch that is about to be made, by their places: items may be changed."""
        if self._collate is default_collate or len(items) < 2:
            return {}
        places = range(0, len(items), max(1, len(items) // ASKED))
        return {place: copied(items[place]) for place in places[:ASKED]}

    def look(
        self, batch: Batch, kept: Mapping[int, Any], rows: int, chance: Chance
    ) -> list[PaddedOtherwise]:
        """Rows that have another shape by themselves.

        Args:
            batch: as it was made.
            kept: as `keep` returned it.
            rows: of the batch.
            chance: the randomness that the batch was made with.
        """
        if not kept:
            return []
        whole = self._rows_first(batch)
        size = sum(tensor.numel() for tensor in whole) / rows
        due = self._looks.due() or size > self._largest
        self._largest = max(self._largest, size)
        pairs = (self._pair(whole, *one, rows, chance) for one in kept.items()) if due else ()
        return [pair for pair in pairs if pair is not None]

    def _pair(
        self, whole: list[Tensor], place: int, item: Any, rows: int, chance: Chance
    ) -> PaddedOtherwise | None:
        try:
            with chance():
                made = self._collate([copied(item)])
            with GeneratorStates.now().again():
                again = self._collate([copied(item)])
        except Exception:
            return None  # there are functions that cannot do with one item
        alone = self._rows_first(made)
        if len(alone) != len(whole) or differ(made, again):
            return None
        padded = [
            tensor[place : place + 1] if (_length(tensor), _length(own)) == (rows, 1) else tensor
            for tensor, own in zip(whole, alone, strict=True)
        ]
        shapes_agree = [t.shape for t in padded] == [t.shape for t in alone]
        return None if shapes_agree else PaddedOtherwise(place, padded, alone)

    def _rows_first(self, batch: Batch) -> list[Tensor]:
        dim = self._row_dim
        return [t.movedim(dim, 0) if t.ndim > dim else t for t in tensors_within(batch)]


def tensors_within(batch: Any, deepest: int = DEEPEST) -> Iterator[Tensor]:
    """All tensors of a batch, those of objects too; a packed sequence is not padded, and has none."""
    if isinstance(batch, PackedSequence) or deepest == 0:
        return
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_within(value, deepest - 1)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_within(value, deepest - 1)
    elif hasattr(batch, "__dict__") and not callable(batch):
        yield from tensors_within(vars(batch), deepest - 1)


def _length(tensor: Tensor) -> int:
    return len(tensor) if tensor.ndim else 0
