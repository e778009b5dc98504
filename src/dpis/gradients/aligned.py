"""Matrix products whose result for a record does not depend on the record's place.

Matrix kernels of CPUs sum a row in another order where it begins off a 16-byte boundary. A record's
result would then change in its last bits with its place in the batch, and so with who shares it. So
sizes are filled up with zeros, where they are odd, until the numbers of all records begin alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT = 4
"""Numbers: 16 bytes of float32, the strictest that was seen to matter."""


def missing(size: int) -> int:
    """How many zeros fill a size up.

    Example:
        >>> missing(7), missing(8)
        (1, 0)
    """
    return -size % ALIGNMENT


def filled_up(tensor: Tensor, *dims: int) -> Tensor:
    """Zeros behind the last entries of these dimensions, counted from the end (``-1``, ``-2``).

    Example:
        >>> filled_up(torch.ones(2, 3, 5), -1, -2).shape
        torch.Size([2, 4, 8])
    """
    amounts = [0] * (2 * max(-dim for dim in dims))
    for dim in dims:
        amounts[-2 * dim - 1] = missing(tensor.shape[dim])
    return functional.pad(tensor, amounts) if any(amounts) else tensor


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


FEW = 16
"""Below so many columns float32 products go by a kernel that depends on alignment (on AVX2: below 12)."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``functional.linear``.

    Where many inputs give few outputs, the outputs are filled up: the inputs (scattering features, 3,969 of them)
    need not be copied then.
    """
    plain = not missing(weight.shape[-1]) and weight.stride(-1) == 1
    if plain or weight.ndim != 2:
        return functional.linear(input, weight, bias)
    outputs, inputs = weight.shape
    if outputs < FEW <= inputs and input.dtype == torch.float32:
        wide_weight = functional.pad(weight, (0, 0, 0, FEW - outputs))
        result = functional.linear(input, wide_weight)[..., :outputs]
    else:
        result = product(input, weight.mT)
    return result.contiguous() if bias is None else result + bias


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``."""
    if right.ndim == 1:
        return filled_up(left, -1) @ filled_up(right, -1)
    if not (missing(right.shape[-2]) or missing(right.shape[-1])):
        return left @ right
    wide = filled_up(left, -1) @ filled_up(right, -1, -2)
    return wide[..., : right.shape[-1]].contiguous()


def added_product(added: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``added + left @ right``."""
    return added + product(left, right)


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``functional.scaled_dot_product_attention``: zeros add nothing to an inner product."""
    features = query.shape[-1]
    if not (missing(features) or missing(value.shape[-1])):
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    if kwargs.get("scale") is None:
        kwargs = {**kwargs, "scale": features**-0.5}
    query, key, wide_value = (filled_up(tensor, -1) for tensor in (query, key, value))
    result = functional.scaled_dot_product_attention(query, key, wide_value, *args, **kwargs)
    return result[..., : value.shape[-1]]


def as_aligned(function: Callable[..., Any], by_name: bool) -> Callable[..., Any]:
    """What to call instead of a torch function: itself, unless its results would depend on places.

    Args:
        function: a torch function that no parameter is given to.
        by_name: whether some of its arguments are given by name (``alpha``, ``out``): products then run as they are.
    """
    return (_PRODUCTS.get(function) if not by_name else None) or _LAYERS.get(function, function)


_LAYERS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: linear,
    functional.scaled_dot_product_attention: attention,
}
_PRODUCTS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm), product),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), added_product),
}
