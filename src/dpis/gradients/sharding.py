"""How a model lies on the processes that run it: whole, or in slices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dpis.gradients.watch import Use, Watch

if TYPE_CHECKING:
    from dpis.gradients.sharded_sums import ShardedSums
from dpis.group import Alone, Group

# Indices of sharded modules that are gathered at the same time.
Owners = tuple[int, ...]


class Sharding:
    """A whole model in one process: every parameter is the tensor it was registered as, and keeps its values.

    Attributes:
        ranks: the processes that hold the slices.
        is_sharded: whether there are slices.
        sums: how sums of gradients lie on these processes, where there are slices.
    """

    is_sharded = False
    sums: ShardedSums | None = None

    def __init__(self) -> None:
        self.ranks: Group = Alone()

    @property
    def half(self) -> bool:
        """Whether its parameters are cast to half precision while it runs."""
        return False

    @contextmanager
    def shown_to(self, watch: Watch) -> Iterator[None]:
        """While the model runs, tell the watch which tensor is which parameter."""
        yield

    def is_still(self, name: str, before: Tensor, now: Tensor) -> bool:
        """Whether what is registered under a name is the parameter that was."""
        return now is before

    def needed_by(self, use: Use, watch: Watch) -> Owners:
        """The sharded modules whose values the factors of a use read; empty: none."""
        return ()

    @contextmanager
    def gathered(self, owners: Owners) -> Iterator[None]:
        """With the values of some sharded modules. Every rank asks for the same."""
        yield


def sharding_of(module: nn.Module) -> Sharding:
    """How the model lies: whoever shards one has imported that module, which takes half a second."""
    if "torch.distributed.tensor" not in sys.modules:
        return Sharding()
    from dpis.gradients.fully_sharded import FullySharded, is_sharded

    return FullySharded(module) if is_sharded(module) else Sharding()


def free_gathered(module: nn.Module) -> None:
    """Let a sharded model go of parameters that a pass left gathered: they would be those of then in the next one."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                layer.reshard()
