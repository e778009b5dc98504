"""``BatchMemoryManager``: large batches in parts that fit into memory."""

from __future__ import annotations

from types import TracebackType

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.dropin.loader import PrivateLoader
from dpis.dropin.optimizer import PrivateOptimizer
from dpis.errors import InputError


class BatchMemoryManager:
    """Delivers every batch of a private loader in physical batches; only the last one of a batch steps.

    The loop stays as it is, with ``optimizer.step()`` for every physical batch. The update is that of the whole batch.

    Args:
        data_loader: the private loader.
        max_physical_batch_size: rows of a part at most.
        optimizer: the private optimizer.

    Example:
        >>> with BatchMemoryManager(data_loader=loader, max_physical_batch_size=64,
        ...                         optimizer=optimizer) as parts:  # doctest: +SKIP
        ...     for inputs, targets in parts: ...
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader,  # type: ignore[type-arg]
        max_physical_batch_size: int,
        optimizer: Optimizer,
    ) -> None:
        if not isinstance(data_loader, PrivateLoader) or not isinstance(
            optimizer, PrivateOptimizer
        ):
            raise InputError(
                "BatchMemoryManager takes the loader and the optimizer that make_private returned: others have no "
                "gradients of single records to add up"
            )
        if max_physical_batch_size < 1:
            raise InputError(
                f"max_physical_batch_size must be at least 1, found {max_physical_batch_size}"
            )
        self._parts = data_loader.in_parts(max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        return self._parts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A draw that was left in the middle is delivered again, from its first part, by the next iteration."""
