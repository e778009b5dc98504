"""Settings that are chosen by name."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from dpis.errors import InputError

E = TypeVar("E", bound=StrEnum)


def chosen(kind: type[E], what: str, name: str) -> E:
    """The member of that name; any other name is refused with those there are."""
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise InputError(f"{what} must be one of {known}, found {name!r}") from None
