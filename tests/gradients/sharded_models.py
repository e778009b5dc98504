"""Models that `test_sharded.py` shards, and what its ranks do with them. In a module: other processes run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpis.gradients.deferred import DeferredGradients
from dpis.gradients.record_gradients import RecordGradients
from dpis.gradients.sharded_sums import ShardedSums


class Residual(nn.Module):
    """A block of a transformer; its attention and its norms have parameters of their own."""

    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.checkpointed = checkpointed

    def run(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.second(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


class Transformer(nn.Module):
    """Words in, a word out; the table of words is the last layer, too."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Residual(8, checkpointed) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x).mean(1), self.words.weight)


class Adapted(nn.Module):
    """A frozen layer with a trainable correction of low rank."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, out).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(1, size))  # one rank has no row of it
        self.up = nn.Parameter(torch.randn(out, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.down), self.up)


class Odd(nn.Module):
    """Whatever reads the values of parameters when gradients are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unit = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6) + 0.5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.paired = nn.Bilinear(6, 6, 4)  # no rule of its own
        self.shift = nn.LayerNorm(4)
        self.shift.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x * self.scale.exp()) / self.unit
        return self.shift(self.paired(x, x.tanh()))


class Recurrent(nn.Module):
    """A sequence that is read step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Flat(nn.Module):
    """Records and positions in one dimension: three records tell which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.reshape(-1, 4)).tanh()
        return self.head(y).reshape(len(x), -1, 3).mean(1)


@dataclass(frozen=True)
class Case:
    """A model, what is sharded in it beside the root, and rows for it."""

    id: str
    model: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    row: tuple[int, ...]
    words: int = 0
    classes: int = 3
    warns: bool = False

    def rows(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (count, *self.row)
        inputs = torch.randint(self.words, shape) if self.words else torch.randn(shape, dtype=dtype)
        return inputs, torch.randint(self.classes, (count,))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(5 * 16, 3),
    )


CASES = [
    Case("mlp", mlp, ("2",), (5,)),
    Case("transformer", Transformer, ("blocks.0", "blocks.1"), (5,), words=11, classes=11),
    Case("tables", Transformer, ("positions", "blocks.1.up"), (5,), words=11, classes=11),
    Case("checkpoints", lambda: Transformer(True), ("blocks.0", "blocks.1"), (5,), 11, 11),
    Case("convolutions", convolutions, ("0", "1"), (2, 6, 6)),
    Case("adapters", lambda: nn.Sequential(Adapted(5, 6), nn.Tanh(), Adapted(6, 3)), ("0",), (5,)),
    Case("odd", lambda: nn.Sequential(nn.Linear(4, 6), Odd()), ("1",), (4,), warns=True),
    Case("recurrent", Recurrent, ("lstm",), (3, 4)),
    Case("flat", Flat, ("inner",), (2, 4)),
]


def case(name: str) -> Case:
    return next(case for case in CASES if case.id == name)


def built(own: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return own.model().to(dtype)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def sharded(own: Case, dtype: torch.dtype = torch.float64, **how: Any) -> nn.Module:
    """Blocks first, then the root, as users do."""
    module = built(own, dtype)
    over = mesh()
    for name in own.blocks:
        fully_shard(module.get_submodule(name), mesh=over, **how)
    fully_shard(module, mesh=over, **how)
    return module


def inverse(norms: Tensor, _: Tensor | None = None) -> Tensor:
    """Every gradient at length one."""
    return 1 / norms


@dataclass(eq=False)
class Sharded:
    """What a rank has of a sharded model."""

    gradients: RecordGradients | DeferredGradients
    dropped: int | None = None
    sums: ShardedSums = field(init=False)

    def __post_init__(self) -> None:
        ranks = self.gradients.ranks
        self.sums = ShardedSums.of(ranks, self.gradients.parameters)

    def of(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Norms of this rank's records, and its slices of the sum over all ranks."""
        norms, total = [torch.zeros(0, dtype=torch.float64)], dict[str, Tensor]()
        for tape in self.gradients.tapes(batch):
            norms.append(tape.norms())
            weights = inverse(norms[-1])
            if self.dropped == self.gradients.ranks.rank:
                weights = torch.zeros_like(weights)
            for name, part in self.sums.local(tape.weighted_sums(weights)):
                total[name] = total[name] + part if name in total else part
        return torch.cat(norms), total

    def slice_of(self, name: str, full: Tensor) -> Tensor:
        own = self.sums.slices[name]
        return full.reshape(-1)[own.begin : own.begin + own.shape.numel()].view(own.shape)

    def error(self, mine: dict[str, Tensor], full: dict[str, Tensor]) -> float:
        """The largest difference of a slice, relative to the whole sum."""
        size = torch.stack([value.double().norm() for value in full.values()]).norm()
        apart = [(value - self.slice_of(n, full[n])).double() for n, value in mine.items()]
        return float(torch.stack([value.norm() for value in apart]).norm() / size)


def relative(found: Tensor, right: Tensor) -> float:
    return float(((found - right).abs() / right).max()) if len(right) else 0.0


@contextmanager
def no_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
