"""What is run for the paper's tables: every row's options of `dpis train`, beside data, epsilon, accountant and seed.

Batch sizes, learning rates and clip norms begin with those that Handcrafted-DP and the paper state; how many epochs
suit a budget the paper tuned and does not tell. What was tried, on validation splits of the training data, is in
``results/tuning.jsonl``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reproduction.published import TABLE_3_EPSILONS

Options = Mapping[str, Any]

RECORDS = {
    "mnist": 60_000,
    "fmnist": 60_000,
    "cifar10": 50_000,
    "imdb": 25_000,
    "fmnist-sample": 10_000,
}
"""Training records: published numbers, so they are declared, not counted."""

PAPER = "paper"
"""The recipe that follows the paper; any other goes beyond it."""
UNIFORM = "same-schedule-uniform"

RECIPES = {
    "adaptive-clipping": "",
    "fixed-clipping": "",
    "augment": "on pixels, with shifted copies of images",
    "bag": "linear on bags of public word vectors, with seed words chosen by hand",
    "channel-scale": "linear, channels scaled by an accounted release",
    "ema": "large batch and averaged weights",
    "large-batch": "a larger equivalent batch",
    "linear": "a linear model on scatter features",
    "opponent": "scatter features of opponent colours",
    "raw-pixels": "a network on pixels",
    UNIFORM: "the same schedule, but uniform sampling (k = inf)",
    "views": "scatter features of several fixed views of every image",
}
"""What the names of recipes mean; those with nothing to say are the paper's own."""


@dataclass(frozen=True)
class Recipe:
    """A row of Table 3.

    Attributes:
        name: ``paper``, or what differs from the paper.
        method: as `dpis train` calls it.
        options: of `dpis train`.
        by_epsilon: options that follow the budget; that of the next smaller epsilon where one is not listed.
        accountants: the blocks it stands in; the adaptive method has a filter of its own, which is RDP.
    """

    name: str
    method: str
    options: Options
    by_epsilon: Mapping[float, Options] = field(default_factory=dict)
    accountants: tuple[str, ...] = ("rdp", "pld")

    def options_at(self, epsilon: float | None) -> dict[str, Any]:
        """All options at that budget; None: without one."""
        below = [e for e in self.by_epsilon if epsilon is not None and e <= epsilon]
        return {**self.options, **(self.by_epsilon[max(below)] if below else {})}


def _epochs(*by_epsilon: int, below_2: Options | None = None) -> dict[float, Options]:
    """More budget, more epochs: one number for each of the paper's epsilons; and what differs where noise is large."""
    return {
        epsilon: {"epochs": epochs, **(below_2 or {} if epsilon < 2 else {})}
        for epsilon, epochs in zip(TABLE_3_EPSILONS, by_epsilon, strict=True)
    }


FIXED = {"clip_norm": "0.1", "ema": 0.0}
NON_PRIVATE = {"model": "scatter-cnn", "batch_size": 256, "lr": 0.05, "epochs": 20, "ema": 0.0}
AVERAGED = {"ema": 0.95}


def _images(
    pixels: Options,
    scattered: Options,
    linear: Options,
    importance: Options,
    a_e: float,
    scattered_below_2: Options | None = None,
    linear_from_4: Options | None = None,
    ceiling: Options | None = None,
) -> tuple[Recipe, ...]:
    """The rows of an image data set.

    Args:
        pixels: batch and learning rate of networks on pixels.
        scattered: of the scatter network.
        linear: of the linear model on scatter features.
        importance: what our DPIS on the scatter network has instead: a larger equivalent batch.
        a_e: of Table 2.
        scattered_below_2: what the scatter network has instead below epsilon 2.
        linear_from_4: what the linear model has instead from epsilon 4 on.
        ceiling: what the scatter network has instead without privacy.
    """
    pixels, scattered = {**FIXED, **pixels}, {**FIXED, **scattered, "model": "scatter-cnn"}
    return (
        *_paper_rows(pixels, scattered, a_e, scattered_below_2),
        Recipe(PAPER, "sgd", {**NON_PRIVATE, **(ceiling or {})}),
        *_rows_at_a_large_batch({**scattered, **importance}, scattered_below_2),
        *_rows_of_other_models(
            pixels, {**linear, **AVERAGED, "model": "scatter-linear"}, linear_from_4, a_e
        ),
    )


def _paper_rows(
    pixels: Options, scattered: Options, a_e: float, scattered_below_2: Options | None
) -> tuple[Recipe, ...]:
    """The paper's systems, and uniform sampling under the schedule of DPIS."""
    of_pixels = _epochs(8, 12, 16, 20, 24)
    epochs = _epochs(8, 12, 16, 20, 24, below_2=scattered_below_2)
    adaptive = {**scattered, "a_e": a_e}
    rejecting = {"k": 5.0, "contribution": "reject"}
    return (
        Recipe(PAPER, "dp-sgd", {**pixels, "model": "cnn-relu"}, of_pixels),
        Recipe(PAPER, "dp-sgd-ts", pixels, of_pixels),
        Recipe(PAPER, "dp-sgd-decay", {**pixels, "model": "cnn"}, of_pixels),
        Recipe(PAPER, "dp-sgd-hf", _without(scattered, "model"), epochs),
        Recipe(PAPER, "dpis-adaptive", {**adaptive, **rejecting}, epochs, ("rdp",)),
        Recipe(UNIFORM, "dpis-adaptive", {**adaptive, "k": math.inf}, epochs, ("rdp",)),
    )


def _rows_at_a_large_batch(options: Options, below_2: Options | None) -> tuple[Recipe, ...]:
    """DPIS and the DP-SGD that has its noise, on the scatter network."""
    epochs = _epochs(8, 12, 14, 16, 18, below_2=below_2)
    ours = {**options, "k": 2.0}
    return (
        Recipe("large-batch", "dpis", ours, epochs),
        Recipe("large-batch", "dp-sgd-hf", options, epochs),
        Recipe("ema", "dpis", {**ours, **AVERAGED}, epochs, ("pld",)),
    )


def _rows_of_other_models(
    pixels: Options, linear: Options, linear_from_4: Options | None, a_e: float
) -> tuple[Recipe, ...]:
    """Linear models on scatter features, networks on pixels."""
    epochs = _epochs(8, 12, 16, 20, 24)
    network = {**pixels, "model": "cnn"}
    adaptive = {**network, "a_e": a_e, "k": 5.0}
    augmented = {**network, **AVERAGED, "k": 2.0, "augment": "shift", "augmentations": 4}
    return (
        Recipe("linear", "dpis", linear, {4.0: linear_from_4 or {}}, ("pld",)),
        Recipe("channel-scale", "dpis", {**linear, "normalise": "channel"}, {}, ("pld",)),
        Recipe("raw-pixels", "dpis-adaptive", adaptive, epochs, ("rdp",)),
        Recipe("augment", "dpis", augmented, epochs, ("pld",)),
    )


def _and_ours(
    rows: tuple[Recipe, ...], name: str, by_epsilon: Mapping[float, Options], **changes: Any
) -> tuple[Recipe, ...]:
    """The rows, and one more: averaged weights at a large batch (`ema`), and what we change in it."""
    base = next(recipe for recipe in rows if recipe.name == "ema")
    options = {**base.options, **changes}
    return (*rows, replace(base, name=name, options=options, by_epsilon=by_epsilon))


def _without(options: Options, name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def _imdb() -> tuple[Recipe, ...]:
    epochs = _epochs(6, 8, 10, 12, 14)
    rnn = {"batch_size": 1024, "optimizer": "adam", "lr": 0.02, "clip_norm": "1", "ema": 0.0}
    adaptive = {**rnn, "model": "rnn", "a_e": 0.8}
    clipping = {"clip_norm": "1", "c_star": 4.0, "lambda_": 1.0}
    bag = {"batch_size": 8192, "epochs": 30, "ema": 0.95, "model": "bag-linear"}
    return (
        Recipe(PAPER, "dp-sgd", {**rnn, "model": "rnn"}, epochs),
        Recipe(PAPER, "dp-sgd-ts", rnn, epochs),
        Recipe(PAPER, "dp-sgd-decay", {**rnn, "model": "rnn"}, epochs),
        Recipe(
            PAPER,
            "dpis-adaptive",
            {**adaptive, **clipping, "k": 3.0, "contribution": "reject"},
            epochs,
            ("rdp",),
        ),
        Recipe(UNIFORM, "dpis-adaptive", {**adaptive, **clipping, "k": math.inf}, epochs, ("rdp",)),
        Recipe("bag", "dpis", bag, {}, ("pld",)),
        Recipe("bag", "dp-sgd", bag, {}, ("pld",)),
        Recipe(
            PAPER,
            "sgd",
            {
                "model": "rnn",
                "batch_size": 128,
                "optimizer": "adam",
                "lr": 0.002,
                "epochs": 6,
                "ema": 0.0,
            },
        ),
    )


TABLE_3: Mapping[str, tuple[Recipe, ...]] = {
    "fmnist": _images(
        pixels={"batch_size": 2048, "lr": 8.0},
        scattered={"batch_size": 2048, "lr": 4.0},
        linear={"batch_size": 8192, "epochs": 60},
        linear_from_4={"epochs": 100, "ema": 0.98},
        ceiling={"lr": 0.02},
        importance={"equivalent_batch": 8192.0},
        a_e=1.0,
    ),
    "mnist": _and_ours(
        _images(
            pixels={"batch_size": 1024, "lr": 2.0},
            scattered={"batch_size": 1024, "lr": 2.0},
            linear={"batch_size": 8192, "epochs": 40},
            importance={"equivalent_batch": 4096.0},
            a_e=0.8,
        ),
        "views",
        _epochs(8, 12, 14, 16, 18, below_2={"lr": 2.0}),
        lr=4.0,
        ema=0.98,
        augment="shift",
        augmentations=5,
    ),
    "cifar10": _and_ours(
        _images(
            pixels={"batch_size": 1024, "lr": 2.0},
            scattered={"batch_size": 2048, "lr": 4.0, "normalise": "channel"},
            scattered_below_2={"lr": 3.0},
            linear={"batch_size": 8192, "epochs": 60, "lr": 3.0, "normalise": "channel"},
            importance={"equivalent_batch": 4096.0},
            a_e=0.8,
        ),
        "opponent",
        _epochs(10, 16, 22, 26, 32, below_2={"lr": 3.0}),
        ema=0.98,
        colours="opponent",
    ),
    "imdb": _imdb(),
}

OURS = {"mnist": "views", "fmnist": "linear", "cifar10": "opponent", "imdb": "bag"}
"""The recipe of predeclared DPIS that validation records chose, for each data set."""

# The ablations of Tables 4 to 6 change one option of the paper's DPIS row.


def ablations_of_clipping(dataset: str) -> Mapping[str, Options]:
    """With adaptive clipping and without, by the names of the rows."""
    if dataset == "imdb":
        return {"adaptive-clipping": {}, "fixed-clipping": {"c_star": None, "lambda_": None}}
    first = float(_row(dataset, PAPER, "dpis-adaptive").options["clip_norm"])
    return {"adaptive-clipping": {"c_star": 4 * first, "lambda_": 1.0}, "fixed-clipping": {}}


def _row(dataset: str, recipe: str, method: str) -> Recipe:
    return next(r for r in TABLE_3[dataset] if (r.name, r.method) == (recipe, method))


def paper_dpis(dataset: str) -> Recipe:
    """The paper's own row."""
    return _row(dataset, PAPER, "dpis-adaptive")


FIGURE_1 = {"batch_size": 512, "epochs": 16, "lr": 1.0}
"""RDP gives DP-SGD the paper's 0.81 at epsilon 4 here, not at the batch of 2,048 of its other experiments."""
