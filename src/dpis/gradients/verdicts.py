"""What is known of a call before it is made: whether it depends on the records, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from dpis.gradients.layout import Growth
from dpis.gradients.rules.rule import Rule

# A call: its function, where its parameters come from, and how often that was seen before.
Key = tuple[Callable[..., Any], tuple[Hashable, ...], int]
Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True)
class Constant:
    """The call depends on no record: its result is followed as a parameter is.

    Attributes:
        shapes: those its results were seen to have, whatever the number of records.
    """

    shapes: frozenset[Shapes]


@dataclass(frozen=True)
class Placed:
    """The records' places in the watched tensors are known; the rule does the rest."""

    rule: Rule
    growths: tuple[Growth, ...]


@dataclass(frozen=True)
class Beyond:
    """No rule covers the call: its parameters need the fallback over the whole model."""

    reason: str


Verdict = Constant | Placed | Beyond
Plan = dict[Key, Verdict]
