"""What the loader delivered last, to compare with what the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpis.gradients import batches
from dpis.gradients.batches import Batch


@dataclass(frozen=True, eq=False)
class Delivered:
    """The tensors of one physical batch, and their versions: changes in place show.

    Attributes:
        tensors: those that hold one entry a row, with their versions.
        rows: how many rows they have.
        row_dim: the dimension of rows, where a tensor has that many.
    """

    tensors: Sequence[tuple[Tensor, int]]
    rows: int
    row_dim: int

    @classmethod
    def of(cls, batch: Any, rows: int, row_dim: int) -> Delivered:
        """Remember a batch."""
        found = [(tensor, tensor._version) for tensor in batches.tensors(batch)]
        return cls(found, rows, row_dim)

    def contradicts(self, inputs: Sequence[Tensor], start: int) -> bool:
        """Whether inputs have the form of what was delivered, and none its contents.

        Inputs of another shape or type (flattened, one-hot, embedded) cannot be told from others.

        Args:
            inputs: some rows, as the model gets them.
            start: the first of these rows in the batch.
        """
        verdicts = [
            self._same(tensor, version, given, start)
            for given in inputs
            for tensor, version in self.tensors
            if self._alike(tensor, given)
        ]
        return bool(verdicts) and not any(verdicts)

    def replaced(self, inputs: Any, start: int, row: Batch) -> Any:
        """The inputs that the model would get for another batch of one row, as a batch of two such rows.

        (Models that squeeze their outputs are at a loss with one.)

        Args:
            inputs: some rows, as the model gets them.
            start: the first of these rows in the batch.
            row: a batch of one row, rows first.

        Returns:
            As many tensors in the places of the inputs; None, if one of these is not of the batch that was delivered.
        """
        others = list(batches.tensors(row))
        found = {id(given): self._number_of(given, start) for given in batches.tensors(inputs)}
        if any(number is None or others[number].shape[:1] != (1,) for number in found.values()):
            return None

        def other(given: Tensor) -> Tensor:
            number = found[id(given)]
            assert number is not None
            return others[number].to(given.device).repeat_interleave(2, dim=0)

        return batches.apply(other, inputs)

    def _number_of(self, given: Tensor, start: int) -> int | None:
        for number, (tensor, version) in enumerate(self.tensors):
            if self._alike(tensor, given) and self._same(tensor, version, given, start):
                return number
        return None

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
