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


class Fingerprint:
    """A hash of what it is shown, in its order. Without the key it says nothing.

    Args:
        key: the run's secret.
        purpose: of what; fingerprints of other things have a key of their own.
    """

    def __init__(self, key: Key, purpose: str = "fingerprint-key") -> None:
        secret = key.stream(purpose, 0).bytes(64)
        self._digest = hashlib.blake2b(key=secret, digest_size=32)

    def add(self, value: Any) -> None:
        """Take in one thing more."""
        _update(self._digest, value)

    @property
    def text(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()


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


def _update(digest: hashlib.blake2b, value: Any) -> None:
    """Every value with its kind and its length in front, so that no two have the same bytes."""
    if isinstance(value, Tensor):
        plain = flattened(value.cpu()).view(torch.uint8).numpy()
        _put(digest, f"tensor {value.dtype} {tuple(value.shape)}", plain.data)
    elif isinstance(value, Mapping):
        _put(digest, f"mapping {len(value)}")
        for name in value:
            _update(digest, name)
            _update(digest, value[name])
    elif isinstance(value, list | tuple):
        _put(digest, f"sequence {len(value)}")
        for item in value:
            _update(digest, item)
    elif isinstance(value, str | bool | int | float | complex | None):
        _put(digest, f"{type(value).__name__} {value!r}")
    elif isinstance(value, bytes):
        _put(digest, "bytes", value)
    else:
        _update_other(digest, value)


def _update_other(digest: hashlib.blake2b, value: Any) -> None:
    """An array, whatever looks like one (an image), or any object that can be stored."""
    looks_like_one = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    array = np.asarray(value) if looks_like_one else None
    if array is not None and not array.dtype.hasobject:
        plain = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _put(digest, f"array {array.dtype.str} {array.shape}", plain.data)
        return
    if isinstance(value, type):
        _put(digest, f"class {value.__module__}.{value.__qualname__}")
        return
    try:  # what it would be stored as, part by part: the bytes of pickle hold addresses
        _, arguments, *state = value.__reduce_ex__(4)
        _put(digest, f"object {type(value).__module__}.{type(value).__qualname__}")
        _update(digest, arguments)
        for part in state:
            _update(digest, list(part) if isinstance(part, Iterator) else part)
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise InputError(
            f"a data set's items must be made of tensors, arrays, numbers and texts, found {type(value).__name__}: "
            "whether a resumed run sees the same data could not be told"
        ) from None


def _put(digest: hashlib.blake2b, kind: str, contents: bytes | memoryview = b"") -> None:
    digest.update(f"{len(kind)}:{kind}{memoryview(contents).nbytes}:".encode())
    digest.update(contents)
