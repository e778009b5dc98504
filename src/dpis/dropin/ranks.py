"""What people have around a model that is trained on several processes, and what is made of it here."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from torch import nn

from dpis.group import Group, current_group, share_weights


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Opacus's name for a model that begins alike on all processes. The engine does the rest; it is needed no more.

    Args:
        model: kept as ``module``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        share_weights(model, current_group())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of the model."""
        return self.module(*args, **kwargs)


def inner(module: nn.Module) -> nn.Module:
    """The model in a wrapper that adds up gradients over processes: here sums are added up before their noise."""
    wrappers = nn.parallel.DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel
    return module.module if isinstance(module, wrappers) else module


def tell_of_uncaught(group: Group) -> None:
    """An error that nobody catches, from the loop of this process, stops the others with its words."""
    if group.size > 1:
        shown = sys.excepthook
        sys.excepthook = _TellsOthers(
            shown._shown if isinstance(shown, _TellsOthers) else shown, group
        )


class _TellsOthers:
    """Shows an error as it was shown before, and tells the group."""

    def __init__(self, shown: Any, group: Group) -> None:
        self._shown, self._group = shown, group

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._shown(kind, error, trace)
        self._group.stop(error)
