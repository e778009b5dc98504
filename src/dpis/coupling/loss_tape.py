"""What a loop made of a model's outputs, written down so that it can be done again with other outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpis import batches

Look = Callable[["LossTape", Tensor, Tensor | None], None]
"""``look(tape, loss, gradient)``: before ``loss.backward(gradient)``."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor."""

    number: int


@dataclass(frozen=True, eq=False)
class _Coins:
    """Stands for a generator, as it was."""

    device: torch.device
    state: Tensor

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).set_state(self.state)


@dataclass(eq=False)
class Call:
    """One function of torch, and what it was given."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    states: Mapping[torch.device, Tensor]  # of the global generators
    with_gradients: bool
    autocast: Mapping[str, Any]
    written: tuple[Tensor | None, int]
    results: Sequence[int] = ()
    random: bool = False


class LossTape:
    """Every function of torch that was called with outputs, or with what was made of them.

    Numbers that python took out of tensors (``item()``), and what it decided by them, stay as they were.

    Args:
        look: what to do before a loss is differentiated.
    """

    def __init__(self, look: Look) -> None:
        self.look = look
        self.open = True
        self._calls: list[Call] = []
        self._slots: dict[int, int] = {}
        self._held: list[Tensor] = []  # in the order of slots, so that no id is given twice
        self._leaves: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}  # of constants that no call has written to

    def close(self) -> list[Tensor]:
        """Nothing is written down from now on, and nothing kept.

        Returns:
            All tensors that were.
        """
        self.open, held = False, self._held
        self._calls, self._slots, self._held = [], {}, []
        self._leaves, self._constants, self._versions = {}, {}, {}
        return held

    def begin(self, output: Tensor, leaf: Tensor) -> None:
        """An output, as the loop gets it, is a copy of this leaf."""
        self._leaves[self._new(output)] = leaf

    def slot(self, tensor: Tensor) -> int | None:
        """Where a tensor stands, if it was made by what was written down."""
        return self._slots.get(id(tensor))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────

    def before(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Call | None:
        """A call that is about to happen; None, where it cannot be written down (inside of ``vmap``)."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        given = [*batches.tensors(args), *batches.tensors(kwargs)]
        devices = {tensor.device for tensor in given} | {torch.device("cpu")}
        written = next((t for t in batches.tensors((kwargs.get("out"), args[:1]))), None)
        return Call(
            function,
            self._without_tensors(args),
            self._without_tensors(kwargs),
            _states(devices),
            torch.is_grad_enabled(),
            _precision(given[0].device.type),
            (written, _version(written)),
        )

    def after(self, call: Call, result: Any) -> None:
        """It has happened."""
        written, version = call.written
        wrote = written is not None and _version(written) != version
        made = list(batches.tensors(result))
        if not made and not wrote:
            return
        if written is not None and wrote:
            self._versions.pop(self._slots[id(written)], None)
        call.results = [
            self._slots[id(tensor)] if id(tensor) in self._slots else self._new(tensor)
            for tensor in made
        ]
        now = _states(call.states)
        call.random = any(not torch.equal(now[device], was) for device, was in call.states.items())
        call.written = None, 0
        self._calls.append(call)

    def _new(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        self._slots[id(tensor)] = len(self._held) - 1
        return len(self._held) - 1

    def _without_tensors(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return _Slot(self._known(given))
        if isinstance(given, torch.Generator):
            return _Coins(given.device, given.get_state())
        return _mapped(self._without_tensors, given)

    def _known(self, tensor: Tensor) -> int:
        number = self._slots.get(id(tensor))
        if number is not None and self._versions.get(number, _version(tensor)) == _version(tensor):
            return number
        number = self._new(tensor)
        self._constants[number] = tensor.detach().clone().as_subclass(Tensor)
        self._versions[number] = _version(tensor)
        return number

    # ── doing it again ───────────────────────────────────────────────────────────────────────────────

    def replay(self, wanted: int, outputs: Mapping[int, Tensor]) -> Tensor | None:
        """The tensor at a slot, made again.

        Args:
            wanted: the slot.
            outputs: other values for leaves, by the id of the leaf.

        Returns:
            None, if something on the way cannot be done with these.
        """
        values = {slot: constant.clone() for slot, constant in self._constants.items()}
        for slot, leaf in self._leaves.items():
            values[slot] = outputs.get(id(leaf), leaf).clone()
        for call in self._calls:
            try:
                made = list(batches.tensors(_done_again(call, values)))
                values.update(zip(call.results, made, strict=True))
            except Exception:  # a domain that was left, or what an earlier call did not make
                for slot in call.results:
                    values.pop(slot, None)
        return values.get(wanted)


def _done_again(call: Call, values: Mapping[int, Tensor]) -> Any:
    def filled(given: Any) -> Any:
        if isinstance(given, _Slot):
            return values[given.number]
        return given.generator() if isinstance(given, _Coins) else _mapped(filled, given)

    with ExitStack() as stack:
        if call.random:
            accelerators = [device for device in call.states if device.type == "cuda"]
            stack.enter_context(torch.random.fork_rng(accelerators))
            for device, state in call.states.items():
                _set_state(device, state)
        stack.enter_context(torch.set_grad_enabled(call.with_gradients))
        stack.enter_context(torch.autocast(**call.autocast))
        return call.function(*filled(call.args), **filled(call.kwargs))


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    if isinstance(given, dict):
        return {key: function(value) for key, value in given.items()}
    if isinstance(given, slice):
        return slice(function(given.start), function(given.stop), function(given.step))
    if isinstance(given, tuple | list) and not isinstance(given, torch.Size):
        return batches.like(given, [function(value) for value in given])
    return given


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _states(devices: Any) -> dict[torch.device, Tensor]:
    """Of the global generators: a look may draw nothing from them."""
    return {
        device: torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        for device in devices
        if device.type in ("cpu", "cuda")
    }


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _precision(device: str) -> dict[str, Any]:
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }
