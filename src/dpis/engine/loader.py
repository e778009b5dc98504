"""The user's DataLoader, with our draws as its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from dpis.engine.session import Session
from dpis.errors import InputError
from dpis.gradients import batches


class PrivateLoader(DataLoader[Any]):
    """Delivers one batch for every draw of the session; one iteration is one epoch.

    Workers, pinned memory, collate function and transforms are those of the loader it was made from. ``len`` is exact:
    ``floor(n_public / batch_size)``.
    """

    def __init__(self, original: DataLoader[Any], session: Session, steps: int) -> None:
        worker_settings: dict[str, Any] = {}
        if original.num_workers > 0:
            worker_settings = {
                "prefetch_factor": original.prefetch_factor,
                "persistent_workers": original.persistent_workers,
                "multiprocessing_context": original.multiprocessing_context,
            }
        super().__init__(
            original.dataset,
            batch_sampler=_Draws(session, steps),
            collate_fn=CollateEmpty(original.collate_fn, original.dataset),
            num_workers=original.num_workers,
            pin_memory=original.pin_memory,
            timeout=original.timeout,
            worker_init_fn=original.worker_init_fn,
            generator=original.generator,
            **worker_settings,
        )
        self._private_session = session

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._private_session.begin_iteration()
        for batch in super().__iter__():
            self._private_session.deliver()
            yield batch


class _Draws(Sampler[list[int]]):
    """Lists of indices, drawn when they are asked for: ahead of the loop, where workers prefetch."""

    def __init__(self, session: Session, steps: int) -> None:
        self._session, self._steps = session, steps

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self._steps):
            yield self._session.draw().indices.tolist()

    def __len__(self) -> int:
        return self._steps


class CollateEmpty:
    """The user's collate function; nothing becomes a batch of length zero, shaped as a batch of one."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, items: list[Any]) -> Any:
        """A batch of these items."""
        if items:
            return self._collate(items)
        return batches.apply(lambda tensor: tensor[:0], self._collate([self._dataset[0]]))


def checked_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader itself, if its records can be drawn by independent coins in its place.

    Raises:
        InputError: with what to do instead.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "an IterableDataset cannot be sampled by independent coins, so no amplification could be claimed. Use a "
            "map-style data set"
        )
    if loader.batch_size is None:
        raise InputError(
            "the loader needs a batch_size: with a batch sampler of its own, who is drawn is not known, so epsilon "
            "would be wrong. Give batch_size, and leave sampling to make_private"
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or getattr(
        loader.sampler, "replacement", False
    ):
        raise InputError(
            f"the loader samples by {type(loader.sampler).__name__}, whose probabilities nobody accounts for: epsilon "
            "would be silently wrong. Leave sampler out; importance sampling does what a weighted sampler is wanted for"
        )
    if loader.drop_last:
        raise InputError(
            "drop_last=True has no meaning where every batch has its own size, and which records are dropped would not "
            "be accounted for. Leave it out"
        )
    return loader
