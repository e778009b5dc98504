"""The user's DataLoader, with our draws as its batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from dpis.batches import tensors_of
from dpis.coupling.shared_rows import refuse_rows_named_twice
from dpis.dropin.session import Session
from dpis.dropin.workers import TensorBatches, WorkerBatches, as_made
from dpis.errors import InputError, MisuseError


class PrivateLoader(DataLoader[Any]):
    """Delivers one batch for every draw of the session; one iteration is one epoch.

    Workers, pinned memory, collate function and transforms are those of the loader it was made from, and batches come
    in the order of their draws. ``len`` is exact: ``floor(n_public / batch_size)``.

    Args:
        original: the user's loader.
        session: draws, and is told what was delivered.
        steps: how many draws an epoch has.
        most_rows: deliver draws in parts of at most so many rows; None: whole.
    """

    def __init__(
        self,
        original: DataLoader[Any],
        session: Session,
        steps: int,
        most_rows: int | None = None,
    ) -> None:
        worker_settings: dict[str, Any] = {}
        if original.num_workers > 0:
            worker_settings = {
                "prefetch_factor": original.prefetch_factor,
                "persistent_workers": original.persistent_workers,
                "multiprocessing_context": original.multiprocessing_context,
            }
        dataset: Any = original.dataset
        if original.collate_fn is default_collate and tensors_of(dataset):
            batches: Dataset[Any] = TensorBatches(dataset)
        else:
            batches = WorkerBatches(dataset, original.collate_fn, session.gradients.row_dim)
        super().__init__(
            batches,
            batch_sampler=_Draws(session, steps, most_rows),
            collate_fn=as_made,
            num_workers=original.num_workers,
            pin_memory=original.pin_memory,
            timeout=original.timeout,
            worker_init_fn=original.worker_init_fn,
            generator=original.generator,
            **worker_settings,
        )
        self._original, self._session, self._steps = original, session, steps

    @property
    def sample_rate(self) -> float:
        """The largest probability with which a record is drawn, in the current epoch or else the first. Public."""
        mechanism = self._session.mechanism
        rates = mechanism.plan.workload.sampling_rate
        return rates[0] if mechanism.terms is None else mechanism.terms.sampling_rate

    def in_parts(self, most_rows: int) -> PrivateLoader:
        """The same draws, delivered a few rows at a time: the step comes after the last part of a draw."""
        return PrivateLoader(self._original, self._session, self._steps, most_rows)

    _is_accelerate_prepared = True
    """``Accelerator.prepare`` takes the loader as it is, instead of rebuilding it from its batch sampler."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        group = self._session.mechanism.group
        with group.stopping():
            iteration = self._session.begin_iteration()
            batches = super().__iter__()
        while True:
            with group.stopping():
                delivered = next(batches, None)
                if delivered is None:
                    self._session.require_stepped()
                    return
                batch, padded_otherwise = delivered
                self._session.deliver(iteration, batch, padded_otherwise)
            yield batch

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise MisuseError(
            "a private loader cannot be copied: two runs would use the same coins and noise, which then cancels"
        )


class _Draws(Sampler[list[int]]):
    """Lists of indices, drawn when they are asked for: ahead of the loop, where workers prefetch."""

    def __init__(self, session: Session, steps: int, most_rows: int | None) -> None:
        self._session, self._steps, self._most_rows = session, steps, most_rows

    def __iter__(self) -> Iterator[list[int]]:
        return self._session.draw_batches(self._most_rows)

    def __len__(self) -> int:
        """Draws of an epoch; in parts, as many as draws of ``b`` records would have: the true number is private."""
        if self._most_rows is None:
            return self._steps
        batch_size = self._session.mechanism.plan.workload.batch_size
        return math.ceil(self._steps * max(1.0, batch_size / self._most_rows))


def batch_of(loader: DataLoader[Any], processes: int, *, per_process: bool) -> int:
    """How many records a step expects over all processes.

    Args:
        loader: its batch size is that of the whole step, as Opacus has it; with a `DistributedSampler` each process's.
        processes: how many there are.
        per_process: it is each process's own, as trainers have it.

    Raises:
        InputError: the sampler was made for another number of processes.
    """
    assert loader.batch_size is not None
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas != processes:
        raise InputError(
            f"the loader's DistributedSampler was made for {sampler.num_replicas} processes, and {processes} train: "
            "how many records a step expects would be unclear. Leave sampler out: records are drawn on their own "
            "process, and batch_size is then that of the whole step"
        )
    per_process = per_process or isinstance(sampler, DistributedSampler)
    return loader.batch_size * (processes if per_process else 1)


def checked_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader itself, if its records can be drawn by independent coins in its place.

    Raises:
        InputError: with what to do instead.
    """
    if isinstance(loader, PrivateLoader):
        raise InputError("the loader is private already: give the one it was made from")
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise InputError(
            f"a torch.utils.data.DataLoader is required, found {type(loader).__name__}: what it does to batches on its "
            "own would be left out, and what it samples is not accounted for. Give torch's DataLoader over a dataset "
            "with __getitem__ and __len__, as it was before Accelerator.prepare or the like; for a stream that fits "
            "into memory DataLoader(list(dataset), ...)"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "an IterableDataset cannot be sampled by independent coins, so no amplification could be claimed and "
            "epsilon would be wrong. Use a map-style dataset, one with __getitem__ and __len__: if it fits into memory "
            "DataLoader(list(dataset), ...); of Hugging Face, load_dataset without streaming=True; else files by index"
        )
    refuse_rows_named_twice(loader.dataset)
    if loader.batch_size is None:
        raise InputError(
            "the loader needs a batch_size: with a batch sampler of its own, who is drawn is not known, so epsilon "
            "would be wrong. Give batch_size, and leave sampling to make_private"
        )
    sampler = loader.sampler
    if type(sampler) is DistributedSampler:  # its share of the records is drawn otherwise
        return loader
    known = type(sampler) in (RandomSampler, SequentialSampler)
    if not known or getattr(sampler, "replacement", False):
        raise InputError(
            f"the loader samples by {type(sampler).__name__}, whose probabilities nobody accounts for: epsilon would "
            "be silently wrong. Leave sampler out (shuffle=True is fine): records are drawn by importance. To balance "
            "classes, weight the losses instead, as CrossEntropyLoss(weight=...) does"
        )
    if len(cast(Any, sampler)) != len(cast(Any, loader.dataset)):
        raise InputError(
            f"the loader's sampler takes {len(cast(Any, sampler))} of {len(cast(Any, loader.dataset))} records: the "
            "private loader draws from all of them. Give torch.utils.data.Subset as the data set instead"
        )
    return loader
