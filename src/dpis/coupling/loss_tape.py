"""What a loop made of a model's outputs, written down so that it can be done again with other outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpis import batches

States = Mapping[torch.Generator, Tensor]
"""Of the global generators."""


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
class TapeCall:
    """One function of torch, and what it was given."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    with_gradients: bool
    precision: Callable[[], torch.autocast]
    states: States
    written: tuple[Tensor | None, int]
    results: Sequence[int] = ()
    random: bool = False


class LossTape:
    """Every function of torch that was called with outputs, or with what was made of them.

    Numbers that python took out of tensors (``item()``), and what it decided by them, stay as they were.
    """

    def __init__(self) -> None:
        self.open = True
        self._calls: list[TapeCall] = []
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

    def before(self, function: Callable[..., Any], args: Any, kwargs: Any) -> TapeCall | None:
        """A call that is about to happen; None, where it cannot be written down (inside of ``vmap``)."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        devices = {tensor.device for tensor in batches.tensors((args, kwargs))}
        kind = next(batches.tensors((args, kwargs))).device.type
        written = next((t for t in batches.tensors((kwargs.get("out"), args[:1]))), None)
        return TapeCall(
            function,
            self._without_tensors(args),
            self._without_tensors(kwargs),
            torch.is_grad_enabled(),
            partial(
                torch.autocast,
                kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
            ),
            _states(devices),
            (written, _version(written)),
        )

    def after(self, call: TapeCall, result: Any) -> None:
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
        call.random = any(not torch.equal(g.get_state(), was) for g, was in call.states.items())
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


def _done_again(call: TapeCall, values: Mapping[int, Tensor]) -> Any:
    args, kwargs = _filled(values, call.args), _filled(values, call.kwargs)
    chance = _standing_at(call.states) if call.random else nullcontext()
    with chance, torch.set_grad_enabled(call.with_gradients), call.precision():
        return call.function(*args, **kwargs)


def _filled(values: Mapping[int, Tensor], given: Any) -> Any:
    """With tensors and generators in their slots; no closure: one that calls itself holds all values until a sweep."""
    if isinstance(given, _Slot):
        return values[given.number]
    if isinstance(given, _Coins):
        return given.generator()
    return _mapped(partial(_filled, values), given)


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


def _states(devices: Iterable[torch.device]) -> States:
    of_devices = [torch.cuda.default_generators[d.index] for d in devices if d.type == "cuda"]
    return {g: g.get_state() for g in (torch.default_generator, *of_devices)}


@contextmanager
def _standing_at(states: States) -> Iterator[None]:
    """The global generators as they were, for a while: a look may draw nothing from them."""
    now = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in now.items():
            generator.set_state(state)
