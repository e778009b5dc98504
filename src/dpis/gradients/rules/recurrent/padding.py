"""Features filled up with zeros, so that a record's result does not depend on its place.

See ``dpis.gradients.aligned``. Gates stand side by side in one dimension, and each is filled up by itself. A feature
that is not there has zeros for weights: its gates, its state and its gradients stay zero at every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpis.gradients.aligned import filled_up


def filled_gates(weight: Tensor, gates: int, *, inputs: bool) -> Tensor:
    """``[directions, gates · features (, inputs)]``, every gate filled up, and the inputs too if there are some."""
    dims = (-1, -2) if inputs else (-1,)
    return filled_up(torch.unflatten(weight, 1, (gates, -1)), *dims).flatten(1, 2)


def cut(tensor: Tensor, dim: int, size: int, parts: int = 1) -> Tensor:
    """Undo: the first ``size / parts`` of each of the parts that stand side by side in a dimension.

    Example:
        >>> cut(torch.tensor([1, 2, 0, 0, 3, 4, 0, 0]), 0, size=4, parts=2)
        tensor([1, 2, 3, 4])
    """
    if tensor.shape[dim] == size:
        return tensor
    dim %= tensor.ndim
    by_part = torch.unflatten(tensor, dim, (parts, -1)).narrow(dim + 1, 0, size // parts)
    return by_part.flatten(dim, dim + 1)
