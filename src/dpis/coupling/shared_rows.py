"""Whether two datasets have rows in common, as far as objects and memory tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from dpis.batches import tensors_of
from dpis.errors import InputError

Places = npt.NDArray[np.int64]


def share_rows(one: Any, other: Any) -> bool:
    """Whether a row of one dataset is a row of the other, or begins at the same place in memory.

    Parts and sums of datasets are looked into. Copies are not noticed, nor are files that both read.

    Example:
        >>> share_rows(Subset([5, 6, 7], [0, 1]), Subset([5, 6, 7], [0, 1]))  # two lists
        False
        >>> share_rows(Subset(data := [5, 6, 7], [0, 1]), Subset(data, [1, 2]))
        True
    """
    return any(a.shares_rows(b) for a in _sources(one) for b in _sources(other))


def refuse_rows_named_twice(dataset: Any) -> None:
    """One row under several indices is several records, each drawn by itself: the claim would not hold for its owner.

    Raises:
        InputError: if a `Subset` or `ConcatDataset` names a row of its dataset more than once.
    """
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    seen: dict[int, list[Places]] = {}
    for source in _sources(dataset):
        rows = np.arange(len(source.dataset)) if source.places is None else source.places
        seen.setdefault(id(source.dataset), []).append(rows)
    for parts in seen.values():
        rows = np.concatenate(parts)
        if len(np.unique(rows)) < len(rows):
            raise InputError(
                "every row must be named once: this Subset or ConcatDataset names some of them several times. Each "
                "time is a record of its own, drawn and clipped by itself, so the claim would not hold for whose row "
                "it is. Name it once; importance sampling draws hard records more often. Rows of one person belong "
                "together by dpis.train(user_ids=...)"
            )


@dataclass(frozen=True, eq=False)
class _Source:
    """A dataset that is no part or sum of others.

    Attributes:
        dataset: itself.
        places: which of its rows are used; None: all.
    """

    dataset: Any
    places: Places | None

    def shares_rows(self, other: _Source) -> bool:
        if self.dataset is other.dataset:
            if self.places is None or other.places is None:
                return True
            return bool(np.isin(self.places, other.places).any())
        return any(
            mine.device == theirs.device
            and bool(np.isin(self._addresses(mine), other._addresses(theirs)).any())
            for mine in tensors_of(self.dataset)
            for theirs in tensors_of(other.dataset)
        )

    def _addresses(self, tensor: Tensor) -> Places:
        """Where the rows begin in memory; what all rows share (expanded) tells nothing."""
        if not tensor.numel() or (tensor.stride(0) == 0 and len(tensor) > 1):
            return np.zeros(0, np.int64)
        places = np.arange(len(tensor)) if self.places is None else self.places
        return tensor.data_ptr() + places * (tensor.stride(0) * tensor.element_size())


def _sources(dataset: Any, places: Places | None = None) -> Iterator[_Source]:
    """What a dataset is made of in the end."""
    if isinstance(dataset, Subset):
        chosen = np.asarray(list(dataset.indices), np.int64) % max(1, len(dataset.dataset))  # type: ignore[arg-type]
        yield from _sources(dataset.dataset, chosen if places is None else chosen[places])
    elif isinstance(dataset, ConcatDataset):
        start = 0
        for part in dataset.datasets:
            stop = start + len(part)  # type: ignore[arg-type]
            own = None if places is None else places[(places >= start) & (places < stop)] - start
            yield from _sources(part, own)
            start = stop
    else:
        yield _Source(dataset, places)
