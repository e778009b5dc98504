"""Gradients of single records where somebody else computes the loss and calls backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dpis import batches
from dpis.coupling.agreement import without_dropout
from dpis.coupling.forbidden_layers import checked_model
from dpis.coupling.padding_trials import Inputs, directions_of_both
from dpis.errors import InputError
from dpis.gradients.parts import without_overlap
from dpis.gradients.recorder import Recorder, WatchedPass
from dpis.gradients.tape import Tape, full_precision

if TYPE_CHECKING:
    from dpis.gradients.sharded_sums import ShardedSums
from dpis.group import Group

NOTHING_TO_TRAIN = "the model returns no tensor that depends on its trainable parameters"


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass whose losses are not known yet.

    Attributes:
        outputs: what the model returned, with tensors replaced by leaves: detached, and open to gradients.
        rows: how many rows went in.
        leaves: the outputs that gradients arrive at, and which dimension of each counts rows.
        inputs: what the model was called with, rows first.
        precision: the autocast in which it was run, for once more.
        kinds: the types of numbers that the model returned; leaves are float32 at least.
    """

    outputs: Any
    rows: int
    leaves: list[tuple[Tensor, int]]
    inputs: Inputs
    precision: Callable[[], torch.autocast]
    kinds: frozenset[torch.dtype]
    _forward: WatchedPass[Any]

    @property
    def backward_done(self) -> bool:
        """Whether gradients have arrived at any output."""
        return any(leaf.grad is not None for leaf, _ in self.leaves)

    @property
    def blank(self) -> Any:
        """Outputs without any rows, of the shapes that these have."""
        dims = {id(leaf): dim for leaf, dim in self.leaves}

        def without_rows(tensor: Tensor) -> Tensor:
            known = id(tensor) in dims
            return tensor.detach().narrow(dims[id(tensor)], 0, 0).clone() if known else tensor

        return batches.apply(without_rows, self.outputs)


class _Growing(NamedTuple):
    """Of an output: the dimension that counts rows, and how many dimensions there are."""

    dim: int
    dimensions: int


class DeferredGradients:
    """A module that is run now, and asked for per-example gradients after a backward pass.

    Args:
        module: the model. All tensors that go in and come out have one entry a row.
        batch_first: whether rows are their first dimension, or the second.
        check: compare with plain autograd now and then.
    """

    def __init__(self, module: nn.Module, *, batch_first: bool = True, check: bool = True) -> None:
        self.module = checked_model(module)
        self.row_dim = 0 if batch_first else 1
        self._output_dims: list[_Growing | None] | None = None
        self._recorder = Recorder(self.module, self._row_values, 1, check)
        self.parameters = self._recorder.parameters
        if not self.parameters:
            raise InputError("no parameter of the module requires a gradient: nothing to train")

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pass:
        """One forward pass. For no rows a row of zeros is run, which weighs nothing: ranks run equally many passes."""
        inputs = self._exchanged((args, dict(kwargs)))
        own = rows = batches.rows(inputs)
        if not own:
            inputs, rows = batches.apply(_one_of_zeros, inputs), 1
            args, kwargs = self._exchanged(inputs)
        if self._output_dims is None:
            self._output_dims = self._dims_that_grow(inputs, rows)
        real = None if own else 0
        forward = self._recorder.forward((*inputs, []), lambda: self.module(*args, **kwargs), real)
        watched = _open_to_gradients(forward.outputs)
        if not watched:
            raise InputError(NOTHING_TO_TRAIN)
        by_row = self._with_rows(watched, rows)
        leaves = {
            id(t): _full(b.detach()).requires_grad_() for t, b in zip(watched, by_row, strict=True)
        }
        device = batches.device(inputs).type
        dims = [self._dim_of_rows(leaf, rows, i) for i, leaf in enumerate(leaves.values())]
        shown = {
            key: leaf if own else leaf.narrow(dim, 0, 0)
            for (key, leaf), dim in zip(leaves.items(), dims, strict=True)
        }
        return Pass(
            outputs=batches.apply(lambda t: shown.get(id(t), t), forward.outputs),
            rows=own,
            leaves=list(zip(leaves.values(), dims, strict=True)),
            inputs=inputs,
            precision=partial(
                torch.autocast,
                device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
            ),
            kinds=frozenset(t.dtype for t in watched),
            _forward=forward,
        )

    def tape(self, passed: Pass, scale: float) -> Tape:
        """The gradients of every record, from those that arrived at the outputs, times ``scale``.

        May be called once for a pass: the graph of the forward pass is used up.
        """
        if passed.rows and not passed.backward_done:
            raise InputError("no gradient has arrived at the outputs: call loss.backward() first")
        arrived = [
            torch.zeros_like(leaf) if leaf.grad is None else scale * leaf.grad
            for leaf, _ in passed.leaves
        ]
        watched = _open_to_gradients(passed._forward.outputs)
        products = [(w * g).sum() for w, g in zip(watched, arrived, strict=True)]
        total = torch.stack([product.float() for product in products]).sum()
        directions = [g.movedim(d, 0) for g, (_, d) in zip(arrived, passed.leaves, strict=True)]
        return self._recorder.tape(passed._forward, total, (*passed.inputs, directions))

    @property
    def ranks(self) -> Group:
        """The processes that hold the slices of a sharded model; of any other this one alone."""
        return self._recorder.sharding.ranks

    @property
    def sharded_sums(self) -> ShardedSums | None:
        """How sums of a sharded model lie on these processes; None of any other."""
        return self._recorder.sharding.sums

    def undisturbed(self) -> AbstractContextManager[None]:
        """To look around with the model leaves no trace: neither in the random stream nor in the buffers."""
        return self._recorder.undisturbed()

    def agree(self, passed: Pass, row: int, padded: Inputs, alone: Inputs) -> bool:
        """Whether a row has the same outputs and gradients, padded or not, wherever the loss looked at its outputs.

        Args:
            passed: whose loss it was; gradients have arrived.
            row: in that pass.
            padded: the inputs of that row as it was run, as a batch of some copies, rows first.
            alone: the same, not padded.

        Raises:
            InputError: the model is sharded, and cannot be run on a row of one rank.
        """
        if self._recorder.sharding.is_sharded:
            raise InputError("a sharded model is run by all ranks together, not on a row of one")
        with passed.precision(), self._recorder.undisturbed(), without_dropout(self.module):
            forms = list(zip(self._outputs_of(padded), self._outputs_of(alone), strict=True))
        for number, (leaf, dim) in enumerate(passed.leaves):
            if leaf.grad is None:
                continue
            looked = leaf.grad.movedim(dim, 0)[row] != 0
            with passed.precision():
                if not any(
                    self._recorder.gradients_agree((*padded, one), (*alone, other))
                    for one, other in directions_of_both(forms, number, looked)
                ):
                    return False
        return True

    def _outputs_of(self, inputs: Inputs) -> list[Tensor]:
        """What comes out and is open to gradients, rows first."""
        args, kwargs = self._exchanged(inputs)
        with torch.enable_grad():
            outputs = _open_to_gradients(self.module(*args, **kwargs))
        rows = batches.rows(inputs)
        opened = enumerate(self._with_rows(outputs, rows))
        return [t.detach().movedim(self._dim_of_rows(t, rows, i), 0) for i, t in opened]

    def _row_values(self, module: nn.Module, batch: Any) -> Tensor:
        """``Σ <output, direction>`` for every row: the given directions, or any, to learn where the records are."""
        *inputs, directions = batch
        args, kwargs = self._exchanged((inputs[0], inputs[1]))
        rows = batches.rows(inputs)
        opened = _open_to_gradients(module(*args, **kwargs))
        if not opened:
            raise InputError(NOTHING_TO_TRAIN)
        values = torch.zeros(rows, device=opened[0].device)
        for number, tensor in enumerate(self._with_rows(opened, rows)):
            by_row = tensor.movedim(self._dim_of_rows(tensor, rows, number), 0).reshape(rows, -1)
            if directions:
                direction = directions[number].reshape(rows, -1)
            else:
                size = max(1, by_row.shape[1])
                direction = (torch.linspace(0.5, 1.5, size) * (1 + number)).expand(rows, size)
            values = values + (by_row * direction.to(by_row)).sum(1)
        return values

    def _dims_that_grow(self, inputs: Inputs, rows: int) -> list[_Growing | None]:
        """For every output, what grows from two rows to three: sizes alone may agree by chance."""

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
        growing = known[number] if number < len(known) else None
        likely = self.row_dim if growing is None else growing.dim
        others = (dim for dim in range(tensor.ndim) if dim != self.row_dim)
        for dim in (likely, self.row_dim, *others):
            if dim < tensor.ndim and tensor.shape[dim] == rows:
                return dim
        raise InputError(
            f"every output must have one entry a row: {rows} rows went in, an output of shape {tuple(tensor.shape)} "
            "came out. A model that sums or averages over the batch (one that computes its loss, too) couples "
            "records: the guarantee would not hold. Return one entry a row and compute the loss in the loop; a model "
            "that computes its loss from labels is called without them"
        )

    def _with_rows(self, outputs: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The outputs, of which ``squeeze()`` took the dimension of rows where there is one row."""
        known = [*(self._output_dims or []), *[None] * len(outputs)]
        return [
            tensor.unsqueeze(growing.dim)
            if rows == 1 and growing is not None and tensor.ndim == growing.dimensions - 1
            else tensor
            for tensor, growing in zip(outputs, known, strict=False)
        ]

    def _exchanged(self, inputs: Inputs) -> Inputs:
        """Where rows are the second dimension, they change places with the first; twice is as before."""
        if self.row_dim == 0:
            return inputs
        args, kwargs = batches.apply(lambda t: t.transpose(0, 1) if t.ndim > 1 else t, inputs)
        return args, kwargs


def joined(tapes: Sequence[Tape]) -> Tape:
    """Several passes over the same records as one: clipped is the sum of a record's gradients in all of them."""
    first, *others = tapes
    if not others:
        return first
    with torch.no_grad(), full_precision(next(iter(first.parameters.values())).device):
        parts = {
            name: without_overlap([part for tape in tapes for part in tape.parts[name]], parameter)
            for name, parameter in first.parameters.items()
        }
    return Tape(first.parameters, parts, first.records)


def _full(tensor: Tensor) -> Tensor:
    """In float32 at least: a loss is not rounded to half precision on its way to the model."""
    halved = tensor.is_floating_point() and tensor.element_size() < torch.float32.itemsize
    return tensor.float() if halved else tensor


def _one_of_zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros([size or 1 for size in tensor.shape])


def _open_to_gradients(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in batches.tensors(outputs) if tensor.requires_grad]


def _grown(two: torch.Size, three: torch.Size) -> _Growing | None:
    if len(two) != len(three):
        return None
    grown = [dim for dim, (a, b) in enumerate(zip(two, three, strict=True)) if (a, b) == (2, 3)]
    return _Growing(grown[0], len(two)) if grown else None
