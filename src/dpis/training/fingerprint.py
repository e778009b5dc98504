"""A keyed hash of the data: tells whether a resumed run sees the same records, and nobody else anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dpis.randomness import Key
from dpis.training.records import Records


def fingerprint(records: Records, key: Key) -> str:
    """Of every row and its order, and of who owns it.

    The same noise on other data would cancel in the difference, so a run goes on only over the data it
    began with. Without the key the hash says nothing.
    """
    digest = hashlib.blake2b(key=key.stream("fingerprint-key", 0).bytes(64), digest_size=32)
    digest.update(str(len(records)).encode())
    for rows in records.raw_rows(key):
        _update(digest, rows)
    if records.user_ids is not None:
        _update(digest, [str(user) for user in records.user_ids])
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.is_sparse or value.dtype.is_complex or str(value.dtype) == "torch.bfloat16":
            value = value.to_dense().float() if not value.dtype.is_complex else value.resolve_conj()
        value = value.contiguous().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(str(name).encode())
            _update(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _update(digest, item)
    else:
        digest.update(f"{type(value).__name__}:{value!r};".encode())
