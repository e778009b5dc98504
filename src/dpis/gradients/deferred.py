"""Gradients of single records where somebody else computes the loss and calls backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpis.errors import InputError
from dpis.gradients import batches, guards
from dpis.gradients.engine import Gradients, Weigh
from dpis.gradients.recorder import Forward, Recorder
from dpis.gradients.tape import Tape


@dataclass(eq=False)
class Pass:
    """A forward pass whose losses are not known yet.

    Attributes:
        outputs: what the model returned, with tensors replaced by leaves: detached, and open to gradients.
        rows: how many rows went in.
    """

    outputs: Any
    rows: int
    _recorder: Recorder
    _forward: Forward
    _batch: tuple[Any, Any, Any]
    _watched: list[Tensor]
    _leaves: list[Tensor]

    @property
    def backward_done(self) -> bool:
        """Whether gradients have arrived at any output."""
        return any(leaf.grad is not None for leaf in self._leaves)

    def tape(self, scale: float) -> Tape:
        """The gradients of every record, from those that arrived at the outputs, times ``scale``.

        May be called once: the graph of the forward pass is used up.
        """
        if not self.backward_done:
            raise InputError("no gradient has arrived at the outputs: call loss.backward() first")
        arrived = [
            torch.zeros_like(leaf) if leaf.grad is None else scale * leaf.grad
            for leaf in self._leaves
        ]
        products = [(w * g).sum() for w, g in zip(self._watched, arrived, strict=True)]
        args, kwargs, _ = self._batch
        total = torch.stack([product.float() for product in products]).sum()
        return self._recorder.tape(self._forward, total, (args, kwargs, arrived))


class DeferredGradients:
    """A module that is run now, and asked for gradients of single records after a backward pass.

    Args:
        module: the model. All tensors that go in and come out have one entry a row.
        batch_first: whether rows are their first dimension, or the second.
        check: compare with plain autograd now and then.
    """

    def __init__(self, module: nn.Module, *, batch_first: bool = True, check: bool = True) -> None:
        self.module = guards.checked(module)
        self._row_dim = 0 if batch_first else 1
        self._outputs: Any = None
        self._recorder = Recorder(self.module, self._row_values, 1, check)
        self.parameters = self._recorder.parameters
        if not self.parameters:
            raise InputError("no parameter of the module requires a gradient: nothing to train")

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pass:
        """One forward pass over at least one row."""
        exchanged_args, exchanged_kwargs = self._exchanged((args, dict(kwargs)))
        batch: tuple[Any, Any, Any] = (exchanged_args, exchanged_kwargs, [])
        rows = batches.rows(batch)
        forward = self._recorder.forward(batch)
        watched = [t for t in batches.tensors(self._outputs) if t.requires_grad]
        leaves = {id(t): t.detach().requires_grad_() for t in watched}
        outputs = batches.apply(lambda t: leaves.get(id(t), t), self._outputs)
        self._outputs = None
        own = [leaves[id(t)] for t in watched]
        return Pass(outputs, rows, self._recorder, forward, batch, watched, own)

    def _row_values(self, module: nn.Module, batch: Any) -> Tensor:
        """``Σ <output, direction>`` for every row: the given directions, or any, to learn where the records are."""
        args, kwargs, directions = batch
        args, kwargs = self._exchanged((args, kwargs))
        outputs = self._outputs = module(*args, **kwargs)
        rows = batches.rows(batch)
        open_to_gradients = [t for t in batches.tensors(outputs) if t.requires_grad]
        if not open_to_gradients:
            raise InputError("the model returns no tensor that depends on its trainable parameters")
        values = torch.zeros(rows, device=open_to_gradients[0].device)
        for number, tensor in enumerate(open_to_gradients):
            by_row = self._by_row(tensor, rows).flatten(1)
            if directions:
                direction = self._by_row(directions[number], rows).flatten(1)
            else:
                size = max(1, by_row.shape[1])
                direction = (torch.linspace(0.5, 1.5, size) * (1 + number)).expand(rows, size)
            values = values + (by_row * direction.to(by_row)).sum(1)
        return values

    def _by_row(self, tensor: Tensor, rows: int) -> Tensor:
        """The output with its rows first; where they are is looked up by size."""
        others = (dim for dim in range(tensor.ndim) if dim != self._row_dim)
        for dim in (self._row_dim, *others):
            if dim < tensor.ndim and tensor.shape[dim] == rows:
                return tensor.movedim(dim, 0)
        raise InputError(
            f"every output must have one entry a row: {rows} rows went in, an output of shape {tuple(tensor.shape)} "
            "came out. A model that sums or averages over the batch couples records: the guarantee would not hold"
        )

    def _exchanged(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Where rows are the second dimension, they change places with the first; twice is as before."""
        if self._row_dim == 0:
            return batch
        args, kwargs = batches.apply(lambda t: t.transpose(0, 1) if t.ndim > 1 else t, batch)
        return args, kwargs


class TapedGradients:
    """Tapes of physical batches as if they were one batch: what `Mechanism.release_gradient_of_parts` asks."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)

    def __call__(self, batch: Tape, weigh: Weigh, present: Tensor | None = None) -> Gradients:
        """Norms and weighted sum of the records of one tape."""
        norms = batch.norms()
        places = torch.arange(batch.records, device=norms.device)
        weights = torch.where(norms.isfinite(), weigh(norms, places).to(norms), 0.0)
        return Gradients(norms, batch.weighted_sum(weights))
