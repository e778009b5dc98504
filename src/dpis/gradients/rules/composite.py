"""Functions made of other torch functions, such as fused attention: look inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_composite(function: Callable[..., Any]) -> bool:
    """Whether the function is written in Python, and so calls functions we can watch in turn."""
    return isinstance(function, FunctionType)


@cache
def opened(function: FunctionType) -> FunctionType:
    """The same function without its own override check; the functions it calls keep theirs.

    Such a function begins with ``if has_torch_function(...): return handle_torch_function(...)``,
    which hands the call to the watching mode. The mode cannot run the body by calling the function
    again while watching (it would be handed the call for ever), so it runs this copy.
    """
    unchecked = dict.fromkeys(_OVERRIDE_CHECKS, lambda *_: False)
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **unchecked},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
