"""How good a model is on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpis.errors import InputError
from dpis.gradients import batches
from dpis.training.records import tensors_of

Metric = Callable[[Any, Any], Tensor]
"""``metric(output, target)``: one value a row; they are averaged over all rows."""

ROWS_AT_ONCE = 1024


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest output is the target's class, else 0 (over positions: their share); NaN of a NaN."""
    right = (output.argmax(dim=1) == target).double()
    right = right.masked_fill(
        output.isnan().any(dim=1), torch.nan
    )  # argmax takes it for the largest
    return right.reshape(len(right), -1).mean(1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean over a row's outputs of the squared difference."""
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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; every part as it was, afterwards."""
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before.items():
            part.training = training


def evaluate(module: nn.Module, held_out: HeldOut, device: torch.device) -> dict[str, float]:
    """Every metric over all held-out rows; empty if there is none."""
    totals = dict.fromkeys(held_out.metrics, 0.0)
    rows = 0
    with evaluating(module):
        for batch in _batches(held_out):
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise InputError(
                    f"held-out batches must be (input, ..., target), found {type(batch).__name__}: metrics compare the "
                    "model's output with the target. Leave held_out out and measure the released model yourself"
                )
            require_numbers(batches.tensors(batch))
            *inputs, target = batches.apply(lambda tensor: tensor.to(device), batch)
            output = module(*inputs)
            rows += batches.rows(batch)
            for name, metric in held_out.metrics.items():
                totals[name] += float(metric(output, target).double().sum())
    return {name: total / rows for name, total in totals.items()} if rows else {}


def require_numbers(tensors: Iterable[Tensor]) -> None:
    """No NaN among held-out inputs and targets: a metric would measure that, not the model."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.isnan().any():
            raise InputError(
                "held-out inputs and targets must be numbers, found NaN: remove or impute those records"
            )


def _batches(held_out: HeldOut) -> Iterator[Any]:
    tensors = tensors_of(held_out.dataset)
    if tensors and held_out.collate_fn is None:
        for start in range(0, len(tensors[0]), ROWS_AT_ONCE):
            yield tuple(tensor[start : start + ROWS_AT_ONCE] for tensor in tensors)
        return
    yield from DataLoader(held_out.dataset, batch_size=ROWS_AT_ONCE, collate_fn=held_out.collate_fn)
