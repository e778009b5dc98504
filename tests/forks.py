"""What a child process is told that goes on with its parent's objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be forked here")


def error_in_a_fork(action: Callable[[], object]) -> str:
    """The error that the action meets in a forked child; empty if it meets none."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, by newer Pythons
        child = os.fork()
    if child == 0:
        os.write(writing, _error_of(action).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""
