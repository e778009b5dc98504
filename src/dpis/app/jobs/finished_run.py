"""What can be done with a finished run: measure it again, predict with it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from dpis.app.jobs.job_options import SAMPLE, is_file
from dpis.app.jobs.pipeline import Content, Pipeline
from dpis.datasets.named import TextDataset, load
from dpis.datasets.sample import load_sample
from dpis.errors import InputError
from dpis.files.preprocessing import ArrayPreprocessing, TextPreprocessing
from dpis.files.reading import encode_evaluation, encode_features
from dpis.models.kinds import ModelKind, model_kind
from dpis.runs.folder import RunFolder
from dpis.runs.summary import read_summary
from dpis.stored_rows import Column, RowsDataset, blocks_of
from dpis.training.api import to_device
from dpis.training.evaluation import HeldOut, evaluate, evaluating, metrics_of
from dpis.training.model_file import ModelCard, build, load_card, load_weights

ROWS_AT_ONCE = 1024


class FinishedRun:
    """A run that was completed: its model, and how inputs come to it."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        folder = RunFolder(path)
        self.summary = read_summary(folder)
        self.card: ModelCard = load_card(folder.model)
        if not self.card.preprocessing:
            raise InputError(
                f"{path} was trained from Python, with data of its own making: use its model there "
                "(model.safetensors loads into the module you trained)"
            )
        self.pipeline = Pipeline.from_json(self.card.preprocessing)
        self.device = to_device(device)
        self._path = folder.model

    def model(self, example: Column) -> nn.Module:
        """The trained network, for inputs like the example."""
        outputs = 1 if self.card.classes is None else len(self.card.classes)
        if self.card.architecture is not None:
            module = build(self.card.architecture)
        else:
            module = self._kind().build(tuple(example.shape[1:]), outputs)
        return load_weights(self._path, module).to(self.device)

    def _kind(self) -> ModelKind:
        name = self.summary["recipe"].get("model")
        if not isinstance(name, str):
            raise InputError(f"{self._path.parent / 'summary.json'} does not name the run's model")
        return model_kind(name)


def evaluate_run(
    path: Path, data: str | None = None, device: str = "auto", delimiter: str | None = None
) -> dict[str, float]:
    """Measure a finished model on a data set by name (its test part), or on a file with targets.

    Args:
        path: the run's folder.
        data: None: the test part of the data set it was trained on.
        device: where to compute.
        delimiter: between the cells of a table; None: as its header shows.
    """
    run = FinishedRun(path, device)
    features, targets = _evaluation_data(run, data, delimiter)
    inputs = run.pipeline.inputs(features)
    held_out = HeldOut(RowsDataset(inputs, targets), metrics_of(run.card.task))
    metrics = evaluate(run.model(inputs), held_out, run.device).metrics
    if any(math.isnan(value) for value in metrics.values()):
        raise InputError(
            f"{path}: the model gives NaN, so there is nothing to measure. Train it with a smaller learning rate"
        )
    return metrics


def _evaluation_data(
    run: FinishedRun, data: str | None, delimiter: str | None
) -> tuple[Content, Tensor]:
    if data is not None and is_file(data):
        if isinstance(run.pipeline.preprocessing, TextPreprocessing):
            raise InputError("a model of texts is measured on a data set by name, such as imdb")
        return encode_evaluation(data, run.pipeline.preprocessing, delimiter=delimiter)
    name = run.summary["recipe"].get("data") if data is None else data
    if not isinstance(name, str) or " " in name:
        raise InputError(
            "this model was trained on a file of your own: name a file with targets to measure it on"
        )
    known = load_sample() if name == SAMPLE else load(name)
    if known.classes != run.card.classes:
        raise InputError(f"{name} has other classes than this model was trained on")
    of_texts = isinstance(run.pipeline.preprocessing, TextPreprocessing)
    if isinstance(known, TextDataset):
        if not of_texts:
            raise InputError(f"this model was not trained on texts, as {name} has them")
        return known.test_texts, known.test_labels
    _require_images(run, name, tuple(known.test_images.shape[1:]))
    return known.test_images.float() / 255, known.test_labels


def _require_images(run: FinishedRun, name: str, shape: tuple[int, ...]) -> None:
    """Images such as the model was trained on: pixels of the same range, and as many."""
    trained_on = run.pipeline.preprocessing
    if not (isinstance(trained_on, ArrayPreprocessing) and trained_on.divide_by_255):
        raise InputError(f"this model was not trained on pixels from 0 to 255, as {name} has them")
    if _with_channels(trained_on.record_shape) != _with_channels(shape):
        raise InputError(
            f"this model was trained on records of the shape {list(trained_on.record_shape)}, {name} has "
            f"{list(shape)}: measure it on data like what it was trained on"
        )


def _with_channels(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == 2 else shape


def predict_file(
    path: Path, data: str, device: str = "auto", delimiter: str | None = None
) -> list[str] | list[float]:
    """One prediction for every record of a file, in its order: a class, or a number in the target's units."""
    run = FinishedRun(path, device)
    preprocessing = run.pipeline.preprocessing
    features = (
        _lines_of(data)
        if isinstance(preprocessing, TextPreprocessing)
        else encode_features(data, preprocessing, delimiter=delimiter)
    )
    if not len(features):
        return []
    inputs = run.pipeline.inputs(features)
    model = run.model(inputs)
    with evaluating(model):
        parts = [model(part.to(run.device)).cpu() for part in blocks_of(inputs, ROWS_AT_ONCE)]
    return preprocessing.decode_predictions(torch.cat(parts))


def _lines_of(path: str) -> tuple[str, ...]:
    """Texts from a file, one a line."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as text, one a line, in UTF-8: {error}") from None
    lines = text.split("\n")  # and at nothing else: a text may hold other signs that end lines
    if lines[-1] == "":
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)
