"""What a person chooses for a run: public numbers, validated before any data is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from dpis import defaults
from dpis.accounting import Accountant, CountSource, Release
from dpis.choices import chosen
from dpis.errors import InputError


class Method(StrEnum):
    """A way to train, by name."""

    DPIS = "dpis"
    """Importance sampling, every noise level fixed beforehand."""
    DPIS_ADAPTIVE = "dpis-adaptive"
    """The paper's: importance sampling, noise solved from released norm sums under a filter."""
    DP_SGD = "dp-sgd"
    """Uniform sampling, constant noise."""
    DP_SGD_DECAY = "dp-sgd-decay"
    """Uniform sampling, noise that falls exponentially by epoch."""
    SGD = "sgd"
    """No protection at all: the ceiling to compare with."""

    @classmethod
    def parse(cls, name: str) -> Method:
        """The method of that name."""
        return chosen(cls, "method", name)

    @property
    def private(self) -> bool:
        """Whether a guarantee comes with it."""
        return self is not Method.SGD

    @property
    def by_importance(self) -> bool:
        """Whether records are drawn by their gradient norms."""
        return self in (Method.DPIS, Method.DPIS_ADAPTIVE)


class Contribution(StrEnum):
    """What a drawn record adds to the sum."""

    WEIGHT = "weight"
    """Its clipped gradient over its importance, always."""
    REJECT = "reject"
    """Its unit gradient, if a second coin accepts it (the paper's form)."""

    @classmethod
    def parse(cls, name: str) -> Contribution:
        """The form of that name."""
        return chosen(cls, "contribution", name)


class NormSum(StrEnum):
    """How the adaptive method learns the sum of norms that it releases."""

    FULL_PASS = "full-pass"
    """Every record's norm is computed anew at the start of every epoch (the paper's)."""
    STALE = "stale"
    """The norms as last seen; records never seen count as the clip norm."""

    @classmethod
    def parse(cls, name: str) -> NormSum:
        """The way of that name."""
        return chosen(cls, "norm sum", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipping:
    """``C_{e+1} = clip(λ·K*/n_public, lowest, ceiling)``, from an accounted release an epoch.

    Attributes:
        ceiling: ``C*``, the public bound up to which norms are counted.
        quantile: ``λ``.
        lowest: the public lower bound of the clip norm.
    """

    ceiling: float
    quantile: float = 1.0
    lowest: float = 1e-3

    def __post_init__(self) -> None:
        _positive("c_star", self.ceiling)
        _positive("lambda", self.quantile)
        _positive("c_min", self.lowest)
        if self.lowest > self.ceiling:
            raise InputError(
                f"c_min must not be above c_star, found {self.lowest:g} > {self.ceiling:g}"
            )

    def next_clip_norm(self, noisy_norm_sum: float, n_public: int) -> float:
        """The clip norm of the next epoch, within its public bounds whatever the noise gave."""
        proposed = self.quantile * noisy_norm_sum / n_public
        if math.isnan(proposed):
            return self.ceiling
        return min(max(proposed, self.lowest), self.ceiling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything public that fixes a run.

    Attributes:
        method: which of the methods.
        epsilon: the budget; ignored by `sgd`.
        delta: the budget; ignored by `sgd`.
        n_public: the declared number of records (of users, for user-level privacy).
        n_public_source: where that number comes from.
        batch_size: ``b``; an epoch has ``floor(n_public / b)`` steps.
        epochs: ``E``.
        kappa: norm utilisation, a number or a schedule; default 1.
        equivalent_batch: ``B = b / kappa``, instead of ``kappa``.
        headroom: ``k``: how much a record's norm may have grown since it was last seen.
        floor: ``g_L / C``: no record is taken to have a smaller norm than this share of the clip norm.
        contribution: what a drawn record adds.
        clip_norm: ``C``, in the first epoch.
        clipping: how the clip norm adapts; None: it stays.
        a_e: adaptive: the share of epochs that reserve as if kappa were 1.
        pi_cap: adaptive: the largest inclusion probability.
        norm_sum: adaptive: how the norm sum is computed.
        decay_rate: of `dp-sgd-decay`, per epoch.
        accountant: of the predeclared methods.
        releases: other noisy statistics that come before training.
        release_n: release a noisy number of records first.
    """

    method: Method
    epsilon: float = 1.0
    delta: float = 1e-5
    n_public: int
    n_public_source: CountSource = CountSource.GIVEN
    batch_size: int
    epochs: int
    kappa: float | str | tuple[float, ...] | None = None
    equivalent_batch: float | None = None
    headroom: float = defaults.HEADROOM
    floor: float = 0.05
    contribution: Contribution = Contribution.WEIGHT
    clip_norm: float = 1.0
    clipping: AdaptiveClipping | None = None
    a_e: float = defaults.A_E
    pi_cap: float = 0.5
    norm_sum: NormSum = NormSum.FULL_PASS
    decay_rate: float = 0.005
    accountant: Accountant = Accountant.PLD
    releases: tuple[Release, ...] = ()
    release_n: bool = False

    def __post_init__(self) -> None:
        _positive("clip norm", self.clip_norm)
        if not 0 < self.floor <= 1:
            raise InputError(
                f"g_L must lie in (0, 1], in units of the clip norm, found {self.floor!r}"
            )
        if not self.headroom >= 1:
            raise InputError(f"headroom k must be at least 1, found {self.headroom!r}")
        if self.release_n and self.n_public_source is not CountSource.GIVEN:
            raise InputError(
                "release_n needs n_public too, a rough public number of records: the noise of the count and the "
                "order of the filter are fixed from it before the data is touched"
            )
        if self.clipping is not None and not (
            self.clipping.lowest <= self.clip_norm <= self.clipping.ceiling
        ):
            raise InputError(
                f"the first clip norm must lie in [c_min, c_star] = [{self.clipping.lowest:g}, "
                f"{self.clipping.ceiling:g}], found {self.clip_norm:g}"
            )
        if self.clipping is not None and not self.method.by_importance:
            raise InputError(
                f"{self.method} keeps no norms to adapt the clip norm from: use dpis with a large headroom instead"
            )
        if not self.method.private and (self.releases or self.release_n or self.clipping):
            raise InputError("sgd is not private: it releases no noisy statistics, leave them out")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be a finite number above 0, found {value!r}")
