"""Poisson sampling with probabilities proportional to estimated gradient norms: DPIS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import Coins
from dpis.sampling.classes import RecordClasses, slices
from dpis.sampling.coins import heads
from dpis.sampling.draw import Draw, checked_clip_norm, checked_rate
from dpis.sampling.estimate import Estimate
from dpis.sampling.shards import Shards

UNSEEN = math.inf
USUAL_FLOOR = 0.05
"""In units of the clip norm."""


class ImportanceSampler:
    """Record ``i`` with probability ``rate · g_hat_i / C``, importance estimated from its last norm.

    ``g_hat_i = min(C, headroom · max(last_norm_i, floor))`` where ``last_norm_i`` is the raw norm last
    observed, infinite before the first time. Privacy needs ``g_hat_i <= C`` and independent coins; how good
    the estimate is does not matter to it, and any norm that is observed is safe.

    Records are kept in classes of similar importance, shard by shard. Within a class coins are tossed with the
    probability of its largest importance, skipping from head to head, and a head is kept with probability
    ``g_hat_i / largest``. So a draw takes time for its candidates, not for the population; the state
    takes 12 bytes an own record (norm, order, position).

    Args:
        shards: the own ones: which records can be drawn, and which have a state here.
        clip_norm: ``C``.
        headroom: ``k >= 1``, by how much norms may grow until the next visit without being clipped; inf is
            uniform sampling.
        floor: ``g_L``: no norm is estimated lower, so that everybody is looked at again. None: ``0.05 · C``.

    Example:
        >>> from dpis.randomness import Key
        >>> sampler = ImportanceSampler(Shards.whole(3), clip_norm=1.0, headroom=2.0)
        >>> sampler.observe(torch.tensor([0, 1]), torch.tensor([0.25, 7.0]))
        >>> sampler.draw(1.0, Key.from_seed(1).coins("draw", step=0))
        Draw(indices=tensor([1, 2]), importance=tensor([1., 1.], dtype=torch.float64))
    """

    def __init__(
        self, shards: Shards, clip_norm: float, *, headroom: float, floor: float | None = None
    ) -> None:
        floor = USUAL_FLOOR * clip_norm if floor is None else floor
        self._shards = shards
        self._own_bounds = shards.boundaries - shards.records.start  # among own records
        self._estimate = Estimate(clip_norm, headroom, floor)
        self._last_norms = np.full(len(shards.records), UNSEEN, dtype=np.float32)
        self._classes = RecordClasses(
            _labels(self._last_norms, self._estimate),
            len(self._estimate.bounds),
            self._own_bounds,
        )

    @property
    def shards(self) -> Shards:
        """Its own."""
        return self._shards

    @property
    def population(self) -> int:
        """How many records all processes have together. Private."""
        return self._shards.population

    @property
    def clip_norm(self) -> float:
        """``C``, which no importance exceeds."""
        return self._estimate.clip_norm

    @property
    def last_norms(self) -> Tensor:
        """A copy of the norms last observed of own records, float32; inf where one is unseen. Private."""
        return torch.from_numpy(self._last_norms.copy())

    @property
    def nbytes(self) -> int:
        """What the state takes."""
        return self._last_norms.nbytes + self._classes.nbytes

    def draw(self, rate: float, coins: Coins) -> Draw:
        """The own candidates of one step, each with probability ``rate · g_hat_i / C``."""
        bounds, own = self._estimate.bounds, self._shards
        chances = checked_rate(rate) * (bounds / self.clip_norm)  # the last is the rate, exactly
        slots, labels, uniforms = heads(self._classes.sizes, chances, coins, own.numbers)
        records = self._classes.order[slots].astype(np.int64)
        importance = self._estimate.importance(self._last_norms[records])
        kept = (uniforms < importance / bounds[labels]).nonzero()[0]
        kept = kept[records[kept].argsort()]
        records = records[kept] + own.records.start
        return Draw(torch.from_numpy(records), torch.from_numpy(importance[kept]))

    def observe(self, indices: Tensor, norms: Tensor) -> None:
        """Store the raw norms of some records, rounded to float32; one that is not finite means unseen.

        Args:
            indices: own records in any order, each once.
            norms: their norms before clipping.
        """
        records, values = self._checked(indices, norms)
        with np.errstate(over="ignore"):  # beyond float32 lies inf
            stored = np.where(np.isfinite(values), values, UNSEEN).astype(np.float32)
        self._last_norms[records] = stored
        self._classes.move(records, self._estimate.labels(stored))

    def set_clip_norm(self, clip_norm: float, floor: float | None = None) -> None:
        """Change ``C``, and ``g_L`` (None: in proportion), and sort all own records anew."""
        if floor is None:
            floor = self._estimate.floor / self.clip_norm * clip_norm
        self._estimate = Estimate(clip_norm, self._estimate.headroom, floor)
        self._classes.sort(_labels(self._last_norms, self._estimate), len(self._estimate.bounds))

    def sum_of_last_norms(
        self, bound: float, unseen: float | None = None
    ) -> npt.NDArray[np.float64]:
        """``Σ_i min(bound, last_norm_i)`` of each own shard, to which no record adds more than ``bound``. Private.

        `math.fsum` over the shards of all processes gives the whole, however they are dealt out.

        Args:
            bound: the largest summand.
            unseen: what a record counts that was never seen, at most ``bound``. None: ``bound``.
        """
        unseen = bound if unseen is None else unseen
        if not 0 <= unseen <= checked_clip_norm(bound):
            raise InputError(
                f"an unseen record counts from 0 to the bound {bound:g}, found {unseen:g}"
            )
        return np.array([self._sum(shard, bound, unseen) for shard in range(len(self._shards))])

    def _sum(self, shard: int, bound: float, unseen: float) -> float:
        """Over one own shard, and in the same way whichever others are owned."""
        norms = self._of_shard(self._last_norms, shard)
        parts = (norms[part].astype(np.float64) for part in slices(len(norms)))
        clipped = (np.where(np.isinf(part), unseen, np.minimum(part, bound)) for part in parts)
        return math.fsum(float(part.sum()) for part in clipped)

    def state_dict(self) -> dict[str, Any]:
        """All that later draws depend on, shard by shard. Secret: it holds norms of records."""
        bounds, sizes = self._own_bounds, self._classes.sizes
        return {
            "clip_norm": self.clip_norm,
            "headroom": self._estimate.headroom,
            "floor": self._estimate.floor,
            "shards": {
                number: {
                    "last_norms": _tensor(self._of_shard(self._last_norms, shard)),
                    "order": _tensor(
                        self._of_shard(self._classes.order, shard) - np.int32(bounds[shard])
                    ),
                    "sizes": _tensor(sizes[shard]),
                }
                for shard, number in enumerate(self._shards.numbers.tolist())
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same coins give the same draws.

        Args:
            state: holds the own shards, and perhaps others: those of several processes can be put together.
        """
        estimate = Estimate(state["clip_norm"], state["headroom"], state["floor"])
        if estimate.headroom != self._estimate.headroom:
            raise InputError("the state is of a sampler with another headroom")
        parts, bounds = self._own_parts(state["shards"]), self._own_bounds
        for part, size in zip(parts, self._shards.sizes.tolist(), strict=True):
            if len(part["last_norms"]) != size or len(part["order"]) != size:
                raise InputError(
                    "the state is of a sampler with another population or number of shards"
                )
            if len(part["sizes"]) != len(estimate.bounds):
                raise InputError("the state of a sampler is damaged: its classes do not add up")
        norms = _joined([part["last_norms"] for part in parts], np.float32)
        if not np.all(norms >= 0):
            raise InputError("the state of a sampler is damaged: norms are below zero")
        order = _joined([part["order"] for part in parts], np.int32)
        for begin, end in pairwise(bounds.tolist()):
            order[begin:end] += np.int32(begin)
        sizes = _joined([part["sizes"] for part in parts], np.int64)
        classes = RecordClasses.restore(
            order, sizes.reshape(len(parts), len(estimate.bounds)), bounds
        )
        if not np.array_equal(classes.all_labels(), _labels(norms, estimate)):
            raise InputError("the state of a sampler is damaged: records are in the wrong classes")
        self._estimate, self._last_norms, self._classes = estimate, norms, classes

    def _own_parts(self, shards: Mapping[int, Any]) -> list[Mapping[str, Any]]:
        """The states of the own shards, none of which may be missing."""
        missing = [number for number in self._shards.numbers.tolist() if number not in shards]
        if missing:
            raise InputError(
                f"resume that reassigns records without their state: the state of {len(missing)} of "
                f"{len(self._shards)} own shards is missing (the first is shard {missing[0]}). Who has been seen there "
                "would be forgotten, and other records drawn than in the run that is resumed: the same noise on "
                "another sum gives both away. Put the states of all processes together. Nothing was changed"
            )
        return [shards[number] for number in self._shards.numbers.tolist()]

    def _of_shard(self, table: npt.NDArray[Any], shard: int) -> npt.NDArray[Any]:
        begin, end = self._own_bounds[shard : shard + 2]
        return table[begin:end]

    def _checked(
        self, indices: Tensor, norms: Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Records, ascending and counted from the first own one, and their norms."""
        records = indices.detach().cpu().numpy().astype(np.int64, copy=False)
        values = norms.detach().double().cpu().numpy()
        if records.ndim != 1 or records.shape != values.shape:
            raise InputError(
                f"one norm a record is required, found {records.shape} records and {values.shape} norms"
            )
        if (values < 0).any():
            raise InputError("norms must not be negative; nothing was stored")
        if (records[1:] <= records[:-1]).any():
            ascending = np.argsort(records)
            records, values = records[ascending], values[ascending]
            if (records[1:] == records[:-1]).any():
                raise InputError("a record was given two norms at once; nothing was stored")
        own = self._shards.records
        if len(records) and not (own.start <= records[0] and records[-1] < own.stop):
            raise InputError(
                f"norms were given for a record that does not exist here: {len(own)} records from {own.start} on do; "
                "nothing was stored"
            )
        return records - own.start, values


def _labels(last_norms: npt.NDArray[np.float32], estimate: Estimate) -> npt.NDArray[np.uint8]:
    labels = np.empty(len(last_norms), dtype=np.uint8)
    for part in slices(len(last_norms)):
        labels[part] = estimate.labels(last_norms[part])
    return labels


def _tensor(table: npt.NDArray[Any]) -> Tensor:
    """A copy."""
    return torch.from_numpy(table.copy())


def _joined(tables: Sequence[Tensor], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """One behind the other, in a table of their own."""
    joined = np.concatenate([np.zeros(0, dtype), *(table.numpy() for table in tables)])
    return joined.astype(dtype, copy=False)
