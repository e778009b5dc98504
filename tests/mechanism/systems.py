"""Small systems to try laws on: records that are their own gradients, noise of our choice, journals that listen."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpis import randomness
from dpis.accounting import Accountant, Entry, Guard
from dpis.gradients import RecordGradients
from dpis.group import Group
from dpis.mechanism import (
    Config,
    Contribution,
    EventCounter,
    Mechanism,
    Method,
    make_plan,
    noisy_update,
)
from dpis.randomness import KEY_BYTES, Key
from dpis.sampling import Draw

PRIVATE = [method for method in Method if method.private]


def config(method: Method = Method.DPIS, **changes: Any) -> Config:
    """Ten declared records, five steps an epoch, two epochs."""
    usual = {"epsilon": 2.0, "delta": 1e-3, "n_public": 10, "batch_size": 2, "epochs": 2}
    usual["accountant"] = Accountant.RDP  # plans are made sooner, and laws do not depend on it
    return Config(method=method, **(usual | changes))


plan_of = functools.cache(make_plan)


# ── randomness of our choice ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Constant:
    """A stream that always says the same."""

    value: float

    def normals(self, count: int) -> ConstantNormals:
        return ConstantNormals(self.value, count)

    def take(self, shards: Any, counts: Any) -> Any:
        return np.full(counts.sum(), self.value)


class ConstantNormals(randomness.Normals):
    """A vector of noise whose entries are all the same."""

    def __init__(self, value: float, count: int) -> None:
        super().__init__(bytes(KEY_BYTES), count)
        self._value = value

    def tiles(self, first: int, last: int) -> Iterator[Tensor]:
        for begin in range(first * randomness.TILE, len(self), randomness.TILE)[: last - first]:
            size = min(randomness.TILE, len(self) - begin)
            yield torch.full((size,), self._value, dtype=torch.float64)


@dataclass(frozen=True)
class Given:
    """Coins with these uniform numbers, whatever the shards."""

    values: Sequence[float]

    def take(self, shards: Any, counts: Any) -> Any:
        assert counts.sum() == len(self.values)
        return np.array(self.values, dtype=np.float64)


@dataclass(frozen=True, repr=False)
class Rigged(Key):
    """A key that gives streams of our choice for some purposes, found by how these begin."""

    streams: Mapping[str, Any] = field(default_factory=dict)

    def coins(self, purpose: str, step: int) -> Any:
        for beginning, stream in self.streams.items():
            if purpose.startswith(beginning):
                return stream
        return super().coins(purpose, step)

    def normals(self, purpose: str, step: int, count: int) -> Any:
        for beginning, stream in self.streams.items():
            if purpose.startswith(beginning):
                return stream.normals(count)
        return super().normals(purpose, step, count)


def rigged(noise: float, accept: Sequence[float] | float | None = None, seed: int = 1) -> Rigged:
    """All normals are ``noise``; acceptance coins as given, one for all or each; other coins by the seed."""
    streams: dict[str, Any] = {"noise": Constant(noise), "release:": Constant(noise)}
    if accept is not None:
        streams["accept"] = Constant(accept) if isinstance(accept, float) else Given(accept)
    return Rigged(bytes([seed]) * KEY_BYTES, seed, streams)


# ── journals ─────────────────────────────────────────────────────────────────────────────────────────


class Listener(EventCounter):
    """Writes nothing, asks the guard if there is one, and remembers what came when."""

    def __init__(self, guard: Guard | None = None) -> None:
        super().__init__(guard)
        self.log: list[Entry | str] = []

    def spend(self, entries: Sequence[Entry]) -> None:
        super().spend(entries)
        self.log += entries

    def go_to(self, position: int) -> None:
        """Anywhere: a listener that is new does not know what was spent before."""

    @property
    def entries(self) -> list[Entry]:
        return [item for item in self.log if isinstance(item, Entry)]


@contextmanager
def watching() -> Iterator[list[tuple[str, float]]]:
    """What comes out of the noise, by name; sums of gradients are named after their parameters."""
    seen: list[tuple[str, float]] = []
    real = noisy_update.add_noise

    def add_noise(
        sums: Mapping[str, Tensor], std: float, normals: Any, begins: Any = None
    ) -> dict[str, Tensor]:
        noisy = real(sums, std, normals, begins)
        seen.extend((name, float(value.flatten()[0])) for name, value in noisy.items())
        return noisy

    noisy_update.add_noise = add_noise
    try:
        yield seen
    finally:
        noisy_update.add_noise = real


@contextmanager
def recorded_ciphers() -> Iterator[list[Opened | OpenedBlocks]]:
    """All ciphers that are opened, and which of their blocks are read."""
    opened: list[Opened | OpenedBlocks] = []
    real, real_blocks = randomness._cipher, randomness._block_cipher

    def cipher(key: bytes, block: int = 0) -> Opened:
        opened.append(Opened(real(key, block), key, block))
        return opened[-1]

    def block_cipher(key: bytes) -> OpenedBlocks:
        opened.append(OpenedBlocks(real_blocks(key), key))
        return opened[-1]

    randomness._cipher, randomness._block_cipher = cipher, block_cipher
    try:
        yield opened
    finally:
        randomness._cipher, randomness._block_cipher = real, real_blocks


@dataclass
class Opened:
    """A cipher that counts what is read of it."""

    cipher: Any
    key: bytes
    block: int
    read: int = 0

    def update_into(self, data: Any, buffer: Any) -> int:
        self.read += len(data)
        return self.cipher.update_into(data, buffer)

    @property
    def end(self) -> int:
        """The first block that was not touched."""
        return self.block - (-self.read // 16)


@dataclass
class OpenedBlocks:
    """A cipher of single blocks that remembers them."""

    cipher: Any
    key: bytes
    blocks: list[bytes] = field(default_factory=list)

    def update_into(self, data: Any, buffer: Any) -> int:
        asked = np.ascontiguousarray(data).tobytes()
        self.blocks += [asked[i : i + 16] for i in range(0, len(asked), 16)]
        return self.cipher.update_into(data, buffer)

    @property
    def read(self) -> int:
        return 16 * len(self.blocks)


def shared_blocks(opened: Sequence[Opened | OpenedBlocks]) -> bool:
    """Whether some block of a cipher was read twice, or a key serves both kinds."""
    counting = [one for one in opened if isinstance(one, Opened)]
    single = [one for one in opened if isinstance(one, OpenedBlocks)]
    in_order = sorted(counting, key=lambda one: (one.key, one.block, one.end))
    named = [(one.key, block) for one in single for block in one.blocks]
    return (
        len(set(named)) < len(named)
        or not {one.key for one in counting}.isdisjoint(one.key for one in single)
        or any(
            before.key == after.key and before.end > after.block
            for before, after in itertools.pairwise(in_order)
        )
    )


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────


@functools.lru_cache
def engine(width: int, dtype: torch.dtype = torch.float64) -> RecordGradients:
    """The real engine over a linear loss: the gradient of a record is the record."""
    model = nn.Linear(width, 1, bias=False, dtype=dtype)
    return RecordGradients(model, objective=lambda model, batch: model(batch).squeeze(1))


class PlainSums:
    """A stand-in for the engine where thousands of runs are made: records are gradients too."""

    def __init__(self, width: int) -> None:
        self.parameters = {"weight": torch.zeros(1, width, dtype=torch.float64)}

    def tapes(self, batch: Tensor, present: None = None) -> list[PlainTape]:
        return [PlainTape(batch)]


@dataclass(frozen=True)
class PlainTape:
    """Of records that are gradients."""

    batch: Tensor

    def norms(self) -> Tensor:
        return self.batch.norm(dim=1)

    def weighted_sums(self, weights: Tensor) -> list[tuple[str, Tensor]]:
        return [("weight", (weights[:, None] * self.batch).sum(0, keepdim=True))]


def released(mechanism: Mechanism, gradients: Any, batch: Any, draw: Draw) -> dict[str, Tensor]:
    """The released gradient, from the rows of all drawn records in one part; none if nobody was drawn."""
    total = mechanism.start_sum(draw, gradients.parameters)
    for tape in gradients.tapes(batch) if len(draw) else ():
        mechanism.add(total, tape)
    return mechanism.release_sum(total)


# ── a system ─────────────────────────────────────────────────────────────────────────────────────────


class Small:
    """A mechanism over records that are their own gradients.

    Args:
        config: what is tried.
        records: one gradient a row.
        key: real or rigged.
        journal: where events go.
        gradients: the real engine, unless speed matters.
        group: this is one of several ranks.
    """

    def __init__(
        self,
        config: Config,
        records: Tensor,
        key: Key | None = None,
        journal: Any = None,
        gradients: Any = None,
        group: Group | None = None,
    ) -> None:
        self.records = records
        self.journal = Listener() if journal is None else journal
        key = rigged(noise=0.0) if key is None else key
        self.mechanism = Mechanism(plan_of(config), len(records), key, self.journal, group=group)
        self.gradients = engine(records.shape[1], records.dtype) if gradients is None else gradients

    def begin(self) -> Any:
        own = self.mechanism.own_records
        return self.mechanism.begin_epoch(self.records.double().norm(dim=1)[own.start : own.stop])

    def seen(self, norms: Sequence[float]) -> Small:
        """As if these norms had been seen before; inf is unseen."""
        self.mechanism.sampler.observe(torch.arange(len(norms)), torch.tensor(norms))
        return self

    def step(self, drawn: Sequence[int] | None = None, importance: Any = None) -> Tensor:
        """One released gradient, over these records if they are given, else by real coins."""
        mechanism = self.mechanism
        if drawn is not None:
            caps = [mechanism.terms.clip_norm] * len(drawn) if importance is None else importance
            given = Draw(torch.tensor(drawn).long(), torch.tensor(caps, dtype=torch.float64))
            with forced(mechanism.sampler, given):
                draw = mechanism.draw()
        else:
            draw = mechanism.draw()
        return self.release(draw)

    def release(self, draw: Draw) -> Tensor:
        """The released gradient over these records."""
        batch = self.records[draw.indices]
        return released(self.mechanism, self.gradients, batch, draw)["weight"].flatten()

    def epoch(self) -> list[Tensor]:
        self.begin()
        steps = [self.step() for _ in range(self.mechanism.steps_left)]
        self.mechanism.end_epoch()
        return steps

    def run(self) -> list[Tensor]:
        """Every released gradient of the whole run."""
        return [step for _ in range(self.mechanism.plan.workload.epochs) for step in self.epoch()]


@contextmanager
def forced(sampler: Any, draw: Draw) -> Iterator[None]:
    """The sampler draws this."""
    sampler.draw = lambda rate, coins: draw
    try:
        yield
    finally:
        del sampler.draw


# ── what the specification says ──────────────────────────────────────────────────────────────────────


def importance(last_norm: float, config: Config) -> float:
    """``g_hat``."""
    C = config.clip_norm
    last_norm = last_norm if math.isfinite(last_norm) else math.inf
    return min(C, config.headroom * max(last_norm, config.floor * C))


def clipped(gradient: Tensor, bound: float) -> Tensor:
    return gradient * min(1.0, bound / float(gradient.norm()))


def rows(*norms: float, width: int = 3) -> Tensor:
    """Gradients of these norms, in different directions."""
    angles = torch.arange(len(norms), dtype=torch.float64)[:, None] * torch.arange(1, width + 1)
    directions = torch.cos(angles + 0.3)
    return directions / directions.norm(dim=1, keepdim=True) * torch.tensor(norms)[:, None].double()


@dataclass(frozen=True)
class Moments:
    """Of the released gradient over all coins: the mean, and the expected squared distance from it."""

    mean: Tensor
    variance: float


def moments_by_enumeration(
    config: Config, records: Tensor, last_norms: Sequence[float], gradients: Any = None
) -> Moments:
    """Every subset of candidates, and for `reject` every outcome of their second coins."""
    caps = [importance(norm, config) for norm in last_norms]
    rate = plan_of(config).workload.sampling_rate[0]
    chances = [rate * cap / config.clip_norm for cap in caps]
    keeps = [min(1.0, float(g.norm()) / cap) for g, cap in zip(records, caps, strict=True)]
    second = config.contribution is Contribution.REJECT
    mean, square, total = torch.zeros(records.shape[1]).double(), 0.0, 0.0
    for coins in itertools.product([False, True], repeat=len(caps)):
        drawn = [i for i, head in enumerate(coins) if head]
        weight = math.prod(q if head else 1 - q for q, head in zip(chances, coins, strict=True))
        for accepted in itertools.product([True, False], repeat=len(drawn) if second else 0):
            pairs = [(keeps[i], kept) for i, kept in zip(drawn, accepted, strict=False)]
            chance = weight * math.prod(p if kept else 1 - p for p, kept in pairs)
            uniforms = [p / 2 if kept else (1 + p) / 2 for p, kept in pairs]
            system = Small(config, records, rigged(0.0, uniforms), None, gradients).seen(last_norms)
            system.begin()
            update = system.step(drawn, [caps[i] for i in drawn])
            mean, square = mean + chance * update, square + chance * float(update.square().sum())
            total += chance
    assert abs(total - 1) < 1e-12
    return Moments(mean, square - float(mean.square().sum()))
