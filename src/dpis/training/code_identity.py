"""What functions and classes do, as texts that are the same in every process of one version of Python.

Of installed packages, torch and this package among them, the name is enough: it is their version that changes.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

Describe = Callable[[Any], str]
"""How what a function holds or names is described in its turn."""

_INSTALLED = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_BY_VERSION = ("builtins", "torch", "dpis")


def name_of(value: Any) -> str:
    """Where it was defined, in words."""
    return f"{value.__module__}.{value.__qualname__}"


def function_code(function: FunctionType, describe: Describe) -> str:
    """A hash of its instructions and of what it holds and names; nothing, if it is of an installed package.

    A name is followed to what stands beside the function. What is reached through a module or an object, as in
    ``helpers.scale(loss)``, does not show.
    """
    if _is_installed(function.__globals__.get("__name__"), _file_of(function)):
        wrapped = getattr(function, "__wrapped__", None)  # as by torch.no_grad
        return "" if wrapped is None else f" of {describe(wrapped)}"
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    held = [
        *cells,
        *(function.__defaults__ or ()),
        *sorted((function.__kwdefaults__ or {}).items()),
    ]
    named = [
        f"{name}={describe(function.__globals__[name])}"
        for name in sorted(set(_names(function.__code__)))
        if name in function.__globals__ and not name.startswith("__")
    ]
    return _hashed([_instructions(function.__code__), *map(describe, held), *named])


def class_code(kind: type, describe: Describe) -> str:
    """A hash of its methods and settings, inherited ones too; nothing, if all are of installed packages."""
    parts = [
        f"{name}={describe(_function_in(value))}"
        for base in kind.__mro__
        if not _is_installed(base.__module__, _file_of(base))
        for name, value in sorted(vars(base).items())
        if isinstance(_function_in(value), FunctionType) or not name.startswith("__")
    ]
    return _hashed(parts) if parts else ""


def _hashed(parts: list[str]) -> str:
    return f" code {hashlib.sha256(repr(parts).encode()).hexdigest()}"


def _is_installed(module: str | None, file: str) -> bool:
    return (module or "").split(".")[0] in _BY_VERSION or file.startswith(_INSTALLED)


def _file_of(value: FunctionType | type) -> str:
    if isinstance(value, FunctionType):
        return value.__globals__.get("__file__") or value.__code__.co_filename
    return getattr(sys.modules.get(value.__module__), "__file__", None) or ""


def _function_in(value: Any) -> Any:
    """The function of a method as it stands in its class."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: CodeType) -> Iterator[str]:
    """Of what it reads beside itself and does not write: a counter is no setting."""
    steps = list(dis.get_instructions(code))
    written = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
    read = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    yield from read - written
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _instructions(code: CodeType) -> str:
    """Without file, lines and addresses."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    constants = [_constant(constant) for constant in code.co_consts]
    exceptions = getattr(code, "co_exceptiontable", b"")
    return repr([code.co_code, exceptions, code.co_flags, arguments, code.co_names, constants])


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _instructions(value)
    if isinstance(value, tuple):
        return repr([_constant(item) for item in value])
    if isinstance(value, frozenset):
        return f"set {sorted(map(_constant, value))}"
    return f"{type(value).__name__} {value!r}"
