"""An open run belongs to the process that opened it: a child's copy releases, writes and deletes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

from dpis.errors import InputError
from dpis.mechanism import Config, Method
from dpis.randomness import Key
from dpis.training import Records, Run, RunOptions, Task, Trainer
from tests.forks import error_in_a_fork, needs_fork
from tests.training.toys import Each, assert_verifies, fit, linear, points, released

pytestmark = [needs_fork, pytest.mark.slow]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _opened(folder: Path) -> Trainer:
    config = Config(method=Method.DPIS, epsilon=4.0, n_public=64, batch_size=16, epochs=2)
    run = Run.start(folder, config, 64, Key.fresh(), RunOptions())
    model = linear()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    task = Task(
        model=model, records=Records(points()), loss=nn.CrossEntropyLoss(), optimizer=optimizer
    )
    return Trainer(run, task)


def test_a_run_that_was_opened_before_the_fork(tmp_path: Path) -> None:
    trainer = _opened(tmp_path / "run")
    before = _files(tmp_path / "run")
    assert "cancel" in error_in_a_fork(trainer.train)
    assert "cancel" in error_in_a_fork(lambda: trainer.run.save({}))
    assert "cancel" in error_in_a_fork(lambda: trainer.run.finish("0" * 64))
    assert not error_in_a_fork(trainer.run.discard)
    assert _files(tmp_path / "run") == before
    trainer.train()
    assert_verifies(tmp_path / "run")


def test_a_child_does_not_share_the_lock(tmp_path: Path) -> None:
    trainer = _opened(tmp_path / "run")
    said = error_in_a_fork(lambda: fit(tmp_path / "run", resume=True))
    assert "another process" in said
    trainer.train()


@pytest.mark.parametrize("step", [2, 4, 8])
def test_a_child_that_comes_out_of_the_middle_of_training(tmp_path: Path, step: int) -> None:
    """Its copy of the loop goes no further, and the parent's files stay as they are."""
    whole = released(fit(tmp_path / "whole").folder)
    said: list[str] = []

    def fork(standing: Any) -> None:
        if standing.step == step and not said:
            trainer = trainers[-1]
            before = _files(tmp_path / "run")
            said.append(error_in_a_fork(lambda: _go_on(trainer)))
            assert _files(tmp_path / "run") == before

    trainers: list[Trainer] = []
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer.train

        def train(self: Trainer) -> Any:
            trainers.append(self)
            return real(self)

        patch.setattr(Trainer, "train", train)
        fit(tmp_path / "run", progress=Each(fork))
    assert "cancel" in said[0]
    assert released(tmp_path / "run") == whole


def _go_on(trainer: Trainer) -> None:
    while not trainer._finished:
        trainer._epoch(lambda: False)
    trainer._release()


def test_every_child_may_train_by_itself(tmp_path: Path) -> None:
    assert not error_in_a_fork(lambda: fit(tmp_path / "first"))
    assert not error_in_a_fork(lambda: fit(tmp_path / "second"))
    with pytest.raises(InputError, match="is not empty"):
        fit(tmp_path / "first")
