"""Public schedules over epochs: kappa, and the shape of the noise. All fixed before the data is touched."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpis.errors import InputError


def exponential_decay(rate: float, epochs: int) -> tuple[float, ...]:
    """``exp(-rate·e)`` for epoch ``e = 0, 1, …``: the shape of DP-SGD-Decay."""
    if not (math.isfinite(rate) and rate >= 0):
        raise InputError(f"decay rate must be a finite number >= 0, found {rate!r}")
    if rate * (epochs - 1) > 50:
        raise InputError(
            f"a decay rate of {rate:g} over {epochs} epochs leaves the last epoch almost no noise; "
            "the rate is per epoch, usually 0.001 to 0.01"
        )
    return tuple(math.exp(-rate * e) for e in range(epochs))


def kappa_schedule(kappa: float | str | Sequence[float], epochs: int) -> tuple[float, ...]:
    """A kappa for every epoch from a number, ``"a:b"`` (linear), ``"a,b,c"`` or a sequence.

    >>> kappa_schedule("1:0.5", 3)
    (1.0, 0.75, 0.5)
    >>> kappa_schedule(0.4, 2)
    (0.4, 0.4)
    """
    values = _expand(kappa, epochs)
    if len(values) != epochs:
        raise InputError(
            f"a listed kappa needs one value an epoch: {epochs} epochs, {len(values)} values"
        )
    for value in values:
        if not 0 < value <= 1:
            raise InputError(f"kappa must lie in (0, 1], found {value:g}")
    return values


def _expand(kappa: float | str | Sequence[float], epochs: int) -> tuple[float, ...]:
    if isinstance(kappa, int | float):
        return (float(kappa),) * epochs
    if not isinstance(kappa, str):
        return tuple(float(value) for value in kappa)
    try:
        if ":" in kappa:
            first, last = (float(part) for part in kappa.split(":"))
            steps = max(1, epochs - 1)
            return tuple(first + (last - first) * epoch / steps for epoch in range(epochs))
        values = tuple(float(part) for part in kappa.split(","))
    except ValueError:
        raise InputError(
            f"kappa must be a number, 'first:last' or a comma-separated list, found {kappa!r}"
        ) from None
    return values * epochs if len(values) == 1 else values
