"""Batches of no records: what a loader delivers for them, and what a model answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dpis import batches


def emptied(one: Any, two: Any) -> Any:
    """A batch of nobody, from a batch of one and one of two records: what grows has length zero.

    Example:
        >>> emptied([torch.ones(3, 1), ["a"], 7], [torch.ones(3, 2), ["a", "b"], 7])
        [tensor([], size=(3, 0)), [], 7]
    """
    if isinstance(one, Tensor):
        grown = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        return one.narrow(grown[0], 0, 0) if grown else one
    if isinstance(one, Mapping):
        return batches.like(one, [emptied(value, two[key]) for key, value in one.items()])
    if isinstance(one, tuple | list):
        if len(one) != len(two):
            return type(one)()
        return batches.like(one, [emptied(a, b) for a, b in zip(one, two, strict=True)])
    return one


def empty_outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], template: Any
) -> Any:
    """What the model answers to nobody: open to gradients, which reach no parameter.

    Many models cannot be run on no rows (``x.view(len(x), -1)``): then the outputs of an earlier batch serve without
    their rows, or those of a row of zeros or ones.
    """
    with torch.no_grad(), torch.random.fork_rng():
        for answer in _answers(module, args, dict(kwargs), template):
            return batches.apply(_opened, answer)
    raise RuntimeError(
        "the model can be run neither on a batch of no rows nor on one of zeros, so an empty batch cannot be answered. "
        "Call optimizer.step() for it without running the model: a step of noise alone is accounted for"
    )


def _answers(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], template: Any
) -> Iterator[Any]:
    errors = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ZeroDivisionError)
    with suppress(*errors):
        yield module(*args, **kwargs)
    if template is not None:
        yield template
    for value in (0, 1):
        with suppress(*errors):
            some_args, some_kwargs = batches.apply(
                lambda t, v=value: t.new_full([size or 1 for size in t.shape], v),  # type: ignore[misc]
                (args, kwargs),
            )
            yield batches.apply(_without_row, module(*some_args, **some_kwargs))


def _without_row(tensor: Tensor) -> Tensor:
    ones = [dim for dim, size in enumerate(tensor.shape) if size == 1]
    return tensor.narrow(ones[0], 0, 0) if ones else tensor


def _opened(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.requires_grad_() if tensor.is_floating_point() else detached
