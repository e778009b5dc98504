"""A run that dies at any moment goes on and ends as if it had not; over anything else it does not go on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

from dpis.accounting import ledger_writer
from dpis.errors import InputError, LedgerError
from dpis.mechanism.secret_state import load_secret_state, save_secret_state
from dpis.training import EarlyStop, InterruptedRunError, trainer
from tests.training.toys import (
    Crash,
    Each,
    crash_at,
    fit,
    ledger,
    linear,
    mlp,
    points,
    released,
)

CLIPPING = {"clip_ceiling": 2.0, "clip_lowest": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "dpis": {"ema": 0.9, "held_out": points(10)},
    "dpis with a count": {"release_n": True, "scheduler": partial(ExponentialLR, gamma=0.5)},
    "adaptive": {
        "method": "dpis-adaptive",
        **CLIPPING,
        "release_n": True,
        "optimizer": "adam",
        "contribution": "reject",
    },
}
QUICK = {"batch_size": 32, "epochs": 2}

left_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""The dead close no files."""


class Dying:
    """Dies after its n-th touch of the disk or step, and touches nothing afterwards."""

    def __init__(self, last: int | None) -> None:
        self.last, self.count, self.dead, self.steps = last, 0, False, 0

    def _point(self) -> None:
        if self.dead:
            raise Crash
        self.dead = self.count == self.last
        self.count += 1
        if self.dead:
            raise Crash

    def after(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def then_die(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Crash
            result = real(*args, **kwargs)
            self._point()
            return result

        return then_die

    def half_written(self, file: Any, data: bytes) -> None:
        """Half a block of the ledger, then the rest."""
        if self.dead:
            raise Crash
        file.write(data[: len(data) // 2])
        file.flush()
        self._point()
        file.write(data[len(data) // 2 :])
        file.flush()
        os.fsync(file.fileno())

    def stepped(self, *_: object) -> None:
        self.steps += 1
        self._point()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace", "open", "mkdir"):
                patch.setattr(os, name, self.after(getattr(os, name)))
            patch.setattr(Path, "unlink", self.after(Path.unlink))
            patch.setattr(ledger_writer, "write_through", self.half_written)
            handle = register_optimizer_step_post_hook(self.stepped)
            try:
                yield
            finally:
                handle.remove()


def _go_on(folder: Path, settings: dict[str, Any]) -> None:
    """What a person does after a crash."""
    if (folder / "checkpoint.secret").exists():
        fit(folder, **settings, resume=True)
    elif not (folder / "summary.json").exists():
        fit(folder, **settings)


def _assert_claims_enough(folder: Path, steps: int) -> None:
    path = folder / "ledger.jsonl"
    if path.exists() and b"\n" in path.read_bytes():
        assert sum(e.label == "gradient" for e in ledger(folder).entries) >= steps
    else:
        assert steps == 0
    for name in ("model.safetensors", "summary.json"):
        assert steps == 4 or not (folder / name).exists()


def _sweep(tmp_path: Path, name: str, points_: range) -> None:
    settings = QUICK | RUNS[name]
    whole = released(fit(tmp_path / "whole", **settings).folder)
    with (counting := Dying(None)).at_work():
        fit(tmp_path / "counted", **settings)
    assert released(tmp_path / "counted") == whole
    for last in points_:
        if last >= counting.count:
            break
        folder = tmp_path / str(last)
        with (dying := Dying(last)).at_work(), pytest.raises(Crash):
            fit(folder, **settings)
        _assert_claims_enough(folder, dying.steps)
        _go_on(folder, settings)
        assert released(folder) == whole, f"dead after {last} of {counting.count}"


@pytest.mark.slow
@left_open
@pytest.mark.parametrize("name", RUNS)
def test_dead_at_some_points(tmp_path: Path, name: str) -> None:
    first = list(RUNS).index(name)
    _sweep(tmp_path, name, range(first, 1000, 19))


@left_open
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_dead_at_every_point(tmp_path: Path, name: str) -> None:
    _sweep(tmp_path, name, range(1000))


@left_open
def test_dead_again_and_again(tmp_path: Path) -> None:
    """Every attempt gets a little further than the last checkpoint, or ends."""
    settings = QUICK | RUNS["adaptive"]
    whole = released(fit(tmp_path / "whole", **settings).folder)
    folder, last = tmp_path / "run", 3
    while not (folder / "summary.json").exists():
        with Dying(last).at_work():
            try:
                _go_on(folder, settings)
            except Crash:
                last += 7
    _go_on(folder, settings)
    assert released(folder) == whole


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_in_the_middle_of_an_epoch(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RUNS[name] | {"release_n": False}  # so that epochs have four steps
    whole = released(fit(tmp_path / "whole", **settings).folder)
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", -1.0)  # one after every step
    with pytest.raises(Crash):
        fit(tmp_path / "run", **settings, progress=crash_at(7))
    saved = load_secret_state(tmp_path / "run" / "checkpoint.secret")["training"]["mechanism"]
    assert (saved["step"], saved["steps_left"]) == (6, 2)
    assert released(fit(tmp_path / "run", **settings, resume=True).folder) == whole


def test_the_first_checkpoint_holds_the_untrained_model(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        fit(tmp_path, progress=crash_at(1))
    state = load_secret_state(tmp_path / "checkpoint.secret")
    assert torch.equal(state["training"]["model"]["weight"], linear().weight)
    whole = fit(tmp_path / "whole")
    again = fit(tmp_path, linear(seed=77), resume=True)  # another start would not be the same run
    (tmp_path / "whole").rename(tmp_path.with_name("elsewhere"))
    assert released(again.folder) == released(tmp_path.with_name("elsewhere"))
    assert whole.claim == again.claim


def test_an_epoch_is_on_disk_before_its_first_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpis.mechanism import Mechanism

    seen = []
    real = Mechanism.draw

    def draw(self: Mechanism) -> Any:
        seen.append(len(ledger(tmp_path / "run").entries))
        return real(self)

    monkeypatch.setattr(Mechanism, "draw", draw)
    fit(tmp_path / "run")
    assert seen == [4] * 4 + [8] * 4


# ── over something else ──────────────────────────────────────────────────────────────────────────────


def _changed_value() -> TensorDataset:
    inputs, target = points().tensors
    inputs = inputs.clone()
    inputs[40, 2] += 1e-6
    return TensorDataset(inputs, target)


def _squared(output: Any, target: Any) -> Any:
    return (output[:, 0] - target).square()


def _shift(batch: Any, generator: torch.Generator) -> Any:
    return batch[0] + 1, batch[1]


def _stack(items: list[Any]) -> Any:
    return torch.utils.data.default_collate(items)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a value": ({"dataset": _changed_value()}, "the data or its order"),
    "the order": (
        {"dataset": TensorDataset(*(t.flip(0) for t in points().tensors))},
        "the data or its order",
    ),
    "a record more": (
        {"dataset": TensorDataset(*(torch.cat([t, t[:1]]) for t in points().tensors))},
        "the data or its order",
    ),
    "users": ({"user_ids": list(range(64))}, "protect users"),
    "epsilon": ({"epsilon": 5.0}, "epsilon: 4.0, now 5.0"),
    "kappa": ({"kappa": 0.5}, "kappa: None, now 0.5"),
    "epochs": ({"epochs": 3}, "epochs: 2, now 3"),
    "seed": ({"seed": 8}, "seed: 7, now 8"),
    "diagnostics": ({"diagnostics": True}, "diagnostics"),
    "model": ({"model": nn.Sequential(linear())}, "the model"),
    "a layer's setting": ({"model": mlp(dropout=0.2)}, "the model"),
    "loss": ({"loss": _squared}, "the loss"),
    "class weights": ({"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))}, "the loss"),
    "lr": ({"lr": 0.2}, "the optimizer"),
    "optimizer": ({"optimizer": "adam"}, "the optimizer"),
    "scheduler": ({"scheduler": partial(ExponentialLR, gamma=0.4)}, "the scheduler"),
    "scheduler's interval": ({"scheduler_interval": "step"}, "the scheduler"),
    "average": ({"ema": 0.8}, "the moving average"),
    "augmentation": ({"augment": _shift}, "the augmentation"),
    "collate": ({"collate_fn": _stack}, "the collate function"),
    "physical batch": ({"physical_batch": 32}, "the physical batch"),
    "early stop": (
        {"early_stop": EarlyStop(patience=1), "held_out": points(4)},
        "the early stop",
    ),
    "shapes": ({"batch_shaped": True}, "batch_shaped"),
}


class _Scaled(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, inputs: Any) -> Any:
        return self.scale * self.linear(inputs)


class _ScaledTwice(_Scaled):
    def forward(self, inputs: Any) -> Any:
        return 2 * self.scale * self.linear(inputs)


def _each(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(output, target, reduction="none")


def _each_doubled(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(2 * output, target, reduction="none")


def _shift_less(batch: Any, generator: torch.Generator) -> Any:
    return batch[0] + 0.5, batch[1]


def _stack_halves(items: list[Any]) -> Any:
    return torch.utils.data.default_collate([(x / 2, y) for x, y in items])


def _edited(original: Any, edited: Any) -> Any:
    """The same name over another body, as after an edit in a notebook."""
    edited.__name__, edited.__qualname__ = original.__name__, original.__qualname__
    return edited


EDITS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]], str]] = {
    "loss": (
        lambda: {"loss": _each},
        lambda: {"loss": _edited(_each, _each_doubled)},
        "the loss",
    ),
    "augmentation": (
        lambda: {"augment": _shift},
        lambda: {"augment": _edited(_shift, _shift_less)},
        "the augmentation",
    ),
    "collate": (
        lambda: {"collate_fn": _stack},
        lambda: {"collate_fn": _edited(_stack, _stack_halves)},
        "the collate function",
    ),
    "forward": (
        lambda: {"model": _Scaled()},
        lambda: {"model": _edited(_Scaled, _ScaledTwice)()},
        "the model",
    ),
    "learning rates": (
        lambda: {"scheduler": partial(LambdaLR, lr_lambda=lambda epoch: 0.9**epoch)},
        lambda: {"scheduler": partial(LambdaLR, lr_lambda=lambda epoch: 0.8**epoch)},
        "the scheduler",
    ),
}


class _FullDiskError(Exception):
    pass


def _fail_at(step: int) -> Each:
    def fail(standing: Any) -> None:
        if standing.step == step:
            raise _FullDiskError

    return Each(fail)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_under_the_same_name_is_refused(tmp_path: Path, edit: str) -> None:
    original, edited, message = EDITS[edit]
    with pytest.raises(_FullDiskError):
        fit(tmp_path / "run", **original(), progress=_fail_at(2))
    with pytest.raises(InputError, match=rf"{message} changed.*code.*version of Python"):
        fit(tmp_path / "run", **edited(), resume=True)
    fit(tmp_path / "run", **original(), resume=True)


def test_an_error_between_steps_loses_no_step(tmp_path: Path) -> None:
    whole = released(fit(tmp_path / "whole").folder)
    with pytest.raises(_FullDiskError):
        fit(tmp_path / "run", progress=_fail_at(3))
    saved = load_secret_state(tmp_path / "run" / "checkpoint.secret")["training"]
    assert saved["mechanism"]["step"] == 3
    assert released(fit(tmp_path / "run", resume=True).folder) == whole


def test_an_error_within_a_step_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    whole = released(fit(tmp_path / "whole", loss=_each).folder)
    handle = register_optimizer_step_post_hook(_fail_at_third())
    try:
        with pytest.raises(_FullDiskError):
            fit(tmp_path / "run", loss=_each)
    finally:
        handle.remove()
    saved = load_secret_state(tmp_path / "run" / "checkpoint.secret")["training"]
    assert saved["mechanism"]["step"] == 0
    assert released(fit(tmp_path / "run", loss=_each, resume=True).folder) == whole


def _fail_at_third() -> Callable[..., None]:
    steps = []

    def fail(*_: object) -> None:
        steps.append(1)
        if len(steps) == 3:
            raise _FullDiskError

    return fail


def test_a_run_from_before_code_was_compared(tmp_path: Path) -> None:
    with pytest.raises(_FullDiskError):
        fit(tmp_path / "run", loss=_each, progress=_fail_at(2))
    path = tmp_path / "run" / "checkpoint.secret"
    state = load_secret_state(path)
    state["training"]["identity"]["the loss"] = "tests.training.test_resume._each"
    save_secret_state(path, state)
    with pytest.raises(InputError, match="the loss changed") as refusal:
        fit(tmp_path / "run", loss=_each, resume=True)
    assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A run that died in its second epoch, and what it would have given."""
    folder = tmp_path_factory.mktemp("interrupted")
    settings = {"scheduler": partial(ExponentialLR, gamma=0.5)}
    whole = released(fit(folder / "whole", mlp(), **settings).folder)
    with pytest.raises(Crash):
        fit(folder / "run", mlp(), **settings, progress=crash_at(6))
    return folder / "run", whole


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused(interrupted: tuple[Path, dict[str, bytes]], change: str) -> None:
    folder, _ = interrupted
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    settings, message = CHANGES[change]
    settings = {"model": mlp(), "scheduler": partial(ExponentialLR, gamma=0.5)} | settings
    with pytest.raises(InputError, match=message) as refusal:
        fit(folder, resume=True, **settings)
    assert "\n" not in str(refusal.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_after_all_refusals_the_run_goes_on(
    interrupted: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    refused, whole = interrupted
    folder = shutil.copytree(refused, tmp_path / "run")  # others still need the one of the fixture
    model = mlp(seed=3)  # its weights are in the checkpoint
    fit(folder, model, scheduler=partial(ExponentialLR, gamma=0.5), resume=True)
    assert released(folder) == whole


@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive"])
def test_a_released_count_is_not_released_of_other_data(tmp_path: Path, method: str) -> None:
    with pytest.raises(Crash):
        fit(tmp_path / "run", method=method, release_n=True, progress=crash_at(2))
    with pytest.raises(InputError, match=r"data|header"):
        fit(tmp_path / "run", dataset=points(90), method=method, release_n=True, resume=True)


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    with pytest.raises(InputError, match="a run that is complete deletes it"):
        fit(tmp_path / "run", resume=True)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        fit(tmp_path / "run", progress=crash_at(5))
    path = tmp_path / "run" / "checkpoint.secret"
    whole = path.read_bytes()
    for damaged in (whole[:1000], whole[:-1000], b"", b"x" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"is damaged, .* start the run anew") as refused:
            fit(tmp_path / "run", resume=True)
        assert "torch" not in str(refused.value)
        assert "weights_only" not in str(refused.value)
    path.write_bytes(whole)
    fit(tmp_path / "run", resume=True)


def test_a_ledger_that_lost_lines(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        fit(tmp_path / "run", progress=crash_at(5))
    path = tmp_path / "run" / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(LedgerError, match="lost lines"):
        fit(tmp_path / "run", resume=True)


@pytest.mark.parametrize("method", ["dpis", "sgd"])
def test_one_at_a_time(tmp_path: Path, method: str) -> None:
    """While a run is at work, nobody else resumes it or begins another there."""
    tried = []

    def meddle(_: object) -> None:
        for resume in (True, False):
            with pytest.raises(InputError, match="another process"):
                fit(tmp_path / "run", method=method, resume=resume)
            tried.append(resume)

    fit(tmp_path / "run", method=method, progress=Each(meddle))
    assert len(tried) == 16
    assert released(tmp_path / "run") == released(fit(tmp_path / "other", method=method).folder)


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_an_interrupt_saves_and_says_how_to_go_on(tmp_path: Path, step: int) -> None:
    whole = released(fit(tmp_path / "whole").folder)
    handler = signal.getsignal(signal.SIGINT)

    def press(standing: Any) -> None:
        if standing.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    if step == 8:  # nothing is left to do but to release
        fit(tmp_path / "run", progress=Each(press))
    else:
        with pytest.raises(InterruptedRunError, match=f"--resume {tmp_path / 'run'}"):
            fit(tmp_path / "run", progress=Each(press))
        saved = load_secret_state(tmp_path / "run" / "checkpoint.secret")
        assert saved["training"]["mechanism"]["step"] == step
        fit(tmp_path / "run", resume=True)
    assert signal.getsignal(signal.SIGINT) is handler
    assert released(tmp_path / "run") == whole


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def press_twice(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt) as stop:
            fit(tmp_path / "run", progress=Each(press_twice))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(stop.value, InterruptedRunError)
    whole = released(fit(tmp_path / "whole").folder)
    assert released(fit(tmp_path / "run", resume=True).folder) == whole
