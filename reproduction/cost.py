"""About how long a cell takes, to begin with the cheapest."""

from __future__ import annotations

from typing import Any

from reproduction.cell import Cell
from reproduction.settings import RECORDS

_SECONDS_PER_GRADIENT = {
    "scatter-linear": 2e-5,
    "bag-linear": 1e-5,
    "scatter-cnn": 1e-4,
    "cnn": 2e-4,
    "rnn": 1.5e-3,
}
_START = 15.0


def seconds(cell: Cell) -> float:
    """Of one core, roughly: only the order matters."""
    return _START + _gradients(cell) * _SECONDS_PER_GRADIENT[_model(cell)]


def _gradients(cell: Cell) -> float:
    """How many gradients of single records a run looks at."""
    options = cell.options
    n, b = RECORDS[cell.dataset], options["batch_size"]
    epochs, copies = options.get("epochs", 40), options.get("augmentations", 1)
    return float(
        epochs * copies * (n // b * _candidates(cell.method, options, n) + _full_pass(cell))
    )


def _candidates(method: str, options: dict[str, Any], n: int) -> float:
    """Of one step."""
    b = float(options["batch_size"])
    equivalent = float(options.get("equivalent_batch", b))
    if method == "dpis-adaptive":
        return min(2.5 * b, 0.5 * n)
    return (
        min(float(options.get("k", 5.0)) * b, 0.5 * equivalent) if method == "dpis" else equivalent
    )


def _full_pass(cell: Cell) -> int:
    """Of one epoch."""
    return RECORDS[cell.dataset] if cell.method == "dpis-adaptive" else 0


def _model(cell: Cell) -> str:
    defaults = {
        "dp-sgd-ts": "rnn" if cell.dataset == "imdb" else "cnn",
        "dp-sgd-hf": "scatter-cnn",
    }
    name = str(cell.options.get("model", defaults.get(cell.method, "cnn")))
    name = name.removesuffix("-relu").removesuffix("-tanh")
    return "cnn" if cell.dataset == "cifar10" and name == "scatter-cnn" else name
