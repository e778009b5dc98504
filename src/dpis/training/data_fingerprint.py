"""A keyed hash of the data: tells whether a resumed run sees the same records, and nobody else anything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpis.batches import flattened
from dpis.errors import InputError
from dpis.randomness import Key
from dpis.training.records import Records


def fingerprint(records: Records, key: Key) -> str:
    """Of every row and its order, and of who owns it.

    The same noise on other data would cancel in the difference, so a run goes on only over the data it
    began with.
    """
    seen = Fingerprint(key)
    seen.add(len(records))
    for rows in records.raw_rows(key):
        seen.add(rows)
    if records.user_ids is not None:
        seen.add([str(user) for user in records.user_ids])
    return seen.text


class Fingerprint:
    """A hash of what it is shown, in its order. Without the key it says nothing.

    Args:
        key: the run's secret.
        purpose: of what; fingerprints of other things have a key of their own.
    """

    def __init__(self, key: Key, purpose: str = "fingerprint-key") -> None:
        secret = key.stream(purpose, 0).bytes(64)
        self._digest = hashlib.blake2b(key=secret, digest_size=32)

    @property
    def text(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()

    def add(self, value: Any) -> None:
        """Take in one thing more, with its kind and its length in front, so that no two have the same bytes."""
        if isinstance(value, Tensor):
            plain = flattened(value.cpu()).view(torch.uint8).numpy()
            self._put(f"tensor {value.dtype} {tuple(value.shape)}", plain.data)
        elif isinstance(value, Mapping):
            self._put(f"mapping {len(value)}")
            for name in value:
                self.add(name)
                self.add(value[name])
        elif isinstance(value, list | tuple):
            self._put(f"sequence {len(value)}")
            for item in value:
                self.add(item)
        elif isinstance(value, str | bool | int | float | complex | None):
            self._put(f"{type(value).__name__} {value!r}")
        elif isinstance(value, bytes):
            self._put("bytes", value)
        elif isinstance(value, type):
            self._put(f"class {value.__module__}.{value.__qualname__}")
        elif (array := _as_array(value)) is not None:
            plain = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._put(f"array {array.dtype.str} {array.shape}", plain.data)
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        """What it would be stored as, part by part: the bytes of pickle hold addresses."""
        try:
            _, arguments, *state = value.__reduce_ex__(4)
            self._put(f"object {type(value).__module__}.{type(value).__qualname__}")
            self.add(arguments)
            for part in state:
                self.add(list(part) if isinstance(part, Iterator) else part)
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise InputError(
                f"a data set's items must be made of tensors, arrays, numbers and texts, found {type(value).__name__}: "
                "whether a resumed run sees the same data could not be told"
            ) from None

    def _put(self, kind: str, contents: bytes | memoryview = b"") -> None:
        self._digest.update(f"{len(kind)}:{kind}{memoryview(contents).nbytes}:".encode())
        self._digest.update(contents)


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """An array, or whatever looks like one (an image); None for others, and for arrays of objects."""
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else array
