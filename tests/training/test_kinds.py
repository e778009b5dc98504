"""Every optimizer and scheduler of torch resumes bit by bit, and data of every kind has a fingerprint."""

from __future__ import annotations

import datetime
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from dpis.errors import InputError
from dpis.randomness import Key
from dpis.sampling import Shards
from dpis.training import Records
from dpis.training.data_fingerprint import DataFingerprint
from tests.training.toys import Crash, crash_at, fit, points, released

OPTIMIZERS = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.ASGD,
    optim.RMSprop,
    optim.Rprop,
)


def _assert_resumes(tmp_path: Path, **settings: Any) -> None:
    settings |= {"batch_size": 32, "epochs": 3}
    whole = released(fit(tmp_path / "whole", **settings).folder)
    with pytest.raises(Crash):
        fit(tmp_path / "run", **settings, progress=crash_at(5))
    assert released(fit(tmp_path / "run", **settings, resume=True).folder) == whole


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_an_optimizer_resumes(tmp_path: Path, optimizer: Any) -> None:
    _assert_resumes(tmp_path, optimizer=lambda p: optimizer(p, lr=0.1), ema=0.9)


def _sequence(o: Any) -> Any:
    return schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5), schedulers.ExponentialLR(o, 0.5)], milestones=[2]
    )


SCHEDULERS = {
    "step": lambda o: schedulers.StepLR(o, 2),
    "milestones": lambda o: schedulers.MultiStepLR(o, [1, 2, 4]),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t)),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 4),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=6),
    "cycles": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, step_size_up=2),
    "warm-up": lambda o: schedulers.LinearLR(o, 0.1, total_iters=3),
    "sequence": _sequence,
    "chain": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5), schedulers.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_resumes(tmp_path: Path, name: str) -> None:
    _assert_resumes(tmp_path, scheduler=SCHEDULERS[name], scheduler_interval="step")


def test_a_plateau_resumes(tmp_path: Path) -> None:
    _assert_resumes(
        tmp_path,
        optimizer="adam",
        scheduler=lambda o: schedulers.ReduceLROnPlateau(o, mode="max", patience=0),
        held_out=points(20, seed=3),
    )


def fingerprint(records: Records, key: Key) -> str:
    seen = DataFingerprint(records, key, Shards.whole(len(records)))
    return seen.combined(seen.own_digests())


# ── fingerprints ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Item:
    inputs: torch.Tensor
    name: str


class Image:
    """Like those of image libraries: shows its address, and gives its pixels as an array."""

    def __init__(self, pixels: list[int]) -> None:
        self._pixels = np.array(pixels, dtype=np.uint8)
        self.__array_interface__ = self._pixels.__array_interface__


def _print(items: list[Any]) -> str:
    return fingerprint(Records(items, collate_fn=lambda items: items), Key.from_seed(1))


LONG = torch.arange(5000.0)
DIFFERENT: list[tuple[Any, Any]] = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.tensor([1.0]).bfloat16(), torch.tensor([1.01]).bfloat16()),
    (torch.tensor([1j]), torch.tensor([1j]).conj()),
    (torch.tensor([0.0, 1.0]).to_sparse(), torch.tensor([1.0, 0.0]).to_sparse()),
    (torch.tensor(True), torch.tensor(False)),
    (np.array([1.0]), np.array([2.0])),
    (np.array([1], dtype=object), np.array([2], dtype=object)),
    (np.float32(1.5), np.float32(1.25)),
    (np.array(["a"]), np.array(["b"])),
    (1, 1.0),
    (1, True),
    ("1", 1),
    (b"ab", "ab"),
    (None, "None"),
    (["ab", "c"], ["a", "bc"]),
    ([["a"], "b"], [["a", "b"]]),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    ({"a1": "x"}, {"a": "1x"}),
    (Item(LONG, "x"), Item(LONG + (LONG == 2500), "x")),  # which printing would leave out
    (Image([1, 2, 3]), Image([1, 2, 4])),
    (datetime.date(2022, 11, 7), datetime.date(2022, 11, 8)),
    (deque([1, 2]), deque([1, 3])),
    (Item, Image),
]


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_what_differs_has_another_fingerprint(number: int) -> None:
    one, other = DIFFERENT[number]
    assert _print([one, one]) == _print([one, one])
    assert _print([one, one]) != _print([one, other])
    assert _print([one, other]) != _print([other, one])


def test_a_fingerprint_is_the_same_for_a_copy() -> None:
    assert _print([Image([1, 2])]) == _print([Image([1, 2])])
    assert _print([Item(LONG, "x")]) == _print([Item(LONG.clone(), "x")])
    assert _print([datetime.date(2022, 11, 7)]) == _print([datetime.date(2022, 11, 7)])


def test_a_fingerprint_says_nothing_without_the_key() -> None:
    records = Records(points())
    assert fingerprint(records, Key.fresh()) != fingerprint(records, Key.fresh())


def test_what_has_no_fingerprint_is_refused() -> None:
    with pytest.raises(InputError, match="could not be told"):
        _print([lambda: None])
