"""Everything public that fixes a run, settled and validated before any data is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dpis.accounting import CountSource, Release
from dpis.errors import InputError
from dpis.options import Accountant, Contribution, Method, NormSum, Privacy

LARGEST_DEFAULT_BATCH = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipping:
    """``C_{e+1} = clip(λ·K*/n_public, lowest, ceiling)``, from an accounted release an epoch.

    Attributes:
        ceiling: ``C*``, the public bound up to which norms are counted.
        scale: ``λ``.
        lowest: the public lower bound of the clip norm.
    """

    ceiling: float
    scale: float
    lowest: float

    def next_clip_norm(self, noisy_norm_sum: float, n_public: int) -> float:
        """The clip norm of the next epoch, within its public bounds whatever the noise gave."""
        proposed = self.scale * noisy_norm_sum / n_public
        if math.isnan(proposed):
            return self.ceiling
        return min(max(proposed, self.lowest), self.ceiling)


@dataclass(frozen=True, kw_only=True)
class Config(Privacy):
    """`Privacy`, with what data and loop bring to it: nothing is left open.

    Attributes:
        n_public: the declared number of records (of users, for user-level privacy).
        n_public_source: where that number comes from.
        batch_size: ``b``; an epoch has ``floor(n_public / b)`` steps.
        epochs: ``E``.
        clip_norm: ``C``, in the first epoch.
        releases: other noisy statistics that come before training.
    """

    if TYPE_CHECKING:  # names have become members
        method: Method
        accountant: Accountant
        contribution: Contribution
        norm_sum: NormSum
        kappa: float | str | tuple[float, ...] | None

    n_public: int = field()
    n_public_source: CountSource = CountSource.GIVEN
    batch_size: int
    epochs: int
    clip_norm: float = 1.0
    releases: tuple[Release, ...] = ()

    @classmethod
    def settle(
        cls,
        privacy: Privacy,
        *,
        records: int,
        batch_size: int | None,
        epochs: int,
        clip_norm: float | None = None,
        releases: tuple[Release, ...] = (),
    ) -> Config:
        """Fill in what was left open.

        Args:
            privacy: what was asked for.
            records: how many there are. Read only where no public number is given, and public from then on.
            batch_size: None: a fifth of the records, at most 8,192, since large batches suffer least from noise.
            epochs: of the run.
            clip_norm: the default.
            releases: other noisy statistics that come before training.
        """
        chosen: dict[str, Any] = {one.name: getattr(privacy, one.name) for one in fields(Privacy)}
        if privacy.n_public is None:
            chosen |= {"n_public": records, "n_public_source": CountSource.DATASET_LENGTH}
        if privacy.clip_norm == "auto" and privacy.clip_scale is None:
            chosen["clip_scale"] = 1.0
        if privacy.clip_norm in (None, "auto"):
            chosen["clip_norm"] = cls.clip_norm if clip_norm is None else clip_norm
        if batch_size is None:
            batch_size = max(1, min(LARGEST_DEFAULT_BATCH, chosen["n_public"] // 5))
        return cls(**chosen, batch_size=batch_size, epochs=epochs, releases=releases)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.release_n and self.n_public_source is not CountSource.GIVEN:
            raise InputError(
                "release_n needs n_public too, a rough public number of records: the noise of the count and the "
                "order of the filter are fixed from it before the data is touched"
            )
        clipping = self.clipping
        if clipping is not None and not clipping.lowest <= self.clip_norm <= clipping.ceiling:
            raise InputError(
                f"the first clip norm must lie in [clip_lowest, clip_ceiling] = [{clipping.lowest:g}, "
                f"{clipping.ceiling:g}], found {self.clip_norm:g}"
            )
        if clipping is not None and not self.method.by_importance:
            raise InputError(
                f"{self.method} keeps no norms to adapt the clip norm from: use dpis with a large headroom instead"
            )
        if not self.method.private and (self.releases or self.release_n or clipping):
            raise InputError("sgd is not private: it releases no noisy statistics, leave them out")

    @property
    def clipping(self) -> AdaptiveClipping | None:
        """How the clip norm adapts, if any of its options is given; None: it stays."""
        ceiling, lowest, scale = self.clip_ceiling, self.clip_lowest, self.clip_scale
        if ceiling is lowest is scale is None:
            return None
        return AdaptiveClipping(
            ceiling=4 * self.clip_norm if ceiling is None else ceiling,
            lowest=self.clip_norm / 100 if lowest is None else lowest,
            scale=1.0 if scale is None else scale,
        )
