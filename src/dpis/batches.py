"""Batches of any structure: tensors in tuples, lists and mappings, rows first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpis.errors import InputError
from dpis.stored_rows import Column, RowsDataset

Batch = Any
"""A tensor whose first dimension counts rows, or a tuple, list or mapping of batches."""


def tensors(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors(value)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)


def apply(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The same structure with the function applied to every tensor; other leaves stay."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return like(batch, [apply(function, value) for value in batch.values()])
    if isinstance(batch, tuple | list):
        return like(batch, [apply(function, value) for value in batch])
    return batch


def like(container: Batch, values: list[Any]) -> Batch:
    """Other values in a container of the same kind, or in a plain one: some cannot be made of their values alone."""
    kind = type(container)
    if isinstance(container, Mapping):
        entries = dict(zip(container.keys(), values, strict=True))
        return _made(kind, (entries,), entries)
    if hasattr(container, "_fields"):
        return kind(*values)
    return _made(kind, (values,), tuple(values) if isinstance(container, tuple) else values)


def _made(kind: type, arguments: tuple[Any, ...], plain: Batch) -> Batch:
    try:
        return kind(*arguments)
    except TypeError:
        return plain


def rows(batch: Batch) -> int:
    """How many rows a batch has; all of its tensors must agree.

    Raises:
        InputError: if they do not, or if there is no tensor.
    """
    sizes = {tuple(tensor.shape[:1]) for tensor in tensors(batch)}
    if len(sizes) != 1 or () in sizes:
        raise InputError(
            "Every tensor of a batch must have its rows in the first dimension; found first "
            f"dimensions {sorted(sizes)}. Give what is not one entry a row (a mask for all, a "
            "weight of classes) to the loss by other means, for example functools.partial."
        )
    return sizes.pop()[0]


def records(batch: Batch, rows_per_record: int) -> int:
    """How many records a batch has.

    Raises:
        InputError: if its rows do not make whole records.
    """
    count = rows(batch)
    if count % rows_per_record:
        raise InputError(
            f"A batch must hold whole records of {rows_per_record} rows; found {count} rows. Fill "
            "up records that have fewer with copies, and mark these in `present`."
        )
    return count // rows_per_record


ALIGNMENT = 64


def between(batch: Batch, start: int, stop: int) -> Batch:
    """The rows from ``start`` to ``stop``, without a copy where their memory is aligned.

    (Matrix kernels round differently where a matrix begins off a boundary.)
    """

    def rows_of(tensor: Tensor) -> Tensor:
        part = tensor[start:stop]
        aligned = part.is_contiguous() and part.data_ptr() % ALIGNMENT == 0
        return part if aligned else part.clone(memory_format=torch.contiguous_format)

    return apply(rows_of, batch)


def take(batch: Batch, index: Tensor) -> Batch:
    """The rows with these indices."""
    return apply(lambda tensor: tensor.index_select(0, index.to(tensor.device)), batch)


def device(batch: Batch) -> torch.device:
    """The device of the first tensor."""
    return next(tensors(batch)).device


def rows_of_records(records: Tensor, rows_per_record: int) -> Tensor:
    """The row indices of these records: record ``i`` owns rows ``i*K .. (i+1)*K - 1``."""
    within = torch.arange(rows_per_record, device=records.device)
    return (records[:, None] * rows_per_record + within).flatten()


def tensors_of(dataset: Dataset[Any]) -> tuple[Tensor, ...]:
    """The tensors of a plain `TensorDataset`, to be indexed at once; of a class of its own none.

    What such a class does to its items would be left out; so would what is not quite a tensor.
    """
    if type(dataset) is not TensorDataset:
        return ()
    return dataset.tensors if all(isinstance(t, Tensor) for t in dataset.tensors) else ()


def columns_of(dataset: Dataset[Any]) -> tuple[Column, ...]:
    """What is indexed at once: the tensors of a plain `TensorDataset`, or the columns of a `RowsDataset`."""
    return dataset.columns if type(dataset) is RowsDataset else tensors_of(dataset)


def flattened(tensor: Tensor) -> Tensor:
    """All numbers of a tensor of any kind, where they can be read as other types: dense, resolved, contiguous."""
    return tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous().reshape(-1)
