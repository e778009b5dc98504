"""What `dpis train` was asked for. What is None was not said, and gets a default that suits model and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dpis.app.jobs.systems import system
from dpis.errors import InputError
from dpis.features.colours import Colours
from dpis.mechanism import Method
from dpis.training.api import require_learning_rate

SAMPLE = "fmnist-sample"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of the command line, by their names."""

    dataset: str = SAMPLE
    method: str = "dpis"
    model: str | None = None
    normalise: str | None = None
    colours: str | None = None
    augment: str | None = None
    augmentations: int | None = None
    # the promise
    epsilon: float | None = None
    delta: float | None = None
    n_public: int | None = None
    release_n: bool = False
    accountant: str | None = None
    # sampling
    epochs: int | None = None
    batch_size: int | None = None
    kappa: str | None = None
    equivalent_batch: float | None = None
    k: float | None = None
    g_l: float | None = None
    contribution: str | None = None
    a_e: float | None = None
    norm_sum: str | None = None
    decay_rate: float | None = None
    # clipping
    clip_norm: str | None = None
    c_star: float | None = None
    c_min: float | None = None
    lambda_: float | None = None
    # optimisation
    optimizer: str = "sgd"
    lr: float | None = None
    ema: float | None = None
    physical_batch: int | None = None
    # data of the user's own
    target: str | None = None
    schema: str | None = None
    bounds: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    classes: str | None = None
    drop: tuple[str, ...] = ()
    release_scale: bool = False
    delimiter: str | None = None
    eval_data: str | None = None
    eval_share: float | None = None
    user_column: str | None = None
    max_rows_per_user: int | None = None
    # the run
    seed: int | None = None
    diagnostics: bool = False
    device: str = "auto"
    out: str | None = None

    def __post_init__(self) -> None:
        if self.eval_share is not None and not 0 < self.eval_share < 1:
            raise InputError(
                f"--eval-share must lie strictly between 0 and 1, found {self.eval_share:g}"
            )
        if self.eval_share is not None and self.eval_data is not None:
            raise InputError(
                "--eval-share holds training records out, --eval-data brings others: give one of them"
            )
        if self.lr is not None:
            require_learning_rate(self.lr, "--lr")
        if self.normalise not in (None, "group", "channel"):
            raise InputError(f"--normalise must be group or channel, found {self.normalise!r}")
        if self.colours not in (None, *Colours):
            raise InputError(f"--colours must be rgb or opponent, found {self.colours!r}")
        if self.augmentations is not None and self.augmentations < 1:
            raise InputError(f"--augmentations must be at least 1, found {self.augmentations}")
        if self.augmentations is not None and self.augment is None:
            raise InputError("--augmentations has no effect without --augment: say what changes")
        self._refuse_what_the_method_ignores(system(self.method).method)

    def _refuse_what_the_method_ignores(self, method: Method) -> None:
        """An option that would have no effect is an error: silence would be taken for consent."""
        for names, used in (
            (("k", "g_l"), method.by_importance),
            (("a_e", "norm_sum"), method is Method.DPIS_ADAPTIVE),
            (("decay_rate",), method is Method.DP_SGD_DECAY),
            (("accountant",), method.private and method is not Method.DPIS_ADAPTIVE),
            (("epsilon", "delta", "clip_norm", "contribution"), method.private),
        ):
            for name in names:
                if getattr(self, name) is not None and not used:
                    flag = "--" + name.replace("_", "-")
                    raise InputError(f"{flag} has no effect on {method}: leave it out")

    def as_json(self) -> dict[str, Any]:
        """For the secret checkpoint; paths are made absolute, so that a resumed job finds its data anywhere."""
        values = asdict(self)
        for name in ("dataset", "schema", "eval_data"):
            value = values[name]
            if value is not None and is_file(value):
                values[name] = str(Path(value).absolute())
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> JobOptions:
        """The inverse of `as_json`. An option that is not known is refused: it would have no effect."""
        given: dict[str, Any] = dict(values)
        unknown = sorted(set(given) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"`dpis train` has no option {', '.join(unknown)} in this version")
        for name in ("bounds", "categories", "drop"):
            given[name] = tuple(given.get(name, ()))
        return cls(**given)


def is_file(dataset: str) -> bool:
    """Whether a data set is named by a path: names have no suffix and no folder."""
    return "." in Path(dataset).name or "/" in dataset or "\\" in dataset
