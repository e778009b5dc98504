"""A device that is not the CPU, for machines that have no other: values are kept on the CPU, all else is watched.

Fake tensors have no values, and the engine looks at values when it plans. torch without CUDA cannot run autograd on
tensors that say ``cuda``. So tensors say ``meta``, a device that every build knows, and carry their values along.
What a real accelerator refuses raises here; what it would have to wait for is noted with the place that asked for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "dpis"
DEVICE = torch.device("meta")

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default: "reads a number",
    aten.item.default: "reads a number",
    aten.is_nonzero.default: "reads a number",
    aten.equal.default: "reads whether all are equal",
    aten.nonzero.default: "a size follows values",
    aten.masked_select.default: "a size follows values",
    aten._unique2.default: "a size follows values",
    aten.unique_dim.default: "a size follows values",
    aten.unique_consecutive.default: "a size follows values",
    aten.repeat_interleave.Tensor: "a size follows values",
    aten.bincount.default: "a size follows values",
}
"""What the host cannot go on from before the device has come so far."""

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


LENGTHS_ON_THE_HOST = {aten._pack_padded_sequence.default, aten._pad_packed_sequence.default}
"""Packed sequences are counted on the host, on every device."""

HANDING_ON = {
    ("watch.py", "__torch_function__"),
    ("watch.py", "_run_with_rule"),
    ("watch.py", "_run_without_rule"),
    ("watch.py", "_keep_use"),
    ("rule.py", "run"),
    ("rule.py", "compute"),
    ("rule.py", "result"),
}
"""These run a call as the model made it: what it mixes or waits for is the model's."""


class MixedDevicesError(RuntimeError):
    """One operation was given tensors of two devices."""


class Elsewhere(Tensor):
    """A tensor on the other device."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise MixedDevicesError(f"{function}: the other device is only there within `elsewhere`")


@dataclass(frozen=True)
class Event:
    """Something that a step on an accelerator should not do.

    Attributes:
        place: the innermost function of the package, as ``gradients/tape.py::norms``.
        line: in that file.
        what: happened.
    """

    place: str
    line: int
    what: str


class Traffic(TorchDispatchMode):
    """Runs every operation on the values, and notes what crosses the border.

    Attributes:
        events: since the last `forget`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def forget(self) -> None:
        """What was noted so far."""
        self.events.clear()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in given if isinstance(t, Elsewhere)]
        here = [t for t in given if not isinstance(t, Elsewhere) and t.ndim]
        asked = kwargs.get("device")
        ends_there = bool(there) if asked is None else torch.device(asked) == DEVICE
        self._look(function, args, there, here, ends_there)
        own = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
        result = function(*tree_map(_values, args), **tree_map(_values, own))
        if function is aten._to_copy.default and there and not ends_there:
            return result.clone()
        if not ends_there:
            return result
        if function in LENGTHS_ON_THE_HOST:
            packed, *lengths = result
            return Elsewhere(packed), *lengths
        wrapped = tree_map(lambda t: Elsewhere(t) if isinstance(t, Tensor) else t, result)
        return return_and_correct_aliasing(function, args, kwargs, wrapped)

    def _look(
        self, function: Any, args: Any, there: list[Tensor], here: list[Tensor], ends_there: bool
    ) -> None:
        if function in (aten._to_copy.default, aten.copy_.default):
            if there and (here or not ends_there):
                back = not ends_there or not isinstance(args[0], Elsewhere)
                self._note("is copied to the host" if back else "is copied from the host")
            elif here and ends_there:
                self._note("is copied from the host")
        elif there and function in WAITING:
            self._note(WAITING[function])
        elif there and function in INDEXING:
            if any(
                t.dtype in (torch.bool, torch.uint8) for t in tree_iter(args[1]) if t is not None
            ):
                self._note("a size follows values")
            elif here:
                self._note("is copied from the host")
        elif there and here and function not in LENGTHS_ON_THE_HOST:
            event = _event("mixes devices")
            if event is not None:
                raise MixedDevicesError(f"{function} in {event.place}, line {event.line}")

    def _note(self, what: str) -> None:
        event = _event(what)
        if event is not None:
            self.events.append(event)


def _event(what: str) -> Event | None:
    """Of the innermost function that is ours; None where the model or the loss of a test asked for it."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE) and (file.name, frame.f_code.co_name) not in HANDING_ON:
            function = frame.f_code.co_qualname.split(".<")[0]  # not the lambda within
            return Event(f"{file.relative_to(SOURCE)}::{function}", frame.f_lineno, what)
        if file.is_relative_to(TESTS) and file != Path(__file__):
            return None
        frame = frame.f_back
    return None


def _values(argument: Any) -> Any:
    return argument.values if isinstance(argument, Elsewhere) else argument


@contextmanager
def elsewhere() -> Iterator[Traffic]:
    """Within, the other device is there; it has a gigabyte, and autocast knows it."""
    known = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast

    def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kw: function(*("cpu" if a == DEVICE.type else a for a in args), **kw)

    with pytest.MonkeyPatch.context() as patch, Traffic() as traffic:
        memory = SimpleNamespace(mem_get_info=lambda device: (1 << 30, 1 << 30))
        patch.setattr(torch, DEVICE.type, memory, raising=False)
        for function in known:
            patch.setattr(torch, function.__name__, renamed(function))
        yield traffic


def moved(module: nn.Module) -> nn.Module:
    """The module with parameters and buffers on the other device."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                there = nn.Parameter(Elsewhere(parameter.detach()), parameter.requires_grad)
                part._parameters[name] = there
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = Elsewhere(buffer)
    return module
