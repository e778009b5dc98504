"""Where the records are in a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One dimension of a tensor counts rows; each record owns ``per_record`` of them.

    Attributes:
        dim: the dimension that grows with the batch, counted from the front.
        per_record: how many entries of that dimension belong to one record (more than one where
            the model flattened records and positions into one dimension).
        record_major: the entries of one record are neighbours (``[record, position]`` flattened);
            otherwise the records of one position are (``[position, record]``).
    """

    dim: int
    per_record: int = 1
    record_major: bool = True

    def rows_first(self, tensor: Tensor) -> Tensor:
        """The tensor with its rows in front, those of one record next to one another.

        Example:
            >>> import torch
            >>> Layout(dim=1).rows_first(torch.zeros(7, 2, 5)).shape  # 7 steps, 2 records
            torch.Size([2, 7, 5])
        """
        rows = tensor.movedim(self.dim, 0) if self.dim else tensor
        if self.record_major or self.per_record == 1:
            return rows
        by_position = rows.reshape(self.per_record, -1, *rows.shape[1:])
        return by_position.transpose(0, 1).flatten(0, 1)
