"""Gradients of single records where somebody else computes the loss and calls backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpis.errors import InputError
from dpis.gradients import batches, guards
from dpis.gradients.engine import Gradients, Weigh
from dpis.gradients.recorder import Forward, Recorder
from dpis.gradients.selfcheck import without_dropout
from dpis.gradients.tape import Tape

Inputs = tuple[Any, Any]
"""What a module is called with: ``(args, kwargs)``."""


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
    _inputs: Inputs
    _watched: list[Tensor]
    _leaves: list[Tensor]
    _dim_of_rows: Callable[[Tensor, int, int], int]

    @property
    def backward_done(self) -> bool:
        """Whether gradients have arrived at any output."""
        return any(self.used)

    @property
    def used(self) -> list[bool]:
        """Of every output that is open to gradients, whether any have arrived."""
        return [leaf.grad is not None for leaf in self._leaves]

    @property
    def leaves(self) -> list[tuple[Tensor, int]]:
        """The outputs that gradients arrive at, and which dimension of each counts rows."""
        numbered = enumerate(self._leaves)
        return [(leaf, self._dim_of_rows(leaf, self.rows, number)) for number, leaf in numbered]

    @property
    def blank(self) -> Any:
        """Outputs without any rows, of the shapes that these have."""
        dims = {id(leaf): dim for leaf, dim in self.leaves}

        def without_rows(tensor: Tensor) -> Tensor:
            known = id(tensor) in dims
            return tensor.detach().narrow(dims[id(tensor)], 0, 0).clone() if known else tensor

        return batches.apply(without_rows, self.outputs)

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
        total = torch.stack([product.float() for product in products]).sum()
        directions = [g.movedim(d, 0) for g, (_, d) in zip(arrived, self.leaves, strict=True)]
        return self._recorder.tape(self._forward, total, (*self._inputs, directions))


class DeferredGradients:
    """A module that is run now, and asked for gradients of single records after a backward pass.

    Args:
        module: the model. All tensors that go in and come out have one entry a row.
        batch_first: whether rows are their first dimension, or the second.
        check: compare with plain autograd now and then.
    """

    def __init__(self, module: nn.Module, *, batch_first: bool = True, check: bool = True) -> None:
        self.module = guards.checked(module)
        self.row_dim = 0 if batch_first else 1
        self._output_dims: list[int | None] | None = None
        self._outputs: Any = None
        self._recorder = Recorder(self.module, self._row_values, 1, check)
        self.parameters = self._recorder.parameters
        if not self.parameters:
            raise InputError("no parameter of the module requires a gradient: nothing to train")

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pass:
        """One forward pass over at least one row."""
        inputs = self._exchanged((args, dict(kwargs)))
        rows = batches.rows(inputs)
        if self._output_dims is None:
            self._output_dims = self._dims_that_grow(inputs, rows)
        forward = self._recorder.forward((*inputs, []))
        watched = _open_to_gradients(self._outputs)
        leaves = {id(t): t.detach().requires_grad_() for t in watched}
        outputs = batches.apply(lambda t: leaves.get(id(t), t), self._outputs)
        self._outputs = None
        own = [leaves[id(t)] for t in watched]
        return Pass(outputs, rows, self._recorder, forward, inputs, watched, own, self._dim_of_rows)

    def agree(self, one: Inputs, other: Inputs, used: Sequence[bool]) -> bool:
        """Whether inputs of as many rows have the same outputs and gradients, as far as outputs have common positions.

        The same rows padded otherwise, say: positions are counted from the first on, or from the last back.

        Args:
            one: ``(args, kwargs)``, rows first.
            other: the same.
            used: which outputs count, as `Pass.used` says it.
        """
        with self._recorder.undisturbed(), without_dropout(self.module):
            outputs = list(zip(self._outputs_of(one), self._outputs_of(other), strict=True))

        def directions(order: int, at_end: bool) -> list[Tensor]:
            pairs = [pair[::order] for pair in outputs]
            return [
                _direction(own, common=another.shape, at_end=at_end) * counts
                for (own, another), counts in zip(pairs, used, strict=True)
            ]

        return any(
            self._recorder.gradients_agree(
                (*one, directions(1, at_end)), (*other, directions(-1, at_end))
            )
            for at_end in (False, True)
        )

    def _outputs_of(self, inputs: Inputs) -> list[Tensor]:
        """What comes out and is open to gradients, rows first."""
        args, kwargs = self._exchanged(inputs)
        with torch.enable_grad():
            opened = enumerate(_open_to_gradients(self.module(*args, **kwargs)))
        rows = batches.rows(inputs)
        return [t.detach().movedim(self._dim_of_rows(t, rows, i), 0) for i, t in opened]

    def _row_values(self, module: nn.Module, batch: Any) -> Tensor:
        """``Σ <output, direction>`` for every row: the given directions, or any, to learn where the records are."""
        *inputs, directions = batch
        args, kwargs = self._exchanged((inputs[0], inputs[1]))
        outputs = self._outputs = module(*args, **kwargs)
        rows = batches.rows(inputs)
        opened = _open_to_gradients(outputs)
        if not opened:
            raise InputError("the model returns no tensor that depends on its trainable parameters")
        values = torch.zeros(rows, device=opened[0].device)
        for number, tensor in enumerate(opened):
            by_row = tensor.movedim(self._dim_of_rows(tensor, rows, number), 0).flatten(1)
            if directions:
                direction = directions[number].flatten(1)
            else:
                size = max(1, by_row.shape[1])
                direction = (torch.linspace(0.5, 1.5, size) * (1 + number)).expand(rows, size)
            values = values + (by_row * direction.to(by_row)).sum(1)
        return values

    def _dims_that_grow(self, inputs: Inputs, rows: int) -> list[int | None]:
        """For every output, the dimension that grows from two rows to three: sizes alone may agree by chance."""

        def sizes(count: int) -> list[torch.Size]:
            index = torch.arange(count, device=batches.device(inputs)) % rows
            args, kwargs = self._exchanged(batches.take(inputs, index))
            with torch.enable_grad():
                return [t.shape for t in _open_to_gradients(self.module(*args, **kwargs))]

        with self._recorder.undisturbed():
            two, three = sizes(2), sizes(3)
        if len(two) != len(three):
            return []
        return [_grown(a, b) for a, b in zip(two, three, strict=True)]

    def _dim_of_rows(self, tensor: Tensor, rows: int, number: int) -> int:
        """Which dimension of an output counts rows."""
        known = self._output_dims or []
        likely = known[number] if number < len(known) else None
        others = (dim for dim in range(tensor.ndim) if dim != self.row_dim)
        for dim in (likely, self.row_dim, *others):
            if dim is not None and dim < tensor.ndim and tensor.shape[dim] == rows:
                return dim
        raise InputError(
            f"every output must have one entry a row: {rows} rows went in, an output of shape {tuple(tensor.shape)} "
            "came out. A model that sums or averages over the batch (one that computes its loss, too) couples "
            "records: the guarantee would not hold. Return one entry a row and compute the loss in the loop"
        )

    def _exchanged(self, inputs: Inputs) -> Inputs:
        """Where rows are the second dimension, they change places with the first; twice is as before."""
        if self.row_dim == 0:
            return inputs
        args, kwargs = batches.apply(lambda t: t.transpose(0, 1) if t.ndim > 1 else t, inputs)
        return args, kwargs


class TapedGradients:
    """Tapes of physical batches as if they were one batch: what a `GradientSum` asks."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)

    def __call__(self, batch: Tape, weigh: Weigh, present: Tensor | None = None) -> Gradients:
        """Norms and weighted sum of the records of one tape."""
        norms = batch.norms()
        places = torch.arange(batch.records, device=norms.device)
        weights = torch.where(norms.isfinite(), weigh(norms, places).to(norms), 0.0)
        return Gradients(norms, batch.weighted_sum(weights))


def _open_to_gradients(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in batches.tensors(outputs) if tensor.requires_grad]


def _direction(output: Tensor, *, common: torch.Size, at_end: bool) -> Tensor:
    """Where two outputs have common positions, other than zero: it follows the output, so that a shift of it shows."""
    direction = torch.zeros_like(output)
    part, values = direction, output
    for dim, sizes in enumerate(zip(output.shape, common, strict=True)):
        start = output.shape[dim] - min(sizes) if at_end else 0
        part, values = (t.narrow(dim, start, min(sizes)) for t in (part, values))
    weights = torch.linspace(0.5, 1.5, part.numel()).reshape(part.shape).to(part)
    part.copy_(weights + values)
    return direction


def _grown(two: torch.Size, three: torch.Size) -> int | None:
    if len(two) != len(three):
        return None
    grown = [dim for dim, (a, b) in enumerate(zip(two, three, strict=True)) if (a, b) == (2, 3)]
    return grown[0] if grown else None
