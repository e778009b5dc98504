"""Per-example gradients of anything, by ``torch.func``: slower, right, for what no rule covers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import grad

from dpis import batches
from dpis.batches import Batch
from dpis.gradients.rules.rule import widened

# Loss of one record, from the module, a batch of its rows alone, and which of them are present.
RecordLoss = Callable[[nn.Module, Batch, Tensor | None], Tensor]


class SlowGradientsWarning(UserWarning):
    """Some parameters take the slow way; the results are right."""


@dataclass(frozen=True, eq=False)
class SlowGradients:
    """Explicit per-example gradients, ``[records, *shape]``, of some parameters.

    Attributes:
        module: the model.
        loss: the loss of one record.
        parameters: those whose gradients are asked for.
    """

    module: nn.Module
    loss: RecordLoss
    parameters: Mapping[str, Tensor]

    def of(self, batch: Batch, records: int, present: Tensor | None = None) -> dict[str, Tensor]:
        """``vmap(grad(loss))`` where the model allows it, else one record after the other.

        It does not where control flow depends on data, or a function has no batching rule.

        Args:
            batch: the records.
            records: how many there are.
            present: ``[records, rows]``, which rows count; None: all.
        """
        try:
            with warnings.catch_warnings():  # we say ourselves, once, that this way is slow
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return self._vectorised(batch, records, present)
        except (RuntimeError, NotImplementedError, ValueError):
            return self.one_by_one(batch, records, present)

    def _vectorised(self, batch: Batch, records: int, present: Tensor | None) -> dict[str, Tensor]:
        together = _Together(self.module, self.loss)
        frozen = {f"module.{name}": p.detach() for name, p in self.module.named_parameters()}

        def loss_of(values: dict[str, Tensor], own: Tensor, *leaves: Tensor) -> Tensor:
            remaining = iter(leaves)
            record = batches.apply(lambda _: next(remaining), batch)
            replaced = frozen | {f"module.{name}": value for name, value in values.items()}
            return torch.func.functional_call(together, replaced, (record, own))  # type: ignore[no-any-return]

        leaves = [leaf.reshape(records, -1, *leaf.shape[1:]) for leaf in batches.tensors(batch)]
        if present is None:
            present = torch.ones(leaves[0].shape[:2], dtype=torch.bool, device=leaves[0].device)
        in_dims = (None, 0, *[0] * len(leaves))
        every = torch.func.vmap(torch.func.grad(loss_of), in_dims=in_dims, randomness="different")
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {name: widened(g) for name, g in every(values, present, *leaves).items()}

    def one_by_one(
        self, batch: Batch, records: int, present: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Plain autograd on one record after the other: the oracle that cannot be wrong."""
        gradients = list(self.each(batch, records, present))
        return {name: torch.stack([one[name] for one in gradients]) for name in self.parameters}

    def each(
        self, batch: Batch, records: int, present: Tensor | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """The same, one record's gradient at a time."""
        rows_per_record = batches.rows(batch) // records
        for record in torch.arange(records, device=batches.device(batch)):
            own = batches.take(batch, batches.rows_of_records(record[None], rows_per_record))
            rows = None if present is None else present[record][None]
            yield dict(zip(self.parameters, self._of_one(own, rows), strict=True))

    def _of_one(self, record: Batch, present: Tensor | None) -> list[Tensor]:
        wanted = list(self.parameters.values())
        with torch.enable_grad():
            total = self.loss(self.module, record, present)
            unused = not total.requires_grad
            found = [None] * len(wanted) if unused else grad(total, wanted, allow_unused=True)
        known = (
            p.new_zeros(p.shape) if g is None else g for g, p in zip(found, wanted, strict=True)
        )
        return [widened(g.to_dense() if g.is_sparse else g) for g in known]


class _Together(nn.Module):
    """Module and loss as one module, so that ``functional_call`` reaches the parameters."""

    def __init__(self, module: nn.Module, loss: RecordLoss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, record: Batch, present: Tensor) -> Tensor:
        return self.loss(self.module, record, present[None])
