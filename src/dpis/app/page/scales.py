"""From numbers to places on an axis, with ticks a person would choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its range, its ticks, where it is drawn."""

    low: float
    high: float
    ticks: tuple[float, ...]
    start: float
    """Where ``low`` is drawn."""
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value is drawn."""
        low, high, at = (
            (math.log(self.low), math.log(self.high), math.log(value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def linear_axis(
    values: Sequence[float],
    start: float,
    end: float,
    *,
    from_zero: bool = False,
    whole: bool = False,
    most_ticks: int = 6,
) -> Axis:
    """An axis that holds all values, from tick to tick.

    Args:
        values: Finite numbers, at least one.
        start: Where the axis begins in the drawing.
        end: Where it ends.
        from_zero: Zero is on it.
        whole: Ticks are whole numbers and the axis ends at the data (epochs).
        most_ticks: So many at most.
    """
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-300):
        pad = 0.5 if whole else (abs(high) / 10 or 1.0)
        low, high = low - pad, high + pad
        if whole:
            return Axis(low, high, (round(high - pad),), start, end)
    step = nice_step((high - low) / (most_ticks - 1))
    if whole:
        step = max(1.0, step)
        inner = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        ticks = [low, *(t for t in inner if low + 0.5 * step <= t)]
        return Axis(low, high, tuple(ticks), start, end)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(step * i, 12) for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], tuple(ticks), start, end)


def log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """A logarithmic axis with ticks at 1, 2 and 5 times powers of ten."""
    low, high = min(values), max(values)
    steps = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        for m in (1, 2, 5)
    ]
    below = max(step for step in steps if step <= low * (1 + 1e-9))
    above = min([step for step in steps if step >= high * (1 - 1e-9)], default=high)
    if below == above:
        below, above = below / 2, above * 2
    ticks = tuple(step for step in steps if below <= step <= above)
    return Axis(below, above, ticks, start, end, log=True)


def nice_step(rough: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def tick_text(value: float) -> str:
    """Short: 20k rather than 20000."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (size == 1e6 and abs(value) >= size):
            return f"{value / size:.4g}{unit}"
    return f"{value:.6g}"
