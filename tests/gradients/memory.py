"""How much room large tensors take at once, seen from every operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Knows the tensors that operations made while it was active.

    Attributes:
        peak: the most bytes that those which were alive had at once.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.peak = least, 0
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        large = [
            weakref.ref(leaf)
            for leaf in tree_leaves(result)
            if type(leaf) is Tensor and leaf.nbytes >= self.least
        ]
        if large:
            self._made += large
            self._measure()
        return result

    def _measure(self) -> None:
        sizes = dict[int, int]()
        self._made = [known for known in self._made if known() is not None]
        for known in self._made:
            tensor = known()
            storage = None if tensor is None else tensor.untyped_storage()
            if storage is not None and storage.size():
                sizes[storage.data_ptr()] = storage.size()
        self.peak = max(self.peak, sum(sizes.values()))


@contextmanager
def meter(least: int) -> Iterator[Meter]:
    """While it is open, measure after every operation; tensors of fewer bytes are left out."""
    with Meter(least) as measured:
        yield measured
