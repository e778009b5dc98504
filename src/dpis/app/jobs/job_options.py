"""What `dpis train` can be asked for: the options of every door, and its own about files and named models."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpis.app.jobs.systems import system
from dpis.errors import InputError
from dpis.options import Knob, Method, Privacy, Training, knob, knobs

SAMPLE = "fmnist-sample"
OF_FILES = "Your own file"
"""The heading of options that a data set by name does not need."""

_model = functools.partial(knob, group="Model")
_file = functools.partial(knob, group=OF_FILES)
_measuring = functools.partial(knob, group="Measuring")
_run = functools.partial(knob, group="Run")


@dataclass(frozen=True, kw_only=True)
class JobOptions(Privacy, Training):
    """The options of the command line. Defaults that follow model and data are None, and settled later."""

    dataset: str = _model(
        SAMPLE,
        "mnist, fmnist, cifar10, imdb, or a file or folder/ of your own: .csv, .parquet, .arrow, .npz, .npy, .pt.",
        shown="a sample of Fashion-MNIST",
        form="DATASET",
    )
    method: str = knob(
        Method.DPIS.value,
        "dpis, dpis-adaptive, dp-sgd, dp-sgd-decay, dp-sgd-ts (tanh), dp-sgd-hf (scatter features), or sgd "
        "(not private).",
        group="Guarantee",
    )
    model: str | None = _model(
        None,
        "scatter-linear, scatter-cnn, cnn (tanh), cnn-relu, mlp, linear; for texts bag-linear, bag-mlp, rnn, "
        "rnn-tanh; or package.module:factory.",
        shown="by the data",
    )
    normalise: str | None = _model(
        None,
        "Scatter features: by record, or by an accounted release, which suits colour images.",
        shown="group",
        choices=("group", "channel"),
    )
    colours: str | None = _model(
        None,
        "Scatter features of colour images: of red, green, blue, or of brightness and two differences.",
        shown="rgb",
        choices=("rgb", "opponent"),
    )

    target: str | None = _file(None, "Table: the column to learn.")
    classes: str | None = _file(
        None,
        "The classes; from-data confirms that they are public.",
        form="A,B,C|10|from-data",
    )
    schema: str | None = _file(None, "Table: bounds, categories, classes in a .json or .toml file.")
    bounds: tuple[str, ...] = _file(
        (), "Table: a numeric column. May be repeated.", form="COL=LOW:HIGH"
    )
    categories: tuple[str, ...] = _file(
        (), "Table: a categorical column. May be repeated.", form="COL=A,B|from-data"
    )
    drop: tuple[str, ...] = _file((), "Table: leave a column out. May be repeated.", form="COL")
    release_scale: bool = _file(False, "Table: pay for a private release of undeclared bounds.")
    delimiter: str | None = _file(None, "CSV: between cells.", shown="as the header shows")
    user_column: str | None = _file(None, "Protect users, not rows: the column that names them.")

    eval_data: str | None = _measuring(None, "Your file to measure the model on.")
    eval_share: float | None = _measuring(
        None,
        "Hold this share of the training records out by coins, to measure on.",
        shown="0.1 of your file; of a dataset by name its test set is used instead",
        above=0,
        below=1,
    )

    seed: int | None = _run(
        None, "Repeatable, for research: the model is then not for release.", at_least=0
    )
    out: str | None = _run(None, "Folder of the run, new or empty.", shown="runs/1, runs/2, ...")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_share is not None and self.eval_data is not None:
            raise InputError(
                "--eval-share holds training records out, --eval-data brings others: give one of them"
            )
        if "augmentations" in self.said and self.augment is None:
            raise InputError("--augmentations has no effect without --augment: say what changes")
        self.refuse_unused(system(self.method).method)

    @staticmethod
    def called(name: str) -> str:
        """As a flag."""
        return "--" + name.replace("_", "-")

    @property
    def privacy(self) -> Privacy:
        """What was asked for of the guarantee, with the method that the name stands for."""
        said = {name: getattr(self, name) for name in self.said & knobs(Privacy).keys()}
        return Privacy(**{**said, "method": system(self.method).method})

    def as_json(self) -> dict[str, Any]:
        """For the secret checkpoint; paths are made absolute, so that a resumed job finds its data anywhere."""
        values = {name: getattr(self, name) for name in sorted(self.said)}
        for name in self.said & {"dataset", "schema", "eval_data"}:
            if is_file(values[name]):
                values[name] = str(Path(values[name]).absolute())
        written: dict[str, Any] = json.loads(json.dumps(values))
        return written

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> JobOptions:
        """The inverse of `as_json`. An option that is not known is refused: it would have no effect."""
        unknown = sorted(values.keys() - shell_knobs().keys())
        if unknown:
            raise InputError(f"`dpis train` has no option {', '.join(unknown)} in this version")
        return cls(**values)


def shell_knobs() -> dict[str, Knob]:
    """The options that the command line offers, by name."""
    return {name: one for name, one in knobs(JobOptions).items() if not one.python_only}


def is_file(dataset: str) -> bool:
    """Whether a data set is named by a path: names have no suffix and no folder."""
    return "." in Path(dataset).name or "/" in dataset or "\\" in dataset
