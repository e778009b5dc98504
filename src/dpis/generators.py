"""What is random about a record on its way to its gradient: dropout, transforms; and initial weights.

None of it is released, but all of it must be secret and repeatable. Secret: masks go by place in the batch, so to
whoever knows the seed one record shifts the masks of all that follow it (docs/soundness.md). Repeatable: a step that is
done again after a crash sees the same masks. So the generators of torch, numpy and Python are filled from a stream of
the run's key for a while, and then stand where they stood: how far they moved would tell how many records were drawn.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpis.randomness import KEY_BYTES, Stream

_WORDS = 624
"""Of 32 bits: the state of a Mersenne Twister. ``torch.manual_seed`` fills it from 32 bits of its seed."""


class _Turns:
    """The generators belong to the process: one thread fills and uses them at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=self._free)  # whoever held it has no thread here

    def _free(self) -> None:
        self.lock = threading.RLock()


_TURNS = _Turns()


@contextmanager
def seeded_torch(stream: Stream) -> Iterator[None]:
    """Torch's generators filled from a stream; as they were, afterwards."""
    seed = _seed(stream.bytes(8))
    with _TURNS.lock, _forked_torch():
        if torch.accelerator.is_available():
            torch.manual_seed(
                seed
            )  # of accelerators, which keep all of it; a millisecond by itself
        torch.default_generator.set_state(_torch_state(stream))
        yield


@contextmanager
def seeded_generators(stream: Stream) -> Iterator[None]:
    """The generators of torch, numpy and Python filled from a stream; as they were, afterwards."""
    with _TURNS.lock:
        numpy, python = np.random.get_state(), random.getstate()
        try:
            with seeded_torch(stream):
                _seed_numpy_and_python(stream)
                yield
        finally:
            np.random.set_state(numpy)
            random.setstate(python)


def torch_generator(stream: Stream, device: torch.device) -> torch.Generator:
    """A generator of torch, on the device, filled from a stream."""
    generator = torch.Generator(device)
    generator.manual_seed(_seed(stream.bytes(8)))
    if device.type == "cpu":
        generator.set_state(_torch_state(stream))
    return generator


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """Where the generators of torch (on the processor), numpy and Python stood."""

    torch: Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> GeneratorStates:
        """Where they stand."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @contextmanager
    def again(self) -> Iterator[None]:
        """From here once more, for a while."""
        before = GeneratorStates.now()
        self.put_back()
        try:
            yield
        finally:
            before.put_back()

    def put_back(self) -> None:
        """Let them stand there again."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def moved(self) -> bool:
        """Whether one of them was used since."""
        now = GeneratorStates.now()
        same_numpy = all(np.array_equal(a, b) for a, b in zip(self.numpy, now.numpy, strict=True))
        same = torch.equal(self.torch, now.torch) and same_numpy and self.python == now.python
        return not same


class ItemChance:
    """Items made one by one, each with random numbers of its own: no item sees who else was drawn.

    Filling the generators takes longer than making many an item. So it is done for all items of a batch at once, and
    if none of them used a random number, that made no difference; else the items are made again, each by itself, and
    so are all later ones.

    Args:
        make: the item of a place.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make, self._used = make, False

    def items(self, places: Sequence[int], chance: bytes) -> list[Any]:
        """The items of these places.

        Args:
            places: whose.
            chance: secret bytes of the step; with a place they make the numbers of its item.
        """
        if not self._used:
            with seeded_generators(Stream(chance)):
                before = GeneratorStates.now()
                items = [self._make(place) for place in places]
                self._used = before.moved()
            if not self._used:
                return items
        return [self._item(place, chance) for place in places]

    def _item(self, place: int, chance: bytes) -> Any:
        with seeded_generators(Stream.derived(chance, b"item:%d" % place)):
            return self._make(place)


def chance_of(stream: Stream) -> bytes:
    """Secret bytes that may travel to the workers of a loader, where the key itself may not."""
    return stream.bytes(KEY_BYTES)


@contextmanager
def _forked_torch() -> Iterator[None]:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        with torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=kind.type):
            yield
        return
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _torch_state(stream: Stream) -> Tensor:
    """The state of a processor's generator that begins with the next words of a stream, all of its 19,937 bits."""
    state = torch.Generator().get_state()
    numbers = state.numpy()
    numbers[0:8] = 0  # the seed, which is not used
    numbers[8:16].view(np.int32)[:] = 1, 1  # words left before the state is renewed; seeded
    numbers[16:24] = 0
    words = numbers[24 : 24 + 8 * _WORDS].view(np.uint64)
    words[:] = np.frombuffer(stream.bytes(4 * _WORDS), np.uint32)
    return state


def _seed_numpy_and_python(stream: Stream) -> None:
    np.random.seed(np.frombuffer(stream.bytes(KEY_BYTES), np.uint32))
    random.seed(stream.bytes(KEY_BYTES))


def _seed(some: bytes) -> int:
    return int.from_bytes(some, "little") >> 1
