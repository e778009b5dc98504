"""Every option, declared once: name, type, default, meaning, the paper's symbol, bounds, and who uses it.

`Privacy` is what protects the records, `Training` is how the model is fitted. The command line, `dpis.train`, the
drop-in, the checks and docs/options.md are made from these fields: a new option is a new field. The command line's own
options (files, named models) stand beside them in `dpis.app.jobs.job_options`, declared in the same way.
"""

# ruff: noqa: RUF009 (knob makes fields, not values)

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Self

from dpis.errors import InputError, shown_number

# ── choices ──────────────────────────────────────────────────────────────────────────────────────────


class Choice(StrEnum):
    """A setting that is chosen by name."""

    @classmethod
    def parse(cls, name: str, what: str | None = None) -> Self:
        """The member of that name; any other name is refused with those there are."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(member.value for member in cls)
            what = what or cls.__name__.lower()
            raise InputError(f"{what} must be one of {known}, found {name!r}") from None


class Method(Choice):
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

    @property
    def private(self) -> bool:
        """Whether a guarantee comes with it."""
        return self is not Method.SGD

    @property
    def by_importance(self) -> bool:
        """Whether records are drawn by their gradient norms."""
        return self in BY_IMPORTANCE


class Contribution(Choice):
    """What a drawn record adds to the sum."""

    WEIGHT = "weight"
    """Its clipped gradient over its importance, always."""
    REJECT = "reject"
    """Its unit gradient, if a second coin accepts it (the paper's form)."""


class NormSum(Choice):
    """How the adaptive method learns the sum of norms that it releases."""

    FULL_PASS = "full-pass"
    """Every record's norm is computed anew at the start of every epoch (the paper's)."""
    STALE = "stale"
    """The norms as last seen; records never seen count as the clip norm."""


class Accountant(Choice):
    """How epsilon is computed from events."""

    PLD = "pld"
    RDP = "rdp"


ADAPTIVE = (Method.DPIS_ADAPTIVE,)
BY_IMPORTANCE = (Method.DPIS, Method.DPIS_ADAPTIVE)
PREDECLARED = (Method.DPIS, Method.DP_SGD, Method.DP_SGD_DECAY)
PRIVATE = (*PREDECLARED, Method.DPIS_ADAPTIVE)
EVERY = tuple(Method)

# ── the table's form ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Knob:
    """What is known of an option beside its name, type and default.

    Attributes:
        help: one line for a person.
        group: the heading it stands under.
        symbol: in the paper and docs/notation.md.
        default: in words, where it depends on something.
        shell_default: the same on the command line, where that differs.
        in_python: what else a value may be in Python.
        choices: the names it may have.
        words: texts that are allowed where a number is meant.
        form: how a value is written on the command line.
        used_by: the methods on which it has an effect.
        python_only: not an option of the command line.
        above: values are larger.
        at_least: values are not smaller.
        below: values are smaller.
        at_most: values are not larger.
        finite: infinity is refused.
        power_of_two: values are 1, 2, 4, 8, ...
    """

    help: str
    group: str
    symbol: str = ""
    default: str = ""
    shell_default: str = ""
    in_python: str = ""
    choices: type[Choice] | tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    form: str = ""
    used_by: tuple[Method, ...] = EVERY
    python_only: bool = False
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    finite: bool = True
    power_of_two: bool = False

    @property
    def bounds(self) -> str:
        """In words; empty without any."""
        ends = {
            "above": self.above,
            "at least": self.at_least,
            "below": self.below,
            "at most": self.at_most,
        }
        words = " and ".join(f"{word} {end:g}" for word, end in ends.items() if end is not None)
        if self.power_of_two:
            return f"a power of two, {words}"
        return f"a finite number {words}" if words.startswith("above") and self._open else words

    @property
    def _open(self) -> bool:
        return self.finite and self.below is None and self.at_most is None

    def checked(self, name: str, value: Any, kind: str) -> Any:
        """The value in its own type: a choice from its name, a number from its text. Others are refused.

        Args:
            name: of the option, as the person knows it.
            value: what was said.
            kind: the type of the field, as it is written.
        """
        if value is None and "None" not in kind and kind != "Any":
            raise InputError(f"{name} must have a value, found None")
        if value is None or (isinstance(value, str) and value in self.words):
            return value
        if isinstance(self.choices, type):
            return self.choices.parse(value, name)
        if self.choices and isinstance(value, str) and value not in self.choices:
            raise InputError(f"{name} must be one of {', '.join(self.choices)}, found {value!r}")
        if kind == "bool":
            if not isinstance(value, bool):
                raise InputError(f"{name} must be True or False, found {value!r}")
            return value
        if isinstance(value, list):
            return tuple(value)  # tables are values: hashable
        if "int" in kind:
            return self._fitting(
                name,
                value,
                _whole(value),
                self.bounds
                if self.power_of_two
                else " of ".join(filter(None, ("a whole number", self.bounds))),
            )
        if "float" in kind and ("str" not in kind or self.bounds):
            return self._fitting(name, value, _number(value), self.bounds or "a number")
        return float(value) if isinstance(value, Real) and "float" in kind else value

    def _fitting(self, name: str, value: Any, number: float, required: str) -> float:
        """A number, if it lies within the bounds; NaN lies nowhere."""
        infinite = isinstance(number, float) and math.isinf(
            number
        )  # a whole number may be larger than any float
        fits = (
            (self.above is None or number > self.above)
            and (self.at_least is None or number >= self.at_least)
            and (self.below is None or number < self.below)
            and (self.at_most is None or number <= self.at_most)
            and not (self.finite and infinite)
            and not (self.power_of_two and int(number) & (int(number) - 1))
            and number == number
        )
        if not fits:
            or_words = "".join(f", or {word!r}" for word in self.words)
            found = repr(value[:60]) if isinstance(value, str) else shown_number(value)
            raise InputError(f"{name} must be {required}{or_words}, found {found}")
        return number


def _number(value: Any) -> float:
    """As a float; NaN for what is no number: truth values, tensors, words."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _whole(value: Any) -> float:
    """As an int; NaN for what is no whole number."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    number = _number(value)
    return int(number) if number.is_integer() else math.nan


def knob(default: Any, help: str, *, group: str, shown: str = "", **more: Any) -> Any:
    """A field of a table; `Knob` says what can be declared, ``shown`` is its ``default``."""
    return field(
        default=default, metadata={"knob": Knob(help=help, group=group, default=shown, **more)}
    )


def knobs(table: type) -> Mapping[str, Knob]:
    """The options of a table, by name, in the order of their declaration."""
    return {
        field.name: field.metadata["knob"]
        for base in reversed(table.__mro__)
        if is_dataclass(base)
        for field in fields(base)
        if "knob" in field.metadata
    }


def default_in_words(table: type, name: str) -> str:
    """What holds where nothing is said; empty: nothing does."""
    default = _defaults(table)[name]
    if knobs(table)[name].default or default in (None, False, ()):
        return knobs(table)[name].default
    return f"{default:g}" if isinstance(default, float) else str(default)


def _defaults(table: type) -> dict[str, Any]:
    return {one.name: one.default for one in fields(table)}


class Options:
    """A table's values: checked, and with the names of those that were said rather than left to their defaults."""

    said: frozenset[str]

    def __new__(cls, **given: Any) -> Self:
        """Remember what was said. `dataclasses.replace` gives everything anew: what is the default was not said."""
        made, defaults = object.__new__(cls), _defaults(cls)
        if given.keys() == defaults.keys():
            given = {name: value for name, value in given.items() if value is not defaults[name]}
        object.__setattr__(made, "said", frozenset(given))
        return made

    def __post_init__(self) -> None:
        """Bring every value into its type, or refuse it."""
        kinds = {one.name: str(one.type) for one in fields(self)}  # type: ignore[arg-type]
        for name, one in knobs(type(self)).items():
            value = one.checked(self.called(name), getattr(self, name), kinds[name])
            object.__setattr__(self, name, value)

    @staticmethod
    def called(name: str) -> str:
        """An option as the person knows it."""
        return name

    def adding(self, **words: Any) -> Self:
        """With what was said elsewhere, where it is not None; said twice and differently is refused."""
        given = {name: value for name, value in words.items() if value is not None}
        for name in sorted(self.said & given.keys()):
            if getattr(self, name) != given[name]:
                raise InputError(
                    f"{name} is said twice: {given[name]!r}, and {getattr(self, name)!r} in "
                    f"{type(self).__name__}(...). Say it once"
                )
        return type(self)(**{**{name: getattr(self, name) for name in self.said}, **given})

    def refuse_unused(self, method: Method) -> None:
        """An option that would have no effect is an error: silence would be taken for consent."""
        for name, one in knobs(type(self)).items():
            if name in self.said and method not in one.used_by:
                raise InputError(f"{self.called(name)} has no effect on {method}: leave it out")


# ── the table ────────────────────────────────────────────────────────────────────────────────────────

USUAL_SHARDS, MOST_SHARDS = 64, 1 << 16

LARGEST_LEARNING_RATE = 1e6
"""Beyond it weights leave what float32 holds within a few steps."""

_guarantee = functools.partial(knob, group="Guarantee")
_sampling = functools.partial(knob, group="Sampling")
_adaptive = functools.partial(knob, group="The adaptive method", used_by=ADAPTIVE)
_clipping = functools.partial(knob, group="Clipping", used_by=BY_IMPORTANCE, above=0)
_training = functools.partial(knob, group="Training")
_records = functools.partial(knob, group="Records")
_run = functools.partial(knob, group="Run")


@dataclass(frozen=True, kw_only=True)
class Privacy(Options):
    """What protects the records. All of it is public.

    Example:
        >>> Privacy(epsilon=2.0, method="dpis-adaptive", headroom=3.0).method
        <Method.DPIS_ADAPTIVE: 'dpis-adaptive'>
        >>> Privacy(floor=2.0)
        Traceback (most recent call last):
        ...
        dpis.errors.InputError: floor must be above 0 and at most 1, found 2.0
    """

    epsilon: float = _guarantee(
        3.0, "Of the guarantee; smaller is stronger.", symbol="epsilon", used_by=PRIVATE, above=0
    )
    delta: float = _guarantee(
        1e-5,
        "Of the guarantee; well below 1 / records.",
        symbol="delta",
        used_by=PRIVATE,
        above=0,
        below=1,
    )
    method: str = _guarantee(
        Method.DPIS,
        "How records are drawn and noise is planned; sgd is not private.",
        choices=Method,
    )
    n_public: int | None = _guarantee(
        None,
        "A public number of training records (users).",
        symbol="n_public",
        shown="counted, and then public",
        at_least=1,
    )
    release_n: bool = _guarantee(
        False, "Release a noisy number of records too.", symbol="N'", used_by=PRIVATE
    )
    accountant: str = _guarantee(
        Accountant.PLD,
        "How epsilon is computed where all noise is fixed beforehand.",
        choices=Accountant,
        form="pld|rdp",
        used_by=PREDECLARED,
    )
    decay_rate: float = _guarantee(
        0.005,
        "dp-sgd-decay: noise falls as exp(-rate * epoch).",
        used_by=(Method.DP_SGD_DECAY,),
        at_least=0,
    )

    kappa: float | str | Sequence[float] | None = _sampling(
        None,
        "Norm utilisation in (0, 1], B = b / kappa: a number, linear A:B, or one an epoch.",
        symbol="kappa",
        shown="1",
        form="VALUE|A:B|LIST",
    )
    equivalent_batch: float | None = _sampling(
        None,
        "Instead of kappa: the DP-SGD batch with the same privacy and noise.",
        symbol="B",
        shown="b / kappa",
        above=0,
    )
    headroom: float = _sampling(
        5.0,
        "How much a record's norm may have grown since it was last seen.",
        symbol="k",
        used_by=BY_IMPORTANCE,
        at_least=1,
        finite=False,
    )
    floor: float = _sampling(
        0.05,
        "No record is taken to have a smaller norm than this share of the clip norm.",
        symbol="g_L / C",
        used_by=BY_IMPORTANCE,
        above=0,
        at_most=1,
    )
    contribution: str = _sampling(
        Contribution.WEIGHT,
        "What a drawn record adds: its weighted gradient, or by a second coin as in the paper.",
        choices=Contribution,
        form="weight|reject",
        used_by=PRIVATE,
    )
    shards: int = _sampling(
        USUAL_SHARDS,
        "Records are dealt out in so many shards: at least one a process.",
        symbol="V",
        at_least=1,
        at_most=MOST_SHARDS,
        power_of_two=True,
    )

    reserve_share: float = _adaptive(
        0.8,
        "The share of epochs that reserve as if kappa were 1.",
        symbol="a_E",
        at_least=0,
        at_most=1,
    )
    rate_cap: float = _adaptive(
        0.5, "The largest probability to draw a record.", symbol="pi_cap", above=0, at_most=1
    )
    norm_sum: str = _adaptive(
        NormSum.FULL_PASS,
        "How the released norm sum is computed.",
        symbol="K'",
        choices=NormSum,
        form="full-pass|stale",
    )

    clip_norm: float | str | None = _clipping(
        None,
        "The clip norm; auto adapts it every epoch by an accounted release, from the default on.",
        symbol="C",
        shown="1",
        shell_default="by the model",
        words=("auto",),
        form="VALUE|auto",
        used_by=PRIVATE,
    )
    clip_ceiling: float | None = _clipping(
        None,
        "Adaptive clipping: the upper bound, up to which norms are counted.",
        symbol="C*",
        shown="4 * clip_norm",
    )
    clip_lowest: float | None = _clipping(
        None,
        "Adaptive clipping: the lower bound.",
        symbol="C_min",
        shown="clip_norm / 100",
    )
    clip_scale: float | None = _clipping(
        None,
        "Adaptive clipping: the next clip norm over the mean norm.",
        symbol="lambda",
        shown="1",
    )


@dataclass(frozen=True, kw_only=True)
class Training(Options):
    """How the model is fitted, and what is reported: everything that is neither privacy nor data.

    Example:
        >>> Training(optimizer="adam", lr=0.002).epochs
        40
    """

    epochs: int = _training(40, "Passes over the data.", symbol="E", at_least=1)
    batch_size: int | None = _training(
        None,
        "An epoch has floor(n_public / b) steps.",
        symbol="b",
        shown="n_public / 5, at most 8192",
        at_least=1,
    )
    lr: float | None = _training(
        None,
        "Learning rate of a named optimizer.",
        shown="0.1",
        shell_default="by model and noise",
        above=0,
        at_most=LARGEST_LEARNING_RATE,
    )
    optimizer: Any = _training(
        "sgd",
        "sgd has momentum 0.9.",
        choices=("sgd", "adam"),
        in_python="an optimizer, or a function that makes one of the parameters",
    )
    scheduler: Any = _training(
        None, "Makes a learning rate scheduler from the optimizer.", python_only=True
    )
    scheduler_interval: str = _training(
        "epoch", "How often the scheduler steps.", choices=("epoch", "step"), python_only=True
    )
    ema: float | None = _training(
        None,
        "Release a moving average of the weights with this decay; 0: the last weights.",
        shown="0",
        shell_default="0.95",
        at_least=0,
        below=1,
    )
    early_stop: Any = _training(
        None,
        "Stop on a held-out metric (EarlyStop); the claim stays the plan's.",
        python_only=True,
    )
    metrics: Mapping[str, Any] | None = _training(
        None,
        "By name, metric(output, target): one value a row of the held-out set.",
        shown="by the loss",
        python_only=True,
    )
    objective: Any = _training(
        None, "objective(model, batch), one loss a row, instead of loss.", python_only=True
    )

    augment: Any = _records(
        None,
        "Change images: pixels at random, by up to 2; before scattering by 1, in fixed ways.",
        in_python="augment(batch, generator), which changes every row by itself",
        shown="none",
        form="shift,flip",
    )
    augmentations: int = _records(
        1,
        "Augmented copies of a record in a step, averaged; scatter models need 2 or more.",
        at_least=1,
    )
    views: int = _records(
        1,
        "The first tensor of an item holds so many views along its first axis, averaged.",
        at_least=1,
        python_only=True,
    )
    user_ids: Sequence[Any] | None = _records(
        None,
        "One an item: protect users with all of their items, not single items.",
        python_only=True,
    )
    max_rows_per_user: int = _records(
        8, "A user's rows in one step, a public bound; for user-level privacy.", at_least=1
    )
    collate_fn: Any = _records(
        None, "Makes a batch of a list of items.", shown="torch's", python_only=True
    )
    batch_shaped: bool = _records(
        False,
        "Allow shapes that follow the batch; the ledger says so. The model must mask padding.",
        python_only=True,
    )

    physical_batch: int | None = _run(
        None, "Records computed at once.", shown="what fits the caches", at_least=1
    )
    device: Any = _run("auto", "auto, cpu, cuda.")
    diagnostics: bool = _run(False, "Show private values: the model is then not for release.")
    keep_checkpoint: bool = _run(False, "Keep the secret checkpoint after completion.")
    check_data: bool = _run(
        False, "On resume: read all data again, not only what changed by size or time."
    )
    progress: Any = _run(
        False, "True: a bar on stderr; or a reporter of your own.", python_only=True
    )
