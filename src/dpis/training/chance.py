"""Randomness that protects nothing but must be repeatable: dropout, transforms, initial weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpis.randomness import Stream


@contextmanager
def seeded_torch(stream: Stream) -> Iterator[None]:
    """Torch's generators seeded from a stream; as they were, afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(stream.bytes(8), "little") >> 1)
        yield


@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """Where the generators of torch (on the processor), numpy and Python stood."""

    torch: torch.Tensor
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


@contextmanager
def seeded_generators(stream: Stream) -> Iterator[None]:
    """The generators of torch, numpy and Python seeded from a stream; as they were, afterwards.

    So a step that is done again, after a crash, sees the same transforms of its items.
    """
    before = GeneratorStates.now()
    with seeded_torch(stream):
        random.seed(stream.bytes(16))
        np.random.seed(np.frombuffer(stream.bytes(16), np.uint32))
        try:
            yield
        finally:
            before.put_back()


def torch_generator(seed: bytes, device: torch.device) -> torch.Generator:
    """A generator of torch, on the device."""
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(seed, "little") >> 1)
    return generator
