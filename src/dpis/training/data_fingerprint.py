"""A keyed hash of the data: tells whether a resumed run sees the same records, and nobody else anything.

Records are hashed shard by shard in chunks, and the digests of the chunks together make the fingerprint. So each of
several processes hashes the records that it owns, and a chunk that lies in files which are known by size and time of
change is not read again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import dpis
from dpis.batches import columns_of
from dpis.mechanism.fingerprint import Fingerprint
from dpis.private_files import FileIdentity
from dpis.randomness import Key
from dpis.sampling import Shards
from dpis.stored_rows import Column, Places, StoredRows
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
