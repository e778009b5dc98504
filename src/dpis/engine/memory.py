"""``BatchMemoryManager``: large batches in parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from dpis.engine.loader import PrivateLoader
from dpis.engine.optimizer import PrivateOptimizer
from dpis.errors import InputError
from dpis.gradients import batches


class BatchMemoryManager:
    """Splits every batch of a private loader into physical batches; only the last one of a batch steps.

    Args:
        data_loader: the private loader.
        max_physical_batch_size: rows of a part at most.
        optimizer: the private optimizer.

    Example:
        >>> with BatchMemoryManager(data_loader=loader, max_physical_batch_size=64, optimizer=optimizer) as parts:
        ...     for inputs, targets in parts: ...  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        data_loader: PrivateLoader,
        max_physical_batch_size: int,
        optimizer: PrivateOptimizer,
    ) -> None:
        if not isinstance(data_loader, PrivateLoader) or not isinstance(
            optimizer, PrivateOptimizer
        ):
            raise InputError(
                "BatchMemoryManager takes the loader and the optimizer that make_private returned"
            )
        if max_physical_batch_size < 1:
            raise InputError(
                f"max_physical_batch_size must be at least 1, found {max_physical_batch_size}"
            )
        self._parts = _Parts(data_loader, max_physical_batch_size, optimizer)

    def __enter__(self) -> _Parts:
        return self._parts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parts.optimizer.signal_skip_step(do_skip=False)


class _Parts:
    """Iterates over parts of batches."""

    def __init__(self, loader: PrivateLoader, size: int, optimizer: PrivateOptimizer) -> None:
        self.loader, self.size, self.optimizer = loader, size, optimizer
        self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            rows = batches.rows(batch)
            starts = range(0, rows, self.size) if rows else [0]
            for start in starts:
                self.optimizer.signal_skip_step(do_skip=start + self.size < rows)
                stop = min(start + self.size, rows)
                yield batches.apply(lambda t, a=start, b=stop: t[a:b], batch)  # type: ignore[misc]

    def __len__(self) -> int:
        """At least so many: every batch has one part or more, how many is private."""
        return len(self.loader)
