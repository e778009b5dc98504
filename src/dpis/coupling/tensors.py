"""Tensors of any kind as plain numbers in a row."""

from __future__ import annotations

from torch import Tensor


def flattened(tensor: Tensor) -> Tensor:
    """All of its numbers, where they can be read as other types: dense, resolved, contiguous."""
    return tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous().reshape(-1)
