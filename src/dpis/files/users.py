"""Rows of users: when a record is a user, which rows speak for it in one step.

``max_rows`` is public. A user with more rows is heard through a uniformly random subset, drawn by the user's own
coins; the shapes of what goes in and out depend on public numbers and on how many users were drawn, not on how many
rows they have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from numbers import Integral
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.schema import is_missing, shown


@dataclass(frozen=True, slots=True)
class UserIndex:
    """The rows of user u, in their order: ``rows[offsets[u] : offsets[u + 1]]``."""

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many rows each user has (at least 1). Private."""
        return np.diff(self.offsets)

    def rows_of(self, user: int) -> NDArray[np.int64]:
        """The rows of one user."""
        return self.rows[self.offsets[user] : self.offsets[user + 1]]


def group_by_user(user_ids: Sequence[Any] | NDArray[Any]) -> UserIndex:
    """Users numbered in the order in which they first appear, each with its rows.

    >>> index = group_by_user([7, 3, 7, 7])
    >>> index.rows_of(0).tolist(), index.rows_of(1).tolist()
    ([0, 2, 3], [1])
    """
    codes = number_users(user_ids)
    counts = np.bincount(codes)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return UserIndex(offsets, np.argsort(codes, kind="stable").astype(np.int64))


def number_users(user_ids: Sequence[Any] | NDArray[Any], where: str = "") -> NDArray[np.int64]:
    """Users numbered from 0 as they first appear, told apart by equality: nothing is rounded, decoded or sorted.

    Two users taken for one, or one for two, would void the claim for them, so ids that leave this open are refused.

    Args:
        user_ids: one a row: whole numbers, text, bytes, UUIDs, decimals, dates, or tuples of these.
        where: they come from, before an error message.
    """
    names = _names(user_ids, where)
    for name in names:
        if _names_nobody(name):
            raise InputError(
                f"{where}some rows have no user, found {shown(name)}: whose they are decides what is protected. Remove "
                "them or name the user; together they would count as one, and the claim would not hold for their owners"
            )
    if len({_kind(name, where) for name in names}) > 1:
        raise InputError(
            f"{where}user ids must be of one type, found several: 1 and '1' may be one user or two"
        )
    number: dict[Any, int] = {}
    return np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64)


def codes_by_appearance(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """Distinct values numbered from 0 in the order in which they first appear."""
    _, first, codes = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[codes]


_NOBODY = ("none", "nat", "-nan")
"""What programs write for no value, beside the words that mean it in any column."""

_ROUNDED = re.compile(r"[+-]?\d+(\.\d+)?[eE]\+\d+")
"""``1.23457E+12``: what spreadsheets make of long numbers, of several the same."""


def names_no_user(text: str) -> bool:
    """Whether an id in words says that there is none."""
    return is_missing(text) or text.strip().lower() in _NOBODY


def may_be_rounded(text: str) -> bool:
    """Whether an id in words is a number that was cut short.

    >>> may_be_rounded("1.23457E+12"), may_be_rounded("1e10"), may_be_rounded("007")
    (True, False, False)
    """
    return _ROUNDED.fullmatch(text.strip()) is not None


def _names(user_ids: Sequence[Any] | NDArray[Any], where: str) -> list[Any]:
    """The ids as Python values; what is masked or no date is None."""
    if isinstance(user_ids, Mapping | Set | str | bytes) or not hasattr(user_ids, "__len__"):
        raise InputError(
            f"{where}user ids must be a sequence with one a row, in the order of the rows, found "
            f"{type(user_ids).__name__}"
        )
    if getattr(user_ids, "ndim", 1) != 1:
        raise InputError(f"{where}user ids must be one a row, found the shape {np.shape(user_ids)}")
    if isinstance(user_ids, np.ndarray) and user_ids.dtype.kind in "mM":
        absent = np.ma.getmaskarray(user_ids) | np.isnat(np.ma.getdata(user_ids))
        values = np.ma.getdata(user_ids).tolist()
        return [None if none else value for none, value in zip(absent, values, strict=True)]
    listed = user_ids.tolist() if hasattr(user_ids, "tolist") else user_ids
    return [name.item() if getattr(name, "shape", None) == () else name for name in listed]


def _names_nobody(name: object) -> bool:
    if isinstance(name, tuple):
        return not name or any(map(_names_nobody, name))
    if isinstance(name, Decimal):
        return not name.is_finite()
    return names_no_user(name.decode(errors="replace") if isinstance(name, bytes) else str(name))


_KINDS = (Integral, str, bytes, UUID, Decimal, date)
"""Values that are equal if and only if they name the same user. A float is not: it may have been rounded; nor a
truth value: it tells two groups apart."""


def _kind(name: object, where: str) -> object:
    if isinstance(name, tuple):
        return tuple(_kind(part, where) for part in name)
    if not isinstance(name, bool) and not (isinstance(name, str) and may_be_rounded(name)):
        for kind in _KINDS:
            if isinstance(name, kind):
                return kind
    raise InputError(
        f"{where}user ids must be whole numbers or text (UUIDs, decimals, dates, tuples of these), found {shown(name)} "
        f"({type(name).__name__}): it may stand for several users, or one user may have several such"
    )


def choose_rows(
    index: UserIndex,
    users: NDArray[np.int64],
    max_rows: int,
    uniforms: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """At most ``max_rows`` rows for each of ``users``: all of them, or a uniformly random subset.

    Args:
        index: from `group_by_user`.
        users: ``[m]`` numbers of users.
        max_rows: public.
        uniforms: ``[m, max_rows]`` fresh coins in ``[0, 1)``, row i for ``users[i]``.

    Returns:
        ``rows [m, max_rows]``, in their order, and ``present [m, max_rows]``. Where a user has fewer, its first row
        fills the place and ``present`` is False.

    Subsets by Floyd's algorithm: the j-th coin picks among the first ``count - max_rows + j + 1`` rows, and the last of
    these if the pick is taken already.
    """
    if max_rows < 1:
        raise InputError(f"max_rows must be at least 1, found {max_rows}")
    if uniforms.shape != (len(users), max_rows):
        raise InputError(
            f"coins must have the shape {(len(users), max_rows)}, found {uniforms.shape}"
        )
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise InputError("coins must lie in [0, 1)")
    counts = index.offsets[users + 1] - index.offsets[users]
    places = np.broadcast_to(np.arange(max_rows), (len(users), max_rows)).copy()
    present = places < counts[:, None]
    places[~present] = 0
    many = np.flatnonzero(counts > max_rows)
    places[many] = _subsets(counts[many], uniforms[many])
    return index.rows[index.offsets[users][:, None] + places], present


def _subsets(counts: NDArray[np.int64], uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    size = uniforms.shape[1]
    chosen = np.empty(uniforms.shape, dtype=np.int64)
    for j in range(size):
        last = counts - size + j
        pick = np.minimum((uniforms[:, j] * (last + 1)).astype(np.int64), last)
        taken = (chosen[:, :j] == pick[:, None]).any(axis=1)
        chosen[:, j] = np.where(taken, last, pick)
    chosen.sort(axis=1)
    return chosen
