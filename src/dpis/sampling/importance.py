"""Poisson sampling with probabilities proportional to estimated gradient norms: DPIS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import Stream
from dpis.sampling import coins
from dpis.sampling.classes import RecordClasses, slices
from dpis.sampling.draw import Draw, checked_clip_norm, checked_population, checked_rate
from dpis.sampling.estimate import Estimate

UNSEEN = math.inf
USUAL_FLOOR = 0.05
"""In units of the clip norm."""


class ImportanceSampler:
    """Record ``i`` with probability ``rate · g_hat_i / C``, importance estimated from its last norm.

    ``g_hat_i = min(C, headroom · max(last_norm_i, floor))`` where ``last_norm_i`` is the raw norm last
    observed, infinite before the first time. Privacy needs ``g_hat_i <= C`` and independent coins; how good
    the estimate is does not matter to it, and any norm that is observed is safe.

    Records are kept in classes of similar importance. Within a class coins are tossed with the
    probability of its largest importance, skipping from head to head, and a head is kept with probability
    ``g_hat_i / largest``. So a draw takes time for its candidates, not for the population; the state
    takes 12 bytes a record (norm, order, position).

    Args:
        population: how many records there are.
        clip_norm: ``C``.
        headroom: ``k >= 1``, by how much norms may grow until the next visit without being clipped; inf is
            uniform sampling.
        floor: ``g_L``: no norm is estimated lower, so that everybody is looked at again. None: ``0.05 · C``.

    Example:
        >>> from dpis.randomness import Key
        >>> sampler = ImportanceSampler(3, clip_norm=1.0, headroom=2.0)
        >>> sampler.observe(torch.tensor([0, 1]), torch.tensor([0.25, 7.0]))
        >>> sampler.draw(1.0, Key.from_seed(1).stream("coins", step=0))
        Draw(indices=tensor([1, 2]), importance=tensor([1., 1.], dtype=torch.float64))
    """

    def __init__(
        self, population: int, clip_norm: float, *, headroom: float, floor: float | None = None
    ) -> None:
        floor = USUAL_FLOOR * clip_norm if floor is None else floor
        self._estimate = Estimate(clip_norm, headroom, floor)
        self._last_norms = np.full(checked_population(population), UNSEEN, dtype=np.float32)
        self._classes = RecordClasses(
            _labels(self._last_norms, self._estimate), len(self._estimate.bounds)
        )

    @property
    def population(self) -> int:
        """How many records there are. Private."""
        return len(self._last_norms)

    @property
    def clip_norm(self) -> float:
        """``C``, which no importance exceeds."""
        return self._estimate.clip_norm

    @property
    def last_norms(self) -> Tensor:
        """A copy of the norms last observed, float32; inf where a record is unseen. Private."""
        return torch.from_numpy(self._last_norms.copy())

    @property
    def nbytes(self) -> int:
        """What the state takes."""
        return self._last_norms.nbytes + self._classes.nbytes

    def draw(self, rate: float, stream: Stream) -> Draw:
        """The candidates of one step, each with probability ``rate · g_hat_i / C``."""
        bounds = self._estimate.bounds
        chances = checked_rate(rate) * (bounds / self.clip_norm)  # the last is the rate, exactly
        slots, labels = coins.heads(self._classes.sizes, chances, stream)
        records = self._classes.order[slots].astype(np.int64)
        importance = self._estimate.importance(self._last_norms[records])
        kept = np.flatnonzero(stream.uniforms(len(records)) < importance / bounds[labels])
        kept = kept[np.argsort(records[kept])]
        return Draw(torch.from_numpy(records[kept]), torch.from_numpy(importance[kept]))

    def observe(self, indices: Tensor, norms: Tensor) -> None:
        """Store the raw norms of some records, rounded to float32; one that is not finite means unseen.

        Args:
            indices: records in any order, each once.
            norms: their norms before clipping.
        """
        records, values = self._checked(indices, norms)
        with np.errstate(over="ignore"):  # beyond float32 lies inf
            stored = np.where(np.isfinite(values), values, UNSEEN).astype(np.float32)
        self._last_norms[records] = stored
        self._classes.move(records, self._estimate.labels(stored))

    def set_clip_norm(self, clip_norm: float, floor: float | None = None) -> None:
        """Change ``C``, and ``g_L`` (None: in proportion), and sort all records anew."""
        if floor is None:
            floor = self._estimate.floor / self.clip_norm * clip_norm
        self._estimate = Estimate(clip_norm, self._estimate.headroom, floor)
        self._classes.sort(_labels(self._last_norms, self._estimate), len(self._estimate.bounds))

    def sum_of_last_norms(self, bound: float, unseen: float | None = None) -> float:
        """``Σ_i min(bound, last_norm_i)``, to which no record adds more than ``bound``. Private.

        Args:
            bound: the largest summand.
            unseen: what a record counts that was never seen, at most ``bound``. None: ``bound``.
        """
        unseen = bound if unseen is None else unseen
        if not 0 <= unseen <= checked_clip_norm(bound):
            raise InputError(
                f"an unseen record counts from 0 to the bound {bound:g}, found {unseen:g}"
            )
        parts = (self._last_norms[part].astype(np.float64) for part in slices(self.population))
        clipped = (np.where(np.isinf(part), unseen, np.minimum(part, bound)) for part in parts)
        return math.fsum(float(part.sum()) for part in clipped)

    def state_dict(self) -> dict[str, Any]:
        """All that later draws depend on. Secret: it holds norms of records."""
        return {
            "clip_norm": self.clip_norm,
            "headroom": self._estimate.headroom,
            "floor": self._estimate.floor,
            "last_norms": self.last_norms,
            "order": torch.from_numpy(self._classes.order.copy()),
            "sizes": torch.from_numpy(self._classes.sizes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same streams give the same draws."""
        estimate = Estimate(state["clip_norm"], state["headroom"], state["floor"])
        if estimate.headroom != self._estimate.headroom or len(state["order"]) != self.population:
            raise InputError("the state is of a sampler with another population or headroom")
        norms = np.array(state["last_norms"].numpy(), dtype=np.float32)
        if norms.shape != (self.population,) or not np.all(norms >= 0):
            raise InputError("the state of a sampler is damaged: norms are missing or below zero")
        classes = RecordClasses.restore(state["order"].numpy(), state["sizes"].numpy())
        if not np.array_equal(classes.all_labels(), _labels(norms, estimate)):
            raise InputError("the state of a sampler is damaged: records are in the wrong classes")
        self._estimate, self._last_norms, self._classes = estimate, norms, classes

    def _checked(
        self, indices: Tensor, norms: Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        records = indices.detach().cpu().numpy().astype(np.int64, copy=False)
        values = norms.detach().double().cpu().numpy()
        if records.ndim != 1 or records.shape != values.shape:
            raise InputError(
                f"one norm a record is required, found {records.shape} records and {values.shape} norms"
            )
        if np.any(values < 0):
            raise InputError("norms must not be negative; nothing was stored")
        if np.any(records[1:] <= records[:-1]):
            ascending = np.argsort(records)
            records, values = records[ascending], values[ascending]
        if np.any(records[1:] == records[:-1]):
            raise InputError("a record was given two norms at once; nothing was stored")
        if len(records) and not (records[0] >= 0 and records[-1] < self.population):
            raise InputError(
                "norms were given for a record that does not exist; nothing was stored"
            )
        return records, values


def _labels(last_norms: npt.NDArray[np.float32], estimate: Estimate) -> npt.NDArray[np.uint8]:
    labels = np.empty(len(last_norms), dtype=np.uint8)
    for part in slices(len(last_norms)):
        labels[part] = estimate.labels(last_norms[part])
    return labels
