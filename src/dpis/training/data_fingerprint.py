"""A keyed hash of the data: tells whether a resumed run sees the same records, and nobody else anything.

Records are hashed shard by shard in chunks, and the digests of the chunks together make the fingerprint. So each of
several processes hashes the records that it owns, and a chunk that lies in files which are known by size and time of
change is not read again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dpis
from dpis.batches import columns_of, flattened
from dpis.errors import InputError
from dpis.private_files import FileIdentity
from dpis.randomness import Key
from dpis.sampling import Shards
from dpis.stored_rows import Column, Places, StoredRows, rows_at_once, rows_of
from dpis.training.records import Records

RECORDS_A_CHUNK = 1 << 16

SETTLED_SECONDS = 2.0
"""A file that was changed less long ago may be changed again without another time: some systems count in seconds."""


@dataclass
class DataFingerprint:
    """Of every row and its order, and of who owns it.

    The same noise on other data would cancel in the difference, so a run goes on only over the data it
    began with.

    Attributes:
        records: whose.
        key: the run's secret.
        shards: those of this process, which reads no other records.
        known: digests of what lies in files, with what the files were known by; grows. Secret.
    """

    records: Records
    key: Key
    shards: Shards
    known: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._before, self.known = self.known, {}

    def own_digests(self) -> list[str]:
        """Of the chunks of this process."""
        return [self.chunk_digest(chunk) for chunk in chunks(self.shards)]

    def combined(self, digests: Sequence[str]) -> str:
        """Of the digests of all chunks, in their order, wherever they were computed."""
        seen = Fingerprint(self.key)
        seen.add([len(self.records), self.shards.count, RECORDS_A_CHUNK, list(digests)])
        return seen.text

    def chunk_digest(self, chunk: range) -> str:
        """Of some consecutive records."""
        records, seen = self.records, Fingerprint(self.key)
        places = records.places(chunk)
        seen.add([chunk.start, chunk.stop, places, records.owners(chunk)])
        columns = columns_of(records.dataset)
        for number, column in enumerate(columns):
            seen.add(self._column_digest(f"{chunk.start} {number}", column, places))
        if not columns:
            for items in records.raw_items(self.key, places):
                seen.add(items)
        return seen.text

    def _column_digest(self, name: str, column: Column, places: Places) -> str:
        stamp = _stamp(column, places) if isinstance(column, StoredRows) else None
        before = self._before.get(name)
        if stamp is not None and before is not None and before[0] == stamp:
            digest = before[1]
        else:
            seen = Fingerprint(self.key)
            seen.add_rows(column, places)
            digest = seen.text
        if stamp is not None:
            self.known[name] = [stamp, digest]
        return digest


def chunks(shards: Shards) -> list[range]:
    """The records of some shards, each shard in chunks of a fixed size."""
    return [
        range(start, min(start + RECORDS_A_CHUNK, end))
        for begin, end in pairwise(shards.boundaries.tolist())
        for start in range(begin, end, RECORDS_A_CHUNK)
    ]


def _stamp(column: StoredRows, places: Places) -> str | None:
    """By what rows are known without being read; None: their files were changed just now."""
    identities = [FileIdentity.of(file) for file in column.files(places)]
    newest = max(max(one.modified, one.changed) for one in identities)
    if time.time_ns() - newest < SETTLED_SECONDS * 1e9:
        return None
    plain = [dpis.__version__, column.recipe, column.shape, [asdict(one) for one in identities]]
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=32)
    digest.update(column.origin(places).tobytes())
    return digest.hexdigest()


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
