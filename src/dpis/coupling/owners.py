"""Which record each row of a tensor is made of, where a loop has turned outputs about: flattened, shifted, picked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpis.errors import CouplingError

BASE = 256
"""Rows are told apart by the digits of their numbers: float32 must tell a digit times a weight from its neighbours."""
CLEAR = 0.05
"""How far a digit may lie from a whole number."""
NOTHING = 0.02
"""A derivative this much smaller than the largest of its record may be cancellation: it is asked again."""
ROUNDS = 5
"""How often rows without an answer are asked."""
UNKNOWN = -1

Outputs = Sequence[tuple[Tensor, int]]
"""Where gradients arrive, and which dimension of each counts records."""


def owners_of(rows: Tensor, outputs: Outputs) -> Tensor:
    """The record of every row of a tensor, by its place in the batch.

    Where autograd's graph shows that entries of one output were moved about and nothing else (reshaped, cut,
    transposed), numbers of records are moved in the same way. Else every row is given a number and asked, by
    derivatives, which outputs it is made of: the entry of an output that has weight ``a`` in row ``m`` alone answers
    ``m * a``. Nothing is assumed about shapes.

    Args:
        rows: made of the outputs, and open to gradients; its first dimension is asked.
        outputs: what it may be made of.

    Returns:
        `UNKNOWN` for a row that no output moves.

    Raises:
        CouplingError: if a row is made of several records.

    Example:
        >>> logits = torch.randn(2, 3, 5, requires_grad=True)
        >>> owners_of(logits[:, 1:].reshape(-1, 5), [(logits, 0)])
        tensor([0, 0, 1, 1])
    """
    moved = _moved_alone(rows, outputs)
    if moved is not None:
        return moved
    generator = torch.Generator().manual_seed(0)
    owners = torch.full((len(rows),), UNKNOWN, device=rows.device)
    if not rows.numel():
        return owners
    for number in range(ROUNDS):
        asked = owners == UNKNOWN
        weights = _weights(rows, generator, everywhere=number > 0)
        weights *= asked.reshape(-1, *[1] * (rows.ndim - 1))
        for row, record in _answers(rows, outputs, weights):
            owners[row] = record
            if not torch.equal(owners[row], record):
                raise CouplingError(MIXED)
        if not bool((asked & (owners != UNKNOWN)).any()):
            break
    return owners


def _moved_alone(rows: Tensor, outputs: Outputs) -> Tensor | None:
    """The same from autograd's graph; None, where it shows anything but moves.

    Features, the last dimension, stay together: one number stands for all of them.
    """
    moves, node = [], rows.grad_fn
    while node is not None and node.name() in _MOVES and len(node.next_functions) == 1:
        moves.append(node)
        node = node.next_functions[0][0]
    leaf = rows if node is None else getattr(node, "variable", None)
    dim = next((dim for output, dim in outputs if output is leaf), None)
    if leaf is None or dim is None or leaf.ndim < 2 or dim == leaf.ndim - 1 or not rows.numel():
        return None
    features, shapes = leaf.shape[-1], [tuple(rows.shape)]
    for node in moves:  # what comes out of one is what goes into the next
        shapes.append(_sizes_before(node, shapes[-1]))
    numbers = torch.arange(leaf.shape[dim], device=leaf.device)
    numbers = numbers.reshape([-1 if d == dim else 1 for d in range(leaf.ndim)])
    numbers = numbers.expand(*leaf.shape[:-1], 1)
    for node, shape in reversed(list(zip(moves, shapes, strict=False))):
        changed = _MOVES[node.name()](numbers, node, shape, features)
        if changed is None:
            return None
        numbers = changed
    by_row = numbers.flatten(1)
    if tuple(numbers.shape) != (*rows.shape[:-1], 1) or bool((by_row != by_row[:, :1]).any()):
        return None
    return by_row[:, 0].contiguous()


def _sizes_before(node: Any, behind: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor that a move was applied to: saved, or those behind it, exchanged where it transposes."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return tuple(node._saved_self_sym_sizes)
    sizes = list(behind)
    if node.name() == "TransposeBackward0":
        one, other = _exchanged(node, len(sizes))
        sizes[one], sizes[other] = sizes[other], sizes[one]
    return tuple(sizes)


def _exchanged(node: Any, ndim: int) -> tuple[int, int]:
    return _signed(node._saved_dim0) % ndim, _signed(node._saved_dim1) % ndim


def _signed(number: int) -> int:
    """Autograd shows negative numbers as if they had no sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _reshaped(numbers: Tensor, node: Any, shape: tuple[int, ...], features: int) -> Tensor | None:
    whole = shape[-1:] == tuple(node._saved_self_sym_sizes[-1:]) == (features,)
    return numbers.reshape(*shape[:-1], 1) if whole else None


def _cut(numbers: Tensor, node: Any, shape: tuple[int, ...], features: int) -> Tensor | None:
    dim = _signed(node._saved_dim) % numbers.ndim
    place = slice(_signed(node._saved_start), _signed(node._saved_end), node._saved_step)
    if dim == numbers.ndim - 1:
        return numbers if range(features)[place] == range(features) else None
    return numbers[(*[slice(None)] * dim, place)]


def _transposed(numbers: Tensor, node: Any, shape: tuple[int, ...], features: int) -> Tensor | None:
    dims = _exchanged(node, numbers.ndim)
    return None if numbers.ndim - 1 in dims else numbers.transpose(*dims)


def _as_they_are(numbers: Tensor, *_: Any) -> Tensor | None:
    return numbers


_MOVES: dict[str, Callable[[Tensor, Any, tuple[int, ...], int], Tensor | None]] = {
    **dict.fromkeys(("CloneBackward0", "AliasBackward0", "ToCopyBackward0"), _as_they_are),
    **dict.fromkeys(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"), _reshaped),
    "SliceBackward0": _cut,
    "TransposeBackward0": _transposed,
}
"""Operations of autograd that move entries about: from numbers before to numbers behind."""


def _weights(rows: Tensor, generator: torch.Generator, *, everywhere: bool) -> Tensor:
    """Numbers between 0.5 and 1.5, for one entry of every row or for all."""
    drawn = 0.5 + torch.rand(rows.shape if everywhere else rows.shape[:1], generator=generator)
    if everywhere or rows.ndim == 1:
        return drawn.to(rows)
    size = max(1, rows.shape[1:].numel())
    places = torch.randint(size, (len(rows), 1), generator=generator).to(rows.device)
    sparse = rows.new_zeros(len(rows), size).scatter_(1, places, drawn.to(rows)[:, None])
    return sparse.reshape(rows.shape)


def _answers(rows: Tensor, outputs: Outputs, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """From every output: numbers of rows, and the record that each is made of."""
    own = _derivatives(rows, outputs, weights)
    found = [_answering(a) for a in own]
    told = [torch.zeros_like(places) for places in found]
    for place, digits in enumerate(_digits(torch.arange(len(rows), device=rows.device))):
        factors = digits.reshape(-1, *[1] * (rows.ndim - 1)).to(weights)
        for i, b in enumerate(_derivatives(rows, outputs, factors * weights)):
            ratios = b.flatten()[found[i]] / own[i].flatten()[found[i]]
            whole = ratios.round()
            if bool(((ratios - whole).abs() > CLEAR).any()):
                raise CouplingError(MIXED)
            told[i] += whole.long() * BASE**place
    for a, places, row in zip(own, found, told, strict=True):
        if bool(((row < 0) | (row >= len(rows))).any()):
            raise CouplingError(MIXED)
        yield row, places // max(1, a.shape[1:].numel())


def _digits(numbers: Tensor) -> Iterator[Tensor]:
    while True:
        yield numbers % BASE
        numbers = numbers // BASE
        if not bool(numbers.any()):
            return


def _derivatives(rows: Tensor, outputs: Outputs, direction: Tensor) -> list[Tensor]:
    """Of ``<rows, direction>``, for every output that the rows depend on, records first."""
    leaves = [leaf for leaf, _ in outputs]
    found = torch.autograd.grad(rows, leaves, direction, retain_graph=True, allow_unused=True)
    return [
        g.movedim(dim, 0).contiguous()
        for g, (_, dim) in zip(found, outputs, strict=True)
        if g is not None and g.numel()
    ]


def _answering(derivatives: Tensor) -> Tensor:
    """The places, counted through, of entries with an answer; what is not finite has none, and no gradient either."""
    sizes = derivatives.abs().flatten(1) if derivatives.ndim > 1 else derivatives.abs()[:, None]
    largest = sizes.nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True)
    return ((sizes > NOTHING * largest) & sizes.isfinite()).flatten().nonzero()[:, 0]


MIXED = (
    "The loss couples records: a row that it is made of depends on the outputs of several records (negatives from the "
    "same batch, a mixture of rows), so no mean over a record's own terms can be taken. A record's influence would "
    "pass through the gradients of others, which are clipped by themselves: the privacy guarantee would not hold. Give "
    "every row a loss of its own (reduction='none'), and take their mean"
)
