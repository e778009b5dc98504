"""The sentences in which a run's outcome and guarantee are told, on the terminal and on pages alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NOT_PRIVATE = (
    "NOT PRIVATE: sgd gives no guarantee. This model may reveal the data it was trained on."
)

_MARKS = {
    "seeded": "its randomness came from a known seed",
    "diagnostics": "it showed private values (diagnostics)",
    "audit": "canaries were planted among its records (audit)",
}


def quality(metrics: Mapping[str, float | None], *, scaled: bool) -> str:
    """How good the model is, in a few words.

    Args:
        metrics: as they were measured on held-out records.
        scaled: whether `dpis train` brought the targets of a regression to -1..1 by their public bounds.
    """
    accuracy, error = metrics.get("accuracy"), metrics.get("squared_error")
    if accuracy is not None:
        return f"Accuracy {100 * accuracy:.1f} %"
    if error is not None:
        note = " (target scaled to -1..1)" if scaled else ""
        return f"Root mean squared error {math.sqrt(error):.4f}{note}"
    return "Trained"


def guarantee(epsilon: float, delta: float, protects: str) -> str:
    """What is promised, to a reader who does not know the letters."""
    factor = math.exp(epsilon) if epsilon < 700 else math.inf
    return (
        f"(epsilon = {epsilon:g}, delta = {delta:g}) differential privacy. "
        f"Whether or not {protects} was in the training data, nothing that can be told from this model becomes more "
        f"than {factor:.3g} times as likely, up to a chance of {delta:g}."
    )


def why_not_for_release(marks: Sequence[str]) -> str:
    """Why a model must stay in the house although its numbers are right."""
    reasons = " and ".join(_MARKS.get(mark, mark) for mark in marks)
    return f"{reasons}; the guarantee does not hold outside."
