"""What `dpis train` was asked for. What is None was not said, and gets a default that suits model and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dpis.errors import InputError

SAMPLE = "fmnist-sample"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of the command line, by their names."""

    dataset: str = SAMPLE
    method: str = "dpis"
    model: str | None = None
    # the promise
    epsilon: float = 3.0
    delta: float = 1e-5
    n_public: int | None = None
    release_n: bool = False
    accountant: str = "pld"
    # sampling
    epochs: int | None = None
    batch_size: int | None = None
    kappa: str | None = None
    equivalent_batch: float | None = None
    k: float = 5.0
    g_l: float = 0.05
    contribution: str = "weight"
    a_e: float = 0.8
    norm_sum: str = "full-pass"
    decay_rate: float = 0.005
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
    eval_share: float = 0.1
    user_column: str | None = None
    max_rows_per_user: int | None = None
    # the run
    seed: int | None = None
    diagnostics: bool = False
    device: str = "auto"
    out: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            raise InputError(
                f"--eval-share must lie strictly between 0 and 1, found {self.eval_share:g}"
            )
        if self.max_rows_per_user is not None and self.user_column is None:
            raise InputError("--max-rows-per-user needs --user-column")

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
        """The inverse of `as_json`."""
        known = {field.name for field in fields(cls)}
        given: dict[str, Any] = {name: value for name, value in values.items() if name in known}
        for name in ("bounds", "categories", "drop"):
            given[name] = tuple(given.get(name, ()))
        return cls(**given)


def is_file(dataset: str) -> bool:
    """Whether a data set is named by a path: names have no suffix and no folder."""
    return "." in Path(dataset).name or "/" in dataset or "\\" in dataset
