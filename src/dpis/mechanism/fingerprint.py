"""Whether data are what they were, and the same on all processes: by hashes that say nothing without the key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpis.batches import flattened
from dpis.errors import InputError
from dpis.generators import seeded_generators
from dpis.group import Group
from dpis.randomness import Key
from dpis.stored_rows import Column, Places, rows_at_once, rows_of

LOOKS = 8
"""So many records are compared: an order of one's own on a process shows in any of them."""


def require_same_data(digest_of: Callable[[int], str], count: int, group: Group) -> None:
    """Refuse to go on if the processes hold other data, or another order of them, as far as some records show it.

    Each process draws its own part of the places. So a record that lies in the part of one process here, and in that of
    another there, has two coins and may count twice: twice what the noise covers. `random_split` without a generator
    makes such an order on every process.

    Args:
        digest_of: of the record at a place. Where it is not the same twice, nothing can be compared.
        count: how many records there are, the same on every process.
        group: all ranks call this.

    Raises:
        InputError: they differ.
    """
    if group.size == 1:
        return
    with group.together():
        places = sorted({count * look // LOOKS for look in range(LOOKS)} & set(range(count)))
        twice = [(digest_of(place), digest_of(place)) for place in places]
    repeatable = [
        all(here) for here in zip(*group.gathered([a == b for a, b in twice]), strict=True)
    ]
    group.require_same(
        [first for (first, _), same in zip(twice, repeatable, strict=True) if same],
        "the data and their order (a record at different places would be drawn on two processes, and count twice; "
        "split and shuffle with one seed: random_split(..., generator=torch.Generator().manual_seed(0)))",
    )


def item_digest(dataset: Any, place: int, key: Key) -> str:
    """Of an item as a loader would fetch it, with random numbers of the key; empty where items cannot be compared."""
    seen = Fingerprint(key, "item-fingerprint-key")
    many = getattr(dataset, "__getitems__", None)
    with seeded_generators(key.stream("item-fingerprint", place)):
        item = dataset[place] if many is None else many([place])[0]
    with suppress(InputError):
        seen.add(item)
        return seen.text
    return ""


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

    def add_rows(self, column: Column, places: Places) -> None:
        """Take in these rows of a column, a bit at a time."""
        self._put(f"rows {tuple(column.shape[1:])} {len(places)}")
        at_once = rows_at_once(column.shape)
        for start in range(0, len(places), at_once):
            rows = rows_of(column, places[start : start + at_once]).cpu()
            self._put(f"{rows.dtype}", flattened(rows).view(torch.uint8).numpy().data)

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
