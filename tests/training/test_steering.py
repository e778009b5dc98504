"""Whatever steers a run is the same when it goes on: held-out data, metrics, schedulers, stops."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import (
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpis.errors import InputError
from dpis.training import EarlyStop
from tests.training.toys import Crash, assert_verifies, crash_at, fit, linear, points, released

HELD_OUT = "the held-out data or its order"
METRICS = "the held-out metrics"
SCHEDULER = "the scheduler"


class Listed(Dataset[Any]):
    """Items one by one, so that they are collated."""

    def __init__(self, data: TensorDataset) -> None:
        self.items = [data[index] for index in range(len(data))]
        self.readings = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.readings += index == 0
        return self.items[index]


class Streamed(IterableDataset[Any]):
    """Items one after the other."""

    def __init__(self, data: TensorDataset) -> None:
        self.items = [data[index] for index in range(len(data))]

    def __iter__(self) -> Any:
        return iter(self.items)


FORMS: dict[str, Callable[[TensorDataset], Any]] = {
    "tensors": lambda data: data,
    "items": Listed,
    "stream": Streamed,
}


def _measured() -> TensorDataset:
    return points(10, seed=5)


def _other_value() -> TensorDataset:
    inputs, target = _measured().tensors
    inputs[7, 1] += 1e-6
    return TensorDataset(inputs, target)


def _other_target() -> TensorDataset:
    inputs, target = _measured().tensors
    target[3] = 1 - target[3]
    return TensorDataset(inputs, target)


def _other_order() -> TensorDataset:
    return TensorDataset(*(tensor.flip(0) for tensor in _measured().tensors))


def _one_less() -> TensorDataset:
    return TensorDataset(*(tensor[:-1] for tensor in _measured().tensors))


OTHERS = (_other_value, _other_target, _other_order, _one_less)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double()


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) != target).double()


def _edited_accuracy() -> Any:
    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).double() * 2

    accuracy.__qualname__ = "accuracy"
    return accuracy


def _plateau(**changes: Any) -> Any:
    return partial(ReduceLROnPlateau, **{"mode": "max", "patience": 0, "factor": 0.5, **changes})


def _steered(**changes: Any) -> dict[str, Any]:
    """A run whose learning rate and end depend on held-out data."""
    return {
        "held_out": _measured(),
        "metrics": {"accuracy": accuracy, "error": error},
        "scheduler": _plateau(),
        "early_stop": EarlyStop(patience=2),
        "epochs": 3,
        **changes,
    }


def _after_warm_up(optimizer: Any, rate: float) -> Any:
    then = LambdaLR(optimizer, lambda epoch: rate**epoch)
    return SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), then], [1])


def _cyclic(optimizer: Any, power: float) -> Any:
    scale = lambda x: x**power  # noqa: E731
    return CyclicLR(optimizer, 0.1, 0.2, scale_fn=scale, cycle_momentum=False)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "none held out": ({"held_out": None, "early_stop": None, "scheduler": None}, HELD_OUT),
    "a metric's code": (
        {"metrics": {"accuracy": _edited_accuracy(), "error": error}},
        METRICS,
    ),
    "the order of metrics": ({"metrics": {"error": error, "accuracy": accuracy}}, METRICS),
    "a metric less": ({"metrics": {"accuracy": accuracy}}, METRICS),
    "the metric of the stop": ({"early_stop": EarlyStop(metric="error")}, "the early stop"),
    "the patience of the stop": ({"early_stop": EarlyStop(patience=1)}, "the early stop"),
    "what is better": (
        {"early_stop": EarlyStop(patience=2, larger_is_better=False)},
        "the early stop",
    ),
    "no stop": ({"early_stop": None}, "the early stop"),
    "the plateau's mode": ({"scheduler": _plateau(mode="min")}, SCHEDULER),
    "the plateau's patience": ({"scheduler": _plateau(patience=1)}, SCHEDULER),
    "the plateau's threshold": ({"scheduler": _plateau(threshold=0.1)}, SCHEDULER),
    "the plateau's factor": ({"scheduler": _plateau(factor=0.4)}, SCHEDULER),
    "another scheduler": ({"scheduler": partial(ExponentialLR, gamma=0.5)}, SCHEDULER),
}


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A run that died in its second epoch, and what it would have given."""
    folder = tmp_path_factory.mktemp("steered")
    whole = released(fit(folder / "whole", **_steered()).folder)
    with pytest.raises(Crash):
        fit(folder / "run", **_steered(), progress=crash_at(6))
    return folder / "run", whole


def _refused(folder: Path, message: str, **settings: Any) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=f"{message} changed|{message} and .* changed") as refusal:
        fit(folder, resume=True, **settings)
    assert "\n" not in str(refusal.value)
    assert "start anew in another folder" in str(refusal.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("change", CHANGES)
def test_what_steers_a_run_must_not_change(
    steered: tuple[Path, dict[str, bytes]], tmp_path: Path, change: str
) -> None:
    settings, message = CHANGES[change]
    _refused(shutil.copytree(steered[0], tmp_path / "run"), message, **_steered(**settings))


def test_unchanged_it_ends_as_the_unbroken_run(
    steered: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    folder = shutil.copytree(steered[0], tmp_path / "run")
    fit(folder, **_steered(), resume=True)
    assert released(folder) == steered[1]
    assert_verifies(folder)


@pytest.mark.parametrize("form", FORMS)
def test_other_held_out_data_is_refused_in_every_form(tmp_path: Path, form: str) -> None:
    """Two models with equal noise, steered apart: their difference is bare of noise."""
    made = FORMS[form]
    with pytest.raises(Crash):
        fit(tmp_path / "run", **_steered(held_out=made(_measured())), progress=crash_at(6))
    for other in OTHERS:
        _refused(tmp_path / "run", HELD_OUT, **_steered(held_out=made(other())))
    fit(tmp_path / "run", **_steered(held_out=made(_measured())), resume=True)


def test_held_out_data_that_steers_nothing_is_compared_too(tmp_path: Path) -> None:
    """The history would tell of two data sets as if they were one."""
    with pytest.raises(Crash):
        fit(tmp_path / "run", held_out=_measured(), progress=crash_at(6))
    _refused(tmp_path / "run", HELD_OUT, held_out=_other_value())
    _refused(tmp_path / "run", HELD_OUT)
    fit(tmp_path / "run", held_out=_measured(), resume=True)


def test_held_out_data_is_not_read_once_more_for_it(tmp_path: Path) -> None:
    data = Listed(_measured())
    fit(tmp_path / "run", held_out=data)
    assert data.readings == 1 + 2  # the trial, and after every epoch


def test_the_same_held_out_data_looks_different_in_every_run(tmp_path: Path) -> None:
    """Without the key the fingerprint says nothing."""
    from dpis.mechanism.secret_state import load_secret_state

    seen = set()
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        fit(folder, held_out=_measured(), seed=seed, keep_checkpoint=True)
        seen.add(load_secret_state(folder / "checkpoint.secret")["training"]["held_out"])
    assert len(seen) == 2


@pytest.mark.parametrize("made", [_after_warm_up, _cyclic])
def test_functions_inside_a_scheduler_show(tmp_path: Path, made: Any) -> None:
    """They are not in its state."""
    first, other = (lambda optimizer, by=by: made(optimizer, by) for by in (0.9, 0.8))
    with pytest.raises(Crash):
        fit(tmp_path / "run", scheduler=first, progress=crash_at(6))
    _refused(tmp_path / "run", SCHEDULER, scheduler=other)
    fit(tmp_path / "run", scheduler=first, resume=True)


def _hooked_model(by: float) -> Any:
    model = linear()
    model.register_forward_hook(lambda module, inputs, output: by * output)
    return {"model": model}


def _hooked_optimizer(by: float) -> Any:
    def made(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda self, args, kwargs: by and None)
        return optimizer

    return {"optimizer": made}


@pytest.mark.parametrize(
    ("made", "message"), [(_hooked_model, "the model"), (_hooked_optimizer, "the optimizer")]
)
def test_hooks_show(tmp_path: Path, made: Any, message: str) -> None:
    with pytest.raises(Crash):
        fit(tmp_path / "run", **made(1.0), progress=crash_at(6))
    _refused(tmp_path / "run", message, **made(2.0))
    fit(tmp_path / "run", **made(1.0), resume=True)


def test_steering_decides_the_model(tmp_path: Path) -> None:
    """Why it is compared: with the same key, other held-out data ends in another model."""
    ends = []
    inputs, target = _measured().tensors
    reversed_ = TensorDataset(
        inputs, 1 - target
    )  # where accuracy rises on one, it falls on the other
    for name, data in (("a", _measured()), ("b", reversed_)):
        torch.manual_seed(0)
        folder = fit(tmp_path / name, **_steered(held_out=data, epochs=6)).folder
        ends.append(released(folder)["model.safetensors"])
    assert ends[0] != ends[1]
