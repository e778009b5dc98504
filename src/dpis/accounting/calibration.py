"""The smallest noise that keeps a promise: root-finding that knows no mechanism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpis.errors import InputError

SMALLEST_PARAMETER, LARGEST_PARAMETER = 1e-2, 1e10
_LONGEST_STEP = math.log(16.0)
_SMALLEST_LOG = math.log(1e-300)
_STEEPEST = 20.0
"""A slope beyond it may be that of a knee, which says nothing of where the root is."""
_PATIENCE = 3
"""Evaluations that the secant has to halve the bracket."""


@dataclass(frozen=True, slots=True)
class _Point:
    """An evaluated parameter: its logarithm, and the logarithm of epsilon over the target there."""

    log_x: float
    log_excess: float

    @property
    def private(self) -> bool:
        return self.log_excess <= 0.0

    @property
    def informative(self) -> bool:
        """Neither infinite nor zero, so that a slope through it means something."""
        return math.isfinite(self.log_excess) and self.log_excess > _SMALLEST_LOG / 2


def smallest_parameter(
    epsilon_of: Callable[[float], float],
    target: float,
    *,
    guess: float,
    slope: float | None = None,
    tolerance: float = 3e-4,
    most_evaluations: int = 120,
) -> float:
    """The smallest ``x`` with ``epsilon_of(x) <= target``, for a decreasing function, from the private side.

    A secant in log-log coordinates (epsilon is nearly a power of the noise) inside a bracket, which is halved where the
    secant does not shrink it: near a knee, where epsilon falls by orders of magnitude, slopes mislead.
    The value returned was itself evaluated and met the target: rounding can cost noise, never privacy.

    Args:
        epsilon_of: Decreasing; may return 0 or ``inf``. NaN counts as ``inf``.
        target: Above 0.
        guess: Where to look first.
        slope: ``d log epsilon / d log x`` near the guess, if known: it saves an evaluation.
        tolerance: The result is about this much (relative) above the tightest parameter at most.
        most_evaluations: After so many the smallest one found so far has to do.

    Raises:
        InputError: No parameter up to `LARGEST_PARAMETER` meets the target. (Below `SMALLEST_PARAMETER` none is tried:
            so little noise would be no protection at all.)
    """
    low, high = -math.inf, math.inf  # the largest log x known too small, the smallest known private
    width, evaluations_since = math.inf, 0  # of the bracket when it was last halved
    before: _Point | None = None
    log_x = math.log(guess)
    for _ in range(most_evaluations):
        if log_x > math.log(LARGEST_PARAMETER):
            break
        log_x = max(log_x, math.log(SMALLEST_PARAMETER))
        now = _Point(log_x, _log_excess(epsilon_of(math.exp(log_x)), target))
        low, high = (low, log_x) if now.private else (log_x, high)
        slope = _slope(before, now) or slope
        at_the_end = now.private and log_x <= math.log(SMALLEST_PARAMETER)
        if at_the_end or high - low <= tolerance or _close(now, slope, tolerance):
            break
        halved = high - low <= width / 2
        width, evaluations_since = (high - low, 0) if halved else (width, evaluations_since + 1)
        patient = evaluations_since < _PATIENCE
        log_x = _propose(now, slope, low, high, tolerance) if patient else (low + high) / 2
        before = now
    if math.isfinite(high):
        return math.exp(high)
    raise InputError(
        f"no noise meets epsilon = {target:g} here: what is released beside the gradients, or the resolution "
        "of the accounting, already costs that much. Ask for a larger epsilon or delta, or release less"
    )


def _log_excess(epsilon: float, target: float) -> float:
    """Of epsilon over the target. What cannot be established (NaN) is not private."""
    if math.isnan(epsilon):
        return math.inf
    return (math.log(epsilon) if epsilon > 0 else _SMALLEST_LOG) - math.log(target)


def _slope(before: _Point | None, now: _Point) -> float | None:
    """D log epsilon / d log x through the last two points, where it can be trusted."""
    if before is None or not (before.informative and now.informative):
        return None
    slope = (now.log_excess - before.log_excess) / (now.log_x - before.log_x)
    return slope if slope < -1e-6 else None


def _close(now: _Point, slope: float | None, tolerance: float) -> bool:
    """Whether the root is within ``tolerance`` below a private point, by the local slope."""
    if slope is None or slope < -_STEEPEST or not (now.private and now.informative):
        return False
    return now.log_excess / slope <= tolerance


def _propose(now: _Point, slope: float | None, low: float, high: float, tolerance: float) -> float:
    """Where to look next: the secant's root, a hair on the private side, kept inside the bracket."""
    if now.informative:
        step = -now.log_excess / (slope if slope is not None else -1.0) + tolerance / 3
        step = min(max(step, -_LONGEST_STEP), _LONGEST_STEP)
    else:
        step = -_LONGEST_STEP if now.private else _LONGEST_STEP
    proposal = now.log_x + step
    if low < proposal < high:
        return proposal
    if math.isinf(low) or math.isinf(high):
        return now.log_x + (-_LONGEST_STEP if now.private else _LONGEST_STEP)
    return (low + high) / 2
