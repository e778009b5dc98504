"""Per-record gradients of anything, by ``torch.func``: slower, right, for what no rule covers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dpis import batches
from dpis.batches import Batch
from dpis.gradients.rules.rule import HALF

# Loss of one record, from the module, a batch of its rows alone, and which of them are present.
RecordLoss = Callable[[nn.Module, Batch, Tensor | None], Tensor]


class SlowGradientsWarning(UserWarning):
    """Some parameters take the slow way; the results are right."""


def per_record_gradients(
    module: nn.Module,
    loss: RecordLoss,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    records: int,
    present: Tensor | None = None,
) -> dict[str, Tensor]:
    """Explicit gradients, ``[records, *shape]``, of some parameters.

    ``vmap(grad(loss))`` where the model allows it; else (data-dependent control flow, functions
    without a batching rule) one record after the other.
    """
    try:
        with warnings.catch_warnings():  # we say ourselves, once, that this way is slow
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return _vectorised(module, loss, parameters, batch, records, present)
    except (RuntimeError, NotImplementedError, ValueError):
        return one_by_one(module, loss, parameters, batch, records, present)


def _vectorised(
    module: nn.Module,
    loss: RecordLoss,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    records: int,
    present: Tensor | None = None,
) -> dict[str, Tensor]:
    together = _Together(module, loss)
    frozen = {f"module.{name}": p.detach() for name, p in module.named_parameters()}

    def loss_of(values: dict[str, Tensor], own: Tensor, *leaves: Tensor) -> Tensor:
        remaining = iter(leaves)
        record = batches.apply(lambda _: next(remaining), batch)
        replaced = frozen | {f"module.{name}": value for name, value in values.items()}
        return torch.func.functional_call(together, replaced, (record, own))  # type: ignore[no-any-return]

    leaves = [_rows_of_each(leaf, records) for leaf in batches.tensors(batch)]
    rows_per_record = batches.rows(batch) // records
    if present is None:
        present = torch.ones(records, rows_per_record, dtype=torch.bool, device=leaves[0].device)
    in_dims = (None, 0, *[0] * len(leaves))
    gradient = torch.func.vmap(torch.func.grad(loss_of), in_dims=in_dims, randomness="different")
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    return {name: _wide(g) for name, g in gradient(values, present, *leaves).items()}


def one_by_one(
    module: nn.Module,
    loss: RecordLoss,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    records: int,
    present: Tensor | None = None,
) -> dict[str, Tensor]:
    """Plain autograd on one record after the other: the oracle that cannot be wrong."""
    rows_per_record = batches.rows(batch) // records
    names, wanted = list(parameters), list(parameters.values())
    per_record = []
    for record in torch.arange(records, device=batches.device(batch)):
        own = batches.take(batch, batches.rows_of_records(record[None], rows_per_record))
        with torch.enable_grad():
            rows = None if present is None else present[record][None]
            total = loss(module, own, rows)
            if not total.requires_grad:
                per_record.append([_wide(torch.zeros_like(p)) for p in wanted])
                continue
            gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        per_record.append([_or_zero(g, p) for g, p in zip(gradients, wanted, strict=True)])
    columns = zip(*per_record, strict=True)
    return {name: torch.stack(column) for name, column in zip(names, columns, strict=True)}


class _Together(nn.Module):
    """Module and loss as one module, so that ``functional_call`` reaches the parameters."""

    def __init__(self, module: nn.Module, loss: RecordLoss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, record: Batch, present: Tensor) -> Tensor:
        return self.loss(self.module, record, present[None])


def _rows_of_each(leaf: Tensor, records: int) -> Tensor:
    return leaf.reshape(records, -1, *leaf.shape[1:])


def _or_zero(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return _wide(torch.zeros_like(parameter))
    return _wide(gradient.to_dense() if gradient.is_sparse else gradient)


def _wide(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in HALF else gradient
