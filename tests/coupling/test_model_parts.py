"""What a model is made of: never another answer than a walk, whatever was exchanged since the last one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from dpis.coupling import model_parts
from dpis.coupling.forbidden_layers import checked_model
from dpis.coupling.model_parts import ModelParts, parts_of
from dpis.errors import CouplingError


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()}))
    made.register_buffer("counts", torch.zeros(3))
    return made


def swapped(made: nn.Sequential) -> None:
    one, two = made[0].weight, made[1]["a"].weight
    made[0].weight, made[1]["a"].weight = two, one


def moved_down(made: nn.Sequential) -> None:
    """The same names and objects in the same order, in another layer."""
    made.register_parameter("bias", None)
    made[1].register_parameter("own", made[1]["a"].bias)
    del made[1]["a"]._parameters["bias"]
    made[1]["a"].register_parameter("own", made[1]._parameters.pop("own"))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a layer is added": lambda made: made.append(nn.Linear(1, 1)),
    "a layer is replaced": lambda made: made[1].__setitem__("b", nn.Linear(2, 2)),
    "a layer is taken out": lambda made: made.__delitem__(0),
    "a layer has another name": lambda made: made[1].__setitem__("c", made[1].pop("b")),
    "a parameter is replaced": lambda made: setattr(made[0], "bias", nn.Parameter(torch.ones(2))),
    "a parameter is dropped": lambda made: setattr(made[0], "bias", None),
    "two parameters change places": swapped,
    "a parameter is renamed": moved_down,
    "a parameter is tied": lambda made: setattr(made[0], "weight", made[1]["a"].weight),
    "a parametrization": lambda made: parametrize.register_parametrization(
        made[0], "weight", nn.Identity()
    ),
    "a buffer is replaced": lambda made: setattr(made, "counts", torch.ones(3)),
    "a buffer is added": lambda made: made[1]["b"].register_buffer("more", torch.ones(1)),
    "tables are replaced": lambda made: setattr(made[0], "_parameters", {}),
}


def require_walk(made: nn.Module) -> None:
    """Compared by identity."""
    parts = parts_of(made)
    walks = (
        (parts.layers, [each for each in made.named_modules() if each[1] is not made]),
        (parts.parameters, made.named_parameters()),
        (parts.buffers, made.named_buffers()),
    )
    for found, walk in walks:
        expected = list(walk)
        assert [name for name, _ in expected] == list(found)
        assert all(found[name] is one for name, one in expected)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[nn.Sequential], object]) -> None:
    made = model()
    require_walk(made)
    change(made)
    require_walk(made)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_without_a_look_it_is_not(
    change: Callable[[nn.Sequential], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelParts, "still_in", lambda self, module: True)
    with pytest.raises(AssertionError):
        test_a_change_is_seen(change)


def test_nothing_changed_nothing_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    first = parts_of(made)
    monkeypatch.setattr(nn.Module, "named_parameters", None)
    assert parts_of(made) is first
    assert made not in list(first.layers.values())


def test_a_model_is_not_kept_alive() -> None:
    made = model()
    parts_of(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert all(key is not None for key in model_parts._LAST)


def test_a_layer_that_couples_is_refused_when_it_comes() -> None:
    made = checked_model(model())
    made.append(nn.BatchNorm1d(2))
    with pytest.raises(CouplingError):
        checked_model(made)
    made[-1] = nn.Embedding(3, 2)
    checked_model(made)[-1].max_norm = 1.0
    with pytest.raises(CouplingError):
        checked_model(made)
    with pytest.raises(CouplingError):
        checked_model(nn.BatchNorm1d(2))
