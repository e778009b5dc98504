"""What the loader delivered last, to compare with what the model is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpis import batches
from dpis.coupling.padding import tensors_within


@dataclass(frozen=True, eq=False)
class Delivered:
    """The tensors of one physical batch, and their versions: changes in place show.

    Attributes:
        tensors: all it holds, with their versions.
        rows: how many rows they have.
        row_dim: the dimension of rows, where a tensor has that many.
    """

    tensors: Sequence[tuple[Tensor, int]]
    rows: int
    row_dim: int

    @classmethod
    def of(cls, batch: Any, rows: int, row_dim: int) -> Delivered:
        """Remember a batch."""
        found = [(tensor, tensor._version) for tensor in tensors_within(batch)]
        return cls(found, rows, row_dim)

    def contradicts(self, inputs: Sequence[Tensor], start: int) -> bool:
        """Whether inputs have the form of what was delivered, and none its contents.

        Inputs of another shape or type (flattened, one-hot, embedded) cannot be told from others.

        Args:
            inputs: some rows, as the model gets them.
            start: the first of these rows in the batch.
        """
        verdicts = [same for given in inputs for _, same in self._compared(given, start)]
        return bool(verdicts) and not any(verdicts)

    def numbers_of(self, inputs: Any, start: int) -> dict[int, int] | None:
        """Which tensor of the batch each input is, or some rows of it, by the input's id.

        Args:
            inputs: some rows, as the model gets them.
            start: the first of these rows in the batch.

        Returns:
            None, if one of them is none of these.
        """
        found: dict[int, int] = {}
        for given in batches.tensors(inputs):
            number = next((n for n, same in self._compared(given, start) if same), None)
            if number is None:
                return None
            found[id(given)] = number
        return found

    def _compared(self, given: Tensor, start: int) -> Iterator[tuple[int, bool]]:
        """The numbers of the tensors that have the form of an input, and whether each has its contents."""
        for number, (tensor, version) in enumerate(self.tensors):
            if self._alike(tensor, given):
                yield number, self._same(tensor, version, given, start)

    def _alike(self, tensor: Tensor, given: Tensor) -> bool:
        dim = self._dim(tensor)
        if tensor.ndim != given.ndim or tensor.ndim == 0 or tensor.dtype != given.dtype:
            return False
        rest, given_rest = list(tensor.shape), list(given.shape)
        return (
            rest.pop(dim) == self.rows and given_rest.pop(dim) <= self.rows and rest == given_rest
        )

    def _same(self, tensor: Tensor, version: int, given: Tensor, start: int) -> bool:
        dim = self._dim(tensor)
        if tensor._version != version or start + given.shape[dim] > self.rows:
            return False
        expected = tensor.narrow(dim, start, given.shape[dim]).to(given.device)
        if expected.is_set_to(given) or torch.equal(expected, given):  # the first costs nothing
            return True
        both_nan = (expected != expected) & (given != given)
        return bool(((expected == given) | both_nan).all())

    def _dim(self, tensor: Tensor) -> int:
        return self.row_dim if tensor.ndim > self.row_dim else 0
