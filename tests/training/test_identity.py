"""Descriptions change with what is done, and are the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpis.training.resume_identity import described, described_model

SOURCE = """
import torch
SCALE = 2.0
def helper(x): return x + 1
def loss(output, target, *, power=2, names=("a", "b")):
    known = {1, 2, 3} if target in {"x", "y", "z", "w"} else None
    return [helper(o) ** power * SCALE for o in output if o in {"p", "q", "r"}]
def made(by):
    def inner(x): return inner(x - 1) * by if x else by
    return inner
class Layer(torch.nn.Module):
    rate = 0.5
    @staticmethod
    def part(x): return x
    @property
    def twice(self): return 2 * self.rate
    def forward(self, x): return self.part(x) * self.twice
"""


def _module(source: str = SOURCE) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(source, "mine.py", "exec"), names)
    return names


def _told(source: str = SOURCE) -> str:
    names = _module(source)
    whole = [names["loss"], names["made"](3), partial(names["loss"], power=3), names["Layer"]()]
    return described(whole) + described_model(names["Layer"]())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x + 1", "x + 2"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("power=2", "power=4"),
        ("x - 1", "x - 2"),
        ('"z"', '"v"'),
        ("rate = 0.5", "rate = 0.6"),
        ("return x\n", "return -x\n"),
        ("2 * self.rate", "3 * self.rate"),
        ("self.part(x) *", "self.part(x) +"),
    ],
)
def test_an_edit_shows(before: str, after: str) -> None:
    assert before in SOURCE
    assert _told(SOURCE.replace(before, after)) != _told()


def test_where_it_stands_does_not_show() -> None:
    assert _told("\n# a comment\n\n" + SOURCE) == _told()


@pytest.mark.slow
def test_every_process_says_the_same() -> None:
    script = "from tests.training.test_identity import _told; print(_told(), end='')"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout == _told()


def test_what_a_closure_holds_shows() -> None:
    def weighing(weight: Any) -> Callable[[Any], Any]:
        return lambda x: weight * x

    first, other = torch.ones(2), torch.tensor([1.0, 2.0])
    assert described(weighing(2)) != described(weighing(3))
    assert described(weighing(first)) == described(weighing(first.clone()))
    assert described(weighing(first)) != described(weighing(other))
    assert described(weighing(object())) == described(weighing(object()))


def test_methods_show_their_code_and_their_object() -> None:
    class Augment:
        def __init__(self, strength: float) -> None:
            self.strength = strength

        def __call__(self, x: Any) -> Any:
            return self.strength * x

        def method(self, x: Any) -> Any:
            return self.strength + x

    assert described(Augment(1.0)) != described(Augment(2.0))
    assert described(Augment(1.0).method) != described(Augment(2.0).method)
    assert described(Augment(1.0).method) == described(Augment(1.0).method)


def test_what_is_installed_shows_by_name() -> None:
    assert described(nn.functional.cross_entropy) == "torch.nn.functional.cross_entropy"
    assert described(len) == "builtins.len"
    assert "code" not in described_model(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))


def test_a_function_in_a_wrapper_of_torch_shows() -> None:
    def wrapped(by: int) -> Any:
        return torch.no_grad()(lambda x: by * x)

    assert described(wrapped(2)) == described(wrapped(2)) != described(wrapped(3))


def test_a_name_of_an_attribute_and_a_counter_are_no_settings() -> None:
    source = "calls = {}\nmean = {}\ndef loss(x):\n    global calls\n    calls += 1\n    return x.mean(1)"
    assert described(_module(source.format(0, 1))["loss"]) == described(
        _module(source.format(5, 2))["loss"]
    )


def _frozen(value: float) -> nn.Module:
    layer = nn.Linear(1, 1).requires_grad_(False)
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    "held",
    [
        lambda value: np.array([1.0, value]),
        lambda value: {"smooth": value},
        lambda value: torch.tensor([complex(0, value)]),
        lambda value: torch.tensor([0.0, value]).to_sparse(),
        _frozen,
    ],
    ids=["array", "mapping", "complex", "sparse", "frozen layers"],
)
def test_what_a_loss_holds_shows(held: Callable[[float], Any]) -> None:
    def loss_with(value: float) -> Any:
        kept = held(value)
        return lambda x: (x, kept)

    assert described(loss_with(1.0)) == described(loss_with(1.0))
    assert described(loss_with(1.0)) != described(loss_with(2.0))
