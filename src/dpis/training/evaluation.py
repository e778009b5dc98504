"""How good a model is on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpis import batches
from dpis.batches import columns_of
from dpis.errors import InputError
from dpis.gradients.sharding import free_gathered
from dpis.stored_rows import StoredRows, blocks_of, rows_at_once

Metric = Callable[[Any, Any], Tensor]
"""``metric(output, target)``: one value a row; they are averaged over all rows."""

ROWS_AT_ONCE = 1024


IGNORED = -100
"""The class of positions that do not count, by default: PyTorch's."""


def correct(output: Tensor, target: Tensor, ignored: int = IGNORED) -> Tensor:
    """1 where the largest output is the class, else 0 (over positions that count: their share); NaN of a NaN."""
    largest = output.argmax(dim=1)
    if largest.shape != target.shape:
        raise InputError(
            f"accuracy needs one class a row or position, targets of the shape {list(largest.shape)}; found "
            f"{list(target.shape)}. Reshape the held-out targets, or give metrics={{name: metric(output, target)}}"
        )
    right = (largest == target).double()
    right = right.masked_fill(
        output.isnan().any(dim=1), torch.nan
    )  # argmax takes it for the largest
    counts = (target.long() != ignored).reshape(len(target), -1)  # in a byte -100 would be 156
    if not counts.any(1).all():
        raise InputError(
            f"in some held-out rows every target is {ignored}, which the loss ignores: there is nothing to measure. "
            "Remove those rows"
        )
    right = right.reshape(len(right), -1).where(counts, 0.0)
    return right.sum(1) / counts.sum(1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean over a row's outputs of the squared difference."""
    if output.numel() != target.numel():
        raise InputError(
            f"as many targets as outputs are needed, of the shape {list(output.shape)}; found {list(target.shape)}"
        )
    difference = output.double().reshape(target.shape) - target.double()
    return difference.square().reshape(len(target), -1).mean(1)


METRICS: dict[str, Metric] = {"accuracy": correct, "squared_error": squared_error}


def metrics_of(task: str) -> dict[str, Metric]:
    """What tells how well a model does in a classification or a regression."""
    name = "accuracy" if task == "classification" else "squared_error"
    return {name: METRICS[name]}


@dataclass(frozen=True)
class HeldOut:
    """Data that takes no part in training, and is not protected.

    Attributes:
        dataset: gives ``(input, ..., target)``.
        metrics: by name; averaged over rows.
        collate_fn: None: torch's default.
    """

    dataset: Dataset[Any]
    metrics: Mapping[str, Metric]
    collate_fn: Callable[[list[Any]], Any] | None = None

    def require_more(self) -> None:
        """After it was read: that it can be read again."""
        if isinstance(self.dataset, IterableDataset) and next(iter(self.dataset), None) is None:
            raise InputError(
                "held-out data is measured before training and after every epoch, and this stream came to its end: one "
                "that can be read once only will not do. Read it into a list first"
            )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; every part as it was, afterwards."""
    before = {part: part.training for part in module.modules()}
    free_gathered(module)
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before.items():
            part.training = training
        free_gathered(module)


@dataclass(frozen=True)
class Evaluation:
    """What was measured, by name, and on how many rows; nothing on none."""

    metrics: dict[str, float]
    rows: int

    def require_rows_of(self, first: Evaluation) -> None:
        """That this one read what the first one did: figures of other records cannot be compared."""
        if self.rows != first.rows:
            raise InputError(
                f"held-out data had {first.rows:,} rows before training and {self.rows:,} now: a stream that goes on "
                "between two readings measures other records every time. Read it into a list first"
            )


def evaluate(
    module: nn.Module,
    held_out: HeldOut,
    device: torch.device,
    see: Callable[[Any], object] = lambda batch: None,
) -> Evaluation:
    """Every metric over all held-out rows.

    Args:
        module: what is measured.
        held_out: on what.
        device: where.
        see: is shown every batch before anything else.
    """
    totals = dict.fromkeys(held_out.metrics, 0.0)
    rows = 0
    with evaluating(module):
        for batch in _batches(held_out):
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise InputError(
                    f"held-out batches must be (input, ..., target), found {type(batch).__name__}: metrics compare the "
                    "model's output with the target. Leave held_out out and measure the released model yourself"
                )
            see(batch)
            require_numbers(batches.tensors(batch))
            *inputs, target = batches.apply(lambda tensor: tensor.to(device), batch)
            output = module(*inputs)
            here = batches.rows(batch)
            for name, metric in held_out.metrics.items():
                values = metric(output, target)
                _require_one_a_row(name, values, here)
                totals[name] += float(values.double().sum())
            rows += here
    return Evaluation({name: total / rows for name, total in totals.items()} if rows else {}, rows)


def _require_one_a_row(name: str, values: object, rows: int) -> None:
    """A mean over the batch would be divided by the rows once more; a comparison may have broadcast."""
    if not isinstance(values, Tensor) or values.numel() != rows:
        found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"the metric {name!r} must give one value a row, {rows} in all, found {found}: leave out the mean, and "
            "compare tensors of one shape"
        )


def require_numbers(tensors: Iterable[Tensor]) -> None:
    """No NaN among held-out inputs and targets: a metric would measure that, not the model."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.isnan().any():
            raise InputError(
                "held-out inputs and targets must be numbers, found NaN: remove or impute those records"
            )


def _batches(held_out: HeldOut) -> Iterator[Any]:
    dataset = held_out.dataset
    if held_out.collate_fn is None and (columns := columns_of(dataset)):
        stored = [
            rows_at_once(column.shape) for column in columns if isinstance(column, StoredRows)
        ]
        at_once = min([ROWS_AT_ONCE, *stored])
        yield from zip(*(blocks_of(column, at_once) for column in columns), strict=True)
        return
    yield from DataLoader(held_out.dataset, batch_size=ROWS_AT_ONCE, collate_fn=held_out.collate_fn)
