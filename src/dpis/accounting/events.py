"""What a run releases, as values: exactly what accounting needs, and nothing else.

Two kinds of event are enough. A release of one noisy statistic over all records is a `Gaussian`; an
iteration of training is a `PoissonGaussian`. Both are in the normal form of docs/notation.md: the noise
is measured in units of the largest change one record can make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting

from dpis.errors import InputError, shown_number

LEAST_NOISE, MOST_NOISE = 1e-2, 1e12
SMALLEST_RATE = 1e-15
"""Numbers outside are refused: such an event protects nothing, or overflows the accounting."""


def _number(name: str, value: float, least: float, most: float) -> float:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not least <= value <= most:  # a NaN fails both comparisons
        raise InputError(
            f"{name} must be a number from {least:g} to {most:g}, found {shown_number(value)}"
        )
    return float(value)


def _noise_multiplier(value: float) -> float:
    return _number("noise_multiplier", value, LEAST_NOISE, MOST_NOISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussian:
    """One noisy release over all records: ``f(D) + noise_multiplier·Δ·Normal(0, I)``, ``Δ`` the sensitivity of f."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise_multiplier(self.noise_multiplier))

    def to_dp_accounting(self) -> dp_accounting.DpEvent:
        """The same event in dp-accounting's words."""
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def dominates(self, other: Event) -> bool:
        """Whether ``other`` spends no more than this event, whatever the accountant."""
        return isinstance(other, Gaussian) and other.noise_multiplier >= self.noise_multiplier


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonGaussian:
    """One iteration: every record joins by its own coin, then Gaussian noise is added.

    ``sampling_rate`` is ``π``, the largest inclusion probability of a record, and ``noise_multiplier``
    is ``z``, the noise's standard deviation over the largest contribution of one record.
    """

    sampling_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        rate = _number("sampling_rate", self.sampling_rate, SMALLEST_RATE, 1.0)
        object.__setattr__(self, "sampling_rate", rate)
        object.__setattr__(self, "noise_multiplier", _noise_multiplier(self.noise_multiplier))

    def to_dp_accounting(self) -> dp_accounting.DpEvent:
        """The same event in dp-accounting's words."""
        return dp_accounting.PoissonSampledDpEvent(
            self.sampling_rate, dp_accounting.GaussianDpEvent(self.noise_multiplier)
        )

    def dominates(self, other: Event) -> bool:
        """Whether ``other`` spends no more than this event, whatever the accountant.

        A lower rate or more noise is a less informative experiment (docs/soundness.md, "Domination").
        """
        return (
            isinstance(other, PoissonGaussian)
            and other.sampling_rate <= self.sampling_rate
            and other.noise_multiplier >= self.noise_multiplier
        )


Event = Gaussian | PoissonGaussian


def event_to_json(event: Event) -> dict[str, str | float]:
    """The event as a JSON object: its kind, then its numbers."""
    if isinstance(event, Gaussian):
        return {"kind": "gaussian", "noise_multiplier": event.noise_multiplier}
    return {
        "kind": "poisson_gaussian",
        "sampling_rate": event.sampling_rate,
        "noise_multiplier": event.noise_multiplier,
    }


def event_from_json(data: object) -> Event:
    """The inverse of `event_to_json`. A kind that is not known raises: it cannot be accounted for."""
    if not isinstance(data, Mapping):
        raise InputError(f"an event must be a JSON object, found {data!r}")
    fields: dict[str, Any] = dict(data)
    kind = fields.pop("kind", None)
    types: dict[object, type[Gaussian] | type[PoissonGaussian]] = {
        "gaussian": Gaussian,
        "poisson_gaussian": PoissonGaussian,
    }
    if kind not in types:
        raise InputError(f"unknown kind of event {kind!r}: it cannot be accounted for")
    try:
        return types[kind](**fields)
    except TypeError:
        raise InputError(f"event of kind {kind!r} has the wrong fields: {sorted(fields)}") from None


@dataclass(frozen=True, slots=True)
class Composition:
    """Events released one after another, as runs ``(event, count)`` in their order.

    The count lives here and nowhere else: ``n`` copies of an event are one run of count ``n``.
    """

    runs: tuple[tuple[Event, int], ...] = ()

    def __post_init__(self) -> None:
        for _, count in self.runs:
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InputError(f"an event's count must be a whole number >= 0, found {count!r}")

    @classmethod
    def of(cls, *events: Event) -> Composition:
        """The composition of single events."""
        return cls(tuple((event, 1) for event in events))

    def repeat(self, times: int) -> Composition:
        """This composition ``times`` over. Order does not change what is spent, so runs stay whole."""
        return Composition(tuple((event, count * times) for event, count in self.runs))

    def __add__(self, other: Composition) -> Composition:
        return Composition(self.runs + other.runs)

    def __iter__(self) -> Iterator[tuple[Event, int]]:
        """Each distinct event once, with its total count."""
        totals: dict[Event, int] = {}
        for event, count in self.runs:
            totals[event] = totals.get(event, 0) + count
        return iter((event, count) for event, count in totals.items() if count)

    @property
    def events(self) -> int:
        """How many events there are in all."""
        return sum(count for _, count in self.runs)

    def to_dp_accounting(self) -> dp_accounting.DpEvent:
        """The same composition in dp-accounting's words."""
        return dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(event.to_dp_accounting(), n) for event, n in self]
        )


def compose(parts: Iterable[Composition]) -> Composition:
    """All parts, one after another."""
    return Composition(tuple(run for part in parts for run in part.runs))
