"""What an audit found: claim, bound, estimate, and how they may be read. As words, as JSON, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpis.auditing.tradeoff import Curve
from dpis.errors import InputError

Array = NDArray[np.float64]
Points = tuple[tuple[float, float], ...]
"""``(FPR, TPR)``."""

FILE = "audit.json"
"""Where a run's folder keeps them."""

LOW_FALSE_POSITIVE_RATE = 0.01
_DRAWN = 41


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an audit found.

    Attributes:
        attack: "mechanism", "model", "white-box" or "black-box".
        epsilon: claimed.
        delta: claimed.
        bound: epsilon is at least this, at `bound_delta`, but for a chance of ``1 - confidence``.
        bound_delta: the delta that the bound is for.
        claim_at_bound_delta: what the claim says there.
        curve_bound: by trade-off curves, at the claimed delta: of the claim's own curve with its noise scaled; None
            where the claim has no curve of its own.
        estimate: a guess at epsilon, at the claimed delta; not a bound.
        ceiling: the bound that so many canaries give to an attacker of a mechanism that leaks all that it may; None
            where there are as many runs as one likes.
        curve_ceiling: the same of `curve_bound`.
        confidence: of either bound.
        canaries: how many there were, or how many runs.
        guesses: how many canaries the attack guessed about; None where it did not guess.
        right: how many of these it got right.
        advantage: of membership inference, the most that the claim allows.
        true_positives: the most that the claim allows at a false positive rate of 0.01.
        claim_curve: what the claim allows.
        attack_points: what the attack did.
        accuracy: of the model that was audited, and without canaries; None where there is none.
        notes: what else a reader must know.
    """

    attack: str
    epsilon: float
    delta: float
    bound: float
    bound_delta: float
    claim_at_bound_delta: float
    curve_bound: float | None
    estimate: float
    ceiling: float | None = None
    curve_ceiling: float | None = None
    confidence: float
    canaries: int
    guesses: int | None = None
    right: int | None = None
    advantage: float
    true_positives: float
    claim_curve: Points
    attack_points: Points
    accuracy: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def refuted(self) -> bool:
        """Whether what leaked is more than the claim allows: by one bound, so that there is one chance to err."""
        if self.curve_bound is not None:
            return self.curve_bound > self.epsilon
        return self.bound > self.claim_at_bound_delta

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {name: _plain(value) for name, value in asdict(self).items()}
        return {**values, "refuted": self.refuted}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Findings:
        """The inverse of `to_json`."""
        known = {field.name for field in fields(cls)}
        read: dict[str, Any] = {n: _frozen(v) for n, v in values.items() if n in known}
        if read.get("estimate", 0) is None:
            read["estimate"] = math.nan
        try:
            found = cls(**read)
            in_words(found)  # which asks every figure for its digits
            _ = [(float(x), float(y)) for x, y in (*found.claim_curve, *found.attack_points)]
        except (TypeError, ValueError) as error:
            raise InputError(f"these are no findings of an audit: {error}") from None
        return found

    def write(self, path: Path) -> None:
        """As a file of JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Findings:
        """As `write` left them."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"cannot read {path}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# ── curves and points to draw ────────────────────────────────────────────────────────────────────────


def drawn_curve(curve: Curve) -> Points:
    """Some points of a curve, dense where false alarms are rare."""
    rates = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, _DRAWN - 1)])
    return tuple(zip(rates.tolist(), curve.true_positive_rate(rates).tolist(), strict=True))


def attack_points(scores_in: Array, scores_out: Array) -> Points:
    """What thresholds on these scores did, at some shares of false alarms."""
    if not len(scores_in) or not len(scores_out):
        return ()
    ascending = np.sort(scores_out)
    shares = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8])
    points = []
    for share in shares[shares * len(ascending) >= 1]:
        threshold = np.quantile(ascending, 1 - share)
        above = float((scores_out > threshold).mean()), float((scores_in > threshold).mean())
        points.append(above)
    return tuple(points)


# ── in words ─────────────────────────────────────────────────────────────────────────────────────────


def in_words(found: Findings) -> list[str]:
    """The answer first; then the figures and how to read them."""
    lines = [_verdict(found), ""]
    at = f"at delta = {found.bound_delta:g}"
    elsewhere = found.bound_delta != found.delta
    lines.append(f"  claim     epsilon = {found.epsilon:g}, delta = {found.delta:g}")
    if elsewhere:
        lines.append(f"            which is epsilon = {found.claim_at_bound_delta:.3g} {at}")
    chance = f"{100 * found.confidence:g} % confidence"
    lines.append(f"  bound     epsilon >= {found.bound:.3g} {at}, with {chance}")
    if found.curve_bound is not None:
        lines.append(
            f"            epsilon >= {found.curve_bound:.3g} at delta = {found.delta:g}, with {chance}, by trade-off "
            "curves"
        )
    lines.append(f"  estimate  epsilon = {found.estimate:.3g}: two Gaussians fitted, no bound")
    if found.ceiling is None:
        lines.append(f"  runs      {found.canaries:,}")
    else:
        by_curve = "" if found.curve_ceiling is None else f" ({found.curve_ceiling:.3g} by curves)"
        lines.append(
            f"  ceiling   {found.ceiling:.3g}{by_curve}: what {found.canaries:,} canaries show where all leaks that may"
        )
    if found.guesses is not None:
        lines.append(f"  guesses   {found.right:,} right of {found.guesses:,}")
    if found.accuracy is not None:
        audited, plain = found.accuracy
        lines.append(
            f"  accuracy  {100 * audited:.1f} % with canaries, {100 * plain:.1f} % without: they cost "
            f"{round(100 * (plain - audited), 1) + 0.0:g} points"
        )
    lines += [
        "",
        "The claim allows an attacker, whoever it is, about one record:",
        f"  a membership advantage (TPR - FPR) of {found.advantage:.3g} at most,",
        f"  a true positive rate of {found.true_positives:.3g} at a false positive rate of "
        f"{LOW_FALSE_POSITIVE_RATE:g}.",
        *found.notes,
    ]
    return lines


def _verdict(found: Findings) -> str:
    if found.refuted:
        return (
            "The claim does NOT survive: more leaked than it allows. Do not release what was trained like this. "
            f"(A sound mechanism is accused in {100 * (1 - found.confidence):.2g} % of audits.)"
        )
    return (
        "The claim survives this attack. That does not prove it: an audit can find a leak, and cannot show that there "
        "is none."
    )
