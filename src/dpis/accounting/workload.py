"""What a run will do, in public numbers alone: how often it samples, at which rate, what else it releases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dpis.accounting.events import Composition, Event, Gaussian, PoissonGaussian
from dpis.accounting.schedule import kappa_schedule
from dpis.errors import InputError, shown_number

GRADIENT, NORM_SUM, COUNT = "gradient", "norm-sum", "count"
"""The ledger's labels: a training iteration, a released norm sum K' or K*, a noisy number of records."""

MOST_RECORDS, MOST_EPOCHS = 10**12, 100_000


def _count(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(
            f"{name} must be a whole number from 1 to {most:,}, found {shown_number(value)}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Sampling of a whole run. In the paper's letters: ``b``, ``n_public`` and a ``kappa`` for each epoch."""

    n_public: int
    batch_size: int
    kappa: tuple[float, ...]

    def __post_init__(self) -> None:
        _count("n_public", self.n_public, MOST_RECORDS)
        _count("batch size", self.batch_size, MOST_RECORDS)
        _count("epochs", len(self.kappa), MOST_EPOCHS)
        if self.batch_size > self.n_public:
            raise InputError(
                f"batch size {self.batch_size} is larger than n_public {self.n_public}: "
                "no record can be drawn with a probability above 1"
            )
        kappa_schedule(self.kappa, len(self.kappa))
        largest = max(self.equivalent_batch)
        if largest > self.n_public * (1 + 1e-12):
            raise InputError(
                f"the equivalent batch (batch size / kappa) reaches {largest:g}, above n_public "
                f"{self.n_public}: use a larger kappa or a smaller batch"
            )

    @classmethod
    def create(
        cls,
        *,
        n_public: int,
        batch_size: int,
        epochs: int,
        kappa: float | str | Sequence[float] | None = None,
        equivalent_batch: float | None = None,
    ) -> Workload:
        """From ``kappa`` (default 1) or the equivalent batch ``B = b / kappa``; both is an error."""
        _count("epochs", epochs, MOST_EPOCHS)
        _count("batch size", batch_size, MOST_RECORDS)
        if kappa is not None and equivalent_batch is not None:
            raise InputError(
                "kappa and equivalent batch both given: each fixes the other (B = b / kappa), give one"
            )
        if equivalent_batch is not None:
            if not batch_size <= equivalent_batch < math.inf:
                raise InputError(
                    f"equivalent batch must be at least the batch size {batch_size}, found {equivalent_batch:g}"
                )
            kappa = batch_size / equivalent_batch
        return cls(n_public, batch_size, kappa_schedule(1.0 if kappa is None else kappa, epochs))

    @property
    def epochs(self) -> int:
        """``E``."""
        return len(self.kappa)

    @property
    def steps_per_epoch(self) -> int:
        """``T = floor(n_public / b)``, everywhere."""
        return self.n_public // self.batch_size

    @property
    def steps(self) -> int:
        """Iterations of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def equivalent_batch(self) -> tuple[float, ...]:
        """``B = b / kappa`` by epoch: the batch of the DP-SGD that has the same privacy and noise."""
        return tuple(self.batch_size / kappa for kappa in self.kappa)

    @property
    def sampling_rate(self) -> tuple[float, ...]:
        """``π = B / n_public`` by epoch: the largest inclusion probability of a record."""
        return tuple(min(1.0, B / self.n_public) for B in self.equivalent_batch)


class Cadence(StrEnum):
    """When a noisy statistic is released."""

    ONCE = "once"
    """Before training."""

    EACH_EPOCH = "each-epoch"
    """At the start of every epoch."""

    BETWEEN_EPOCHS = "between-epochs"
    """At the end of every epoch but the last: it can only serve the next one."""


@dataclass(frozen=True, slots=True)
class Release:
    """A predeclared noisy statistic over all records (feature statistics, K*), beside the gradients."""

    label: str
    noise_multiplier: float
    cadence: Cadence = Cadence.ONCE

    def __post_init__(self) -> None:
        if self.label == GRADIENT:
            raise InputError(
                f"{GRADIENT!r} is the label of training iterations: give the release another"
            )

    @property
    def event(self) -> Gaussian:
        """What one release spends: an unsampled Gaussian."""
        return Gaussian(noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """``count`` consecutive events of one kind, under the label the ledger gives them."""

    label: str
    event: Event
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            raise InputError(f"a label must be text, found {self.label!r}")
        _count("a planned count", self.count, MOST_RECORDS)


def planned_runs(
    workload: Workload, noise_multipliers: Sequence[float], releases: Sequence[Release]
) -> Iterator[PlannedRun]:
    """Every event of a run, in the order in which it will happen."""

    def due(cadence: Cadence) -> Iterator[PlannedRun]:
        return (PlannedRun(r.label, r.event, 1) for r in releases if r.cadence is cadence)

    yield from due(Cadence.ONCE)
    for epoch, (rate, z) in enumerate(
        zip(workload.sampling_rate, noise_multipliers, strict=True), start=1
    ):
        yield from due(Cadence.EACH_EPOCH)
        step = PoissonGaussian(sampling_rate=rate, noise_multiplier=z)
        yield PlannedRun(GRADIENT, step, workload.steps_per_epoch)
        if epoch < workload.epochs:
            yield from due(Cadence.BETWEEN_EPOCHS)


def releases_over_run(workload: Workload, releases: Sequence[Release]) -> Composition:
    """What the releases beside the gradients spend in the whole run."""
    if not releases:
        return Composition()
    runs = planned_runs(workload, (1.0,) * workload.epochs, releases)
    return composition_of([run for run in runs if run.label != GRADIENT])


def composition_of(runs: Sequence[PlannedRun]) -> Composition:
    """What the runs spend together."""
    return Composition(tuple((run.event, run.count) for run in runs))
