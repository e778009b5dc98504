"""From the norm that was last seen to the importance of a record. The one place to put a better guess."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError
from dpis.sampling.draw import checked_clip_norm

LEAST_FLOOR = 1e-6
"""In units of the clip norm: who is drawn more rarely is not looked at again in any run."""
CLASS_RATIO = 2.0
"""Between neighbouring classes. Fewer classes move records less often, and toss more coins in vain."""


@dataclass(frozen=True)
class Estimate:
    """``g_hat = min(C, headroom · max(last_norm, floor))``, and classes of similar ``g_hat``.

    Privacy needs ``0 < g_hat <= C`` and nothing else, so any other estimate may stand here, as long as it
    depends on no other record and the cap at ``C`` comes last.

    Attributes:
        clip_norm: ``C``.
        headroom: ``k``.
        floor: ``g_L``.
        bounds: the largest importance of every class, ascending; the last is ``C``.
    """

    clip_norm: float
    headroom: float
    floor: float
    bounds: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked_clip_norm(self.clip_norm)
        if not self.headroom >= 1:
            raise InputError(f"headroom must be a number >= 1, or inf, found {self.headroom!r}")
        if not LEAST_FLOOR * self.clip_norm <= self.floor < math.inf:
            raise InputError(
                f"floor must be a number from {LEAST_FLOOR:g} times the clip norm, found {self.floor!r}: "
                "a record of importance zero would never be looked at again"
            )
        least = float(self.importance(np.zeros(1, dtype=np.float32))[0])
        steps = math.ceil(math.log(self.clip_norm / least) / math.log(CLASS_RATIO))
        object.__setattr__(self, "bounds", np.geomspace(least, self.clip_norm, steps + 1))

    def importance(self, last_norms: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """``g_hat`` of records with these norms."""
        norms = np.maximum(last_norms.astype(np.float64), self.floor)
        return np.minimum(self.headroom * norms, self.clip_norm)

    def labels(self, last_norms: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """The first class whose bound is not exceeded."""
        return self.bounds.searchsorted(self.importance(last_norms), side="left")
