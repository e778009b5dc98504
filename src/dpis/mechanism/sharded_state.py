"""Sharded tensors in the state of a run: apart for a checkpoint, in which each rank writes its rows, and put back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpis.mechanism.secret_parts import Parts

_NAME = "sharded tensor"


def taken_apart(state: Any, place: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """The state with a name in the place of every sharded tensor, and these tensors by name."""
    if is_sharded(state):
        return {_NAME: place}, {place: state}
    if isinstance(state, Mapping):
        parts = {key: taken_apart(value, f"{place}.{key}") for key, value in state.items()}
        tensors = [own for _, own in parts.values()]
        return {key: rest for key, (rest, _) in parts.items()}, _joined(tensors)
    if isinstance(state, list | tuple):
        items = [taken_apart(value, f"{place}.{i}") for i, value in enumerate(state)]
        return type(state)(rest for rest, _ in items), _joined([own for _, own in items])
    return state, {}


def put_together(state: Any, own: Mapping[str, Tensor], model: nn.Module) -> Any:
    """The state that `taken_apart` was given; of every sharded tensor this rank reads its rows alone.

    Args:
        state: as it was returned.
        own: where its tensors were written to.
        model: sharded as the tensors are to be; on another number of ranks, say.
    """
    if isinstance(state, Mapping):
        if state.keys() == {_NAME}:
            return _read(state[_NAME], own, model)
        return {key: put_together(value, own, model) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(put_together(value, own, model) for value in state)
    return state


def is_sharded(value: object) -> bool:
    """Whether it is a `DTensor`; where nobody has imported these there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _read(name: str, own: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    from torch.distributed.tensor import DTensor, zeros

    like = next(p for p in model.parameters() if isinstance(p, DTensor))
    assert isinstance(own, Parts)
    size, dtype = own.kind(name)
    room: Tensor = zeros(
        size, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements
    )
    own.read_into({name: room})
    return room


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}
