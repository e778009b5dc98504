"""Rows of outputs that a loop picks or turns about: whose they are, and what may be made of them.

How many rows a mask picks is a number of the whole batch. A sum of picked rows is harmless; a mean over them divides by
that number, so every record's gradient would depend on the others. Rows that change places meet the targets of others.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpis.errors import CouplingError

Function = Callable[..., Any]

_TURNS: frozenset[Function] = frozenset(
    {torch.roll, Tensor.roll, torch.flip, Tensor.flip, torch.flipud, Tensor.flipud}
)
_ALONG_A_DIMENSION: frozenset[Function] = frozenset(
    {torch.index_select, Tensor.index_select, torch.gather, Tensor.gather}
)
_SPLITS: frozenset[Function] = frozenset(
    {torch.split, Tensor.split, torch.chunk, Tensor.chunk, torch.tensor_split, Tensor.tensor_split}
)
_BY_A_MASK: frozenset[Function] = frozenset({torch.masked_select, Tensor.masked_select})
_MEANS: frozenset[Function] = frozenset({torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean})
_SUMS: frozenset[Function] = frozenset({torch.sum, Tensor.sum, torch.nansum, Tensor.nansum})
_BROUGHT_BACK: frozenset[Function] = frozenset(
    {torch.index_add, Tensor.index_add, Tensor.index_add_, torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_,
     torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_}
)  # fmt: skip
"""Picked rows added up where they belong, in a tensor of all."""
MOVES: frozenset[Function] = (
    _TURNS | _ALONG_A_DIMENSION | _BY_A_MASK | _SPLITS | {Tensor.__getitem__}
)
"""What may pick rows, or turn them about."""


class PickedRows:
    """What is known of the rows that were picked from the outputs of one batch.

    Args:
        records: of the batch.
        owners: the record of every row of a tensor.
    """

    def __init__(self, records: int, owners: Callable[[Tensor], Tensor]) -> None:
        self._records, self._owners = records, owners
        self._picked: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    @property
    def any(self) -> bool:
        """Whether rows were picked."""
        return bool(self._picked)

    def __contains__(self, tensor: object) -> bool:
        return bool(self._picked) and isinstance(tensor, Tensor) and tensor in self._picked

    def follow(
        self, function: Function, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A call that has happened, to a tensor made of the outputs.

        Raises:
            CouplingError: if rows changed places, or a mean was taken over those that were picked.
        """
        moves = function in MOVES and isinstance(result, Tensor) and result.requires_grad
        if moves and _crosses_rows(function, args, kwargs):
            self._move(function, args, kwargs, result)
        if function in _SPLITS and len(result) > 1 and args[0].requires_grad:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            if dim in (0, -args[0].ndim) and self._owners_or_none(args[0]) is not None:
                for part in result:
                    self._picked[part] = True
            return
        if not self._picked or function in _BROUGHT_BACK:
            return
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        several = [t for some in args if isinstance(some, list | tuple) for t in some]
        if not any(t in self._picked for t in (*given, *several) if isinstance(t, Tensor)):
            return
        made = result if isinstance(result, tuple | list) else (result,)
        for tensor in made:
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            if _is_mean(function, args, kwargs, tensor):
                raise CouplingError(_MEAN)
            if tensor.ndim:
                self._picked[tensor] = True

    def _move(
        self, function: Function, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """The numbers of rows are moved as the rows were."""
        rows: Tensor = args[0]
        if not rows.requires_grad or not rows.ndim or not result.ndim or not result.numel():
            return
        before = self._owners_or_none(rows)
        if before is None:
            return
        numbers = torch.arange(len(rows), device=rows.device)
        numbers = numbers.reshape(-1, *[1] * (rows.ndim - 1)).expand(rows.shape)
        after = function(numbers, *args[1:], **kwargs).reshape(len(result), -1)
        places = after[:, 0]
        if bool((after != places[:, None]).any()):
            return  # the first dimension does not count rows
        owners = before[places]
        in_order = bool((places[1:] >= places[:-1]).all())
        if not in_order and not torch.equal(owners, before):
            raise CouplingError(_TURNED)
        counts = torch.bincount(owners[owners >= 0], minlength=self._records)
        if bool((counts != counts[:1]).any()):
            by_place = function is Tensor.__getitem__ and isinstance(_first_index(args), slice)
            if by_place and int((counts > 0).sum()) > 1:  # of one: a loop over records
                raise CouplingError(_BY_PLACE)
            self._picked[result] = True

    def _owners_or_none(self, rows: Tensor) -> Tensor | None:
        """None, where rows are made of several records: the loss is looked at for that."""
        try:
            return self._owners(rows)
        except CouplingError:
            return None


def _crosses_rows(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a move may pick or turn entries of the first dimension, as far as its arguments tell."""
    rows: Tensor = args[0]
    if function in _BY_A_MASK or function in (torch.flipud, Tensor.flipud):
        return True
    if function in _ALONG_A_DIMENSION:
        dim = kwargs["dim"] if "dim" in kwargs else args[1]
        return dim in (0, -rows.ndim)
    if function in _TURNS:
        place = 2 if function in (torch.roll, Tensor.roll) else 1
        dims = kwargs.get("dims", args[place:])
        flat = [d for given in ([dims] if isinstance(dims, int) else dims)
                for d in ([given] if isinstance(given, int) else given)]  # fmt: skip
        return not flat or any(d in (0, -rows.ndim) for d in flat)
    if function in _SPLITS:
        return False
    first = _first_index(args)
    if isinstance(first, slice):
        return len(range(len(rows))[first]) < len(rows)
    if isinstance(first, Tensor) and first.dtype not in (torch.bool, torch.uint8) and first.ndim:
        places = torch.arange(len(rows), device=first.device)
        return first.shape != places.shape or not torch.equal(first, places.to(first))
    return isinstance(first, list) or (isinstance(first, Tensor) and first.ndim > 0)


def _first_index(args: Sequence[Any]) -> Any:
    index = args[1]
    return index[0] if isinstance(index, tuple) and index else index


def _is_mean(
    function: Function, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
) -> bool:
    """Whether it divides by how many rows there are: a mean over the first dimension, or a loss that is reduced."""
    if function in MOVES or function in _SUMS or kwargs.get("reduction") in ("sum", "none"):
        return False
    if function in _MEANS and result.ndim:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        every = [dims] if isinstance(dims, int) else dims
        return every is None or any(d in (0, -args[0].ndim) for d in every)
    return result.ndim == 0 and (function in _MEANS or "reduction" in kwargs)


_MEAN = (
    "The loss couples records: a mean over picked rows (out[mask]) divides by how many were picked in the whole batch, "
    "so every record's gradient depends on the others, and the guarantee would not hold. Use reduction='none', "
    "multiply by the mask, and take the mean over all rows; or take the sum of the picked and divide by len(outputs)"
)
_BY_PLACE = (
    "The loss couples records: rows of the outputs were picked by their place in the batch (outputs[1:]), so which "
    "records they belong to, and whose targets they meet, depends on who else was drawn: the guarantee would not hold. "
    "Take all rows; to leave some out, multiply their losses by a mask that is made of the record itself"
)
_TURNED = (
    "The loss couples records: rows of the outputs changed places, so each meets the target or the output of another "
    "record, and a record's influence would pass through the gradients of others: the guarantee would not hold. Leave "
    "rows in the order of the batch; pick some by a mask"
)
