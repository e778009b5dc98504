"""The source of the scattering transform as one piece that needs numpy and torch alone.

It travels with released models, so that whoever has one can use it without this package.
"""

from __future__ import annotations

import ast
import inspect

from dpis.features import filters, scattering

_HEAD = '''
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor


class InputError(ValueError):
    """An input that cannot be used."""


CHUNK_PIXELS = {chunk_pixels}
DENSE_ENTRIES = {dense_entries}
'''

_PARTS = (
    scattering.Scattering,
    scattering._modulus,
    scattering._padded_size,
    scattering._reflection,
    scattering._lowpass_matrix,
)


def scattering_source() -> str:
    """Python source that defines ``Scattering``, given ``torch``, ``nn`` and ``Tensor``."""
    head = _HEAD.format(
        chunk_pixels=scattering.CHUNK_PIXELS, dense_entries=scattering.DENSE_ENTRIES
    )
    return "\n\n".join([head, _body(filters), *(inspect.getsource(part) for part in _PARTS)])


def _body(module: object) -> str:
    """A module's source without its docstring and imports."""
    source = inspect.getsource(module)  # type: ignore[arg-type]
    lines = source.splitlines()
    skipped: set[int] = set()
    for node in ast.parse(source).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (is_text and node.lineno == 1):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in skipped)
