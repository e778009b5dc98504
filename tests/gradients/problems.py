"""The problems that the fast gradients and the slow oracles must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from dpis.gradients.losses import Objective, objective_of

RECORDS = 5


@dataclass(frozen=True)
class Problem:
    """A model, a loss and a batch.

    Attributes:
        id: what is tested, readable.
        module: makes the model.
        batch: makes a batch of so many rows.
        objective: the loss of every row.
        rows_per_record: K.
        slow: takes the fallback over the whole model, and says so.
        vmap: the oracle ``vmap(grad)`` can run it.
    """

    id: str
    module: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    objective: Objective
    rows_per_record: int = 1
    slow: bool = False
    vmap: bool = True


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def words(*shape: int, below: int = 7) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(0, below, (rows, *shape))


def inputs_only(make: Callable[[int], Tensor]) -> Callable[[int], Any]:
    return lambda rows: (make(rows),)


def square(module: nn.Module, batch: Any) -> Tensor:
    """A loss in which every output of a row counts differently."""
    output = module(*batch)
    flat = output.reshape(len(batch[0]), -1)
    scale = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return ((flat * scale + 0.1) ** 2).sum(1)


def plain(name: str, module: Callable[[], nn.Module], make: Callable[[int], Tensor], **kw: Any):
    return Problem(name, module, inputs_only(make), square, **kw)


class Function(nn.Module):
    """A module from parameters and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def function(f: Callable[..., Tensor], **shapes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        parts = {
            name: torch.randn(shape) if isinstance(shape, tuple) else shape()
            for name, shape in shapes.items()
        }
        return Function(f, **parts)

    return make


def ragged(words: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Bags of unequal lengths, some of them empty, end to end, and where each begins."""
    counted = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
    return words[counted], lengths.cumsum(0) - lengths


def sequential(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def frozen_first() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)
    return module


def frozen_weight() -> nn.Module:
    module = mlp()
    module[0].weight.requires_grad_(False)
    return module


def moved_affine(layer: nn.Module) -> nn.Module:
    """A layer whose scale and shift are not those of its first day."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return layer


LINEAR = [
    plain("linear", lambda: nn.Linear(6, 4), floats(6)),
    plain("linear-without-bias", lambda: nn.Linear(6, 4, bias=False), floats(6)),
    plain("linear-on-sequences", lambda: nn.Linear(6, 4), floats(3, 6)),
    plain("linear-on-long-sequences-small-weight", lambda: nn.Linear(2, 3), floats(40, 2)),
    plain("linear-on-short-sequences-large-weight", lambda: nn.Linear(33, 65), floats(3, 33)),
    plain("linear-on-grids", lambda: nn.Linear(6, 4), floats(3, 2, 6)),
    plain("linear-sequence-as-long-as-the-batch", lambda: nn.Linear(6, 4), floats(RECORDS, 6)),
    plain("mlp", mlp, floats(6)),
    plain(
        "mlp-in-place-relu",
        sequential(mlp, lambda: nn.ReLU(True), lambda: nn.Linear(4, 2)),
        floats(6),
    ),
    plain("mlp-frozen-first-layer", frozen_first, floats(6)),
    plain("mlp-frozen-weight", frozen_weight, floats(6)),
    plain(
        "records-second",
        function(
            lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=lambda: nn.Linear(6, 4)
        ),
        floats(3, 6),
    ),
    plain(
        "flattened-record-major",
        function(
            lambda m, x: m.layer(x.reshape(-1, 6)).view(len(x), -1), layer=lambda: nn.Linear(6, 4)
        ),
        floats(3, 6),
    ),
    plain(
        "flattened-position-major",
        function(
            lambda m, x: (
                m.layer(x.transpose(0, 1).reshape(-1, 6)).view(3, len(x), 4).transpose(0, 1)
            ),
            layer=lambda: nn.Linear(6, 4),
        ),
        floats(3, 6),
    ),
    plain("matmul-right", function(lambda m, x: x @ m.weight, weight=(6, 4)), floats(3, 6)),
    plain("matmul-left", function(lambda m, x: m.weight @ x, weight=(4, 6)), floats(6, 3)),
    plain(
        "matmul-left-records-are-columns",
        function(lambda m, x: (m.weight @ x.T).T, weight=(4, 6)),
        floats(6),
    ),
    plain(
        "matmul-vector", function(lambda m, x: x @ m.weight, weight=(6,)), floats(3, 6), slow=True
    ),
    plain(
        "addmm",
        function(lambda m, x: torch.addmm(m.bias, x, m.weight), bias=(4,), weight=(6, 4)),
        floats(6),
    ),
    plain(
        "einsum",
        function(lambda m, x: torch.einsum("bli,oi->blo", x, m.weight), weight=(4, 6)),
        floats(3, 6),
        slow=True,
    ),
    plain(
        "bilinear",
        function(lambda m, x: m.layer(x, x * 2), layer=lambda: nn.Bilinear(6, 6, 3)),
        floats(6),
        vmap=False,
        slow=True,
    ),
]

EMBEDDING = [
    plain("embedding", lambda: nn.Embedding(7, 4), words(3)),
    plain("embedding-one-word", lambda: nn.Embedding(7, 4), words()),
    plain("embedding-of-grids", lambda: nn.Embedding(7, 4), words(3, 2)),
    plain("embedding-long", lambda: nn.Embedding(7, 4), words(150)),
    plain("embedding-padding", lambda: nn.Embedding(7, 4, padding_idx=2), words(6)),
    plain("embedding-bag-sum", lambda: nn.EmbeddingBag(7, 4, mode="sum"), words(3)),
    plain("embedding-bag-mean", lambda: nn.EmbeddingBag(7, 4, mode="mean"), words(3)),
    plain(
        "embedding-bag-mean-padding",
        lambda: nn.EmbeddingBag(7, 4, mode="mean", padding_idx=-1),
        words(5),
        vmap=False,
    ),
    plain(
        "embedding-bag-max",
        lambda: nn.EmbeddingBag(7, 4, mode="max"),
        words(3),
        vmap=False,
        slow=True,
    ),
    Problem(
        "embedding-bag-offsets",
        lambda: nn.EmbeddingBag(7, 4, mode="mean"),
        inputs_only(words(3)),
        lambda module, batch: square(
            function(
                lambda m, x: module(x.flatten(), torch.arange(0, x.numel(), 3, device=x.device))
            )(),
            batch,
        ),
        vmap=False,
    ),
    Problem(
        "embedding-bag-ragged",
        lambda: nn.EmbeddingBag(7, 4, mode="mean"),
        lambda rows: (words(5)(rows), torch.arange(rows) * 2 % 6),
        lambda module, batch: module(*ragged(*batch)).add(0.1).square().sum(1),
        vmap=False,
    ),
    Problem(
        "embedding-bag-weights",
        lambda: nn.EmbeddingBag(7, 4, mode="sum"),
        lambda rows: (words(3)(rows), torch.rand(rows, 3)),
        lambda module, batch: (
            module(batch[0], per_sample_weights=batch[1].to(module.weight)).square().sum(1)
        ),
        vmap=False,
    ),
    plain(
        "embedding-of-positions",
        function(
            lambda m, x: m.word(x) + m.place(torch.arange(x.shape[1], device=x.device)[None]),
            word=lambda: nn.Embedding(7, 4),
            place=lambda: nn.Embedding(9, 4),
        ),
        words(3),
    ),
]

NORMALIZATION = [
    plain("layer-norm", lambda: moved_affine(nn.LayerNorm(6)), floats(6)),
    plain("layer-norm-on-sequences", lambda: moved_affine(nn.LayerNorm(6)), floats(3, 6)),
    plain("layer-norm-two-dimensions", lambda: moved_affine(nn.LayerNorm((3, 6))), floats(2, 3, 6)),
    plain("rms-norm", lambda: moved_affine(nn.RMSNorm(6)), floats(3, 6)),
    plain("group-norm", lambda: moved_affine(nn.GroupNorm(2, 6)), floats(6, 3, 2)),
    plain("group-norm-vectors", lambda: moved_affine(nn.GroupNorm(2, 6)), floats(6)),
    plain(
        "instance-norm", lambda: moved_affine(nn.InstanceNorm2d(6, affine=True)), floats(6, 3, 2)
    ),
    plain("batch-norm-frozen", lambda: moved_affine(nn.BatchNorm1d(6)).eval(), floats(6)),
]

BARE = [
    plain("bias", function(lambda m, x: x + m.bias, bias=(6,)), floats(3, 6)),
    plain("bias-first", function(lambda m, x: m.bias + x, bias=(3, 1)), floats(3, 6)),
    plain("bias-subtracted", function(lambda m, x: x - m.bias, bias=(6,)), floats(3, 6)),
    plain("bias-in-place", function(lambda m, x: x.clone().add_(m.bias), bias=(6,)), floats(3, 6)),
    plain("scale", function(lambda m, x: x * m.scale, scale=(3, 1)), floats(3, 6)),
    plain("scale-of-all", function(lambda m, x: m.scale * x, scale=()), floats(3, 6)),
    plain("scale-of-exponential", function(lambda m, x: x * m.scale.exp(), scale=()), floats(3, 6)),
    plain("divided", function(lambda m, x: x / m.scale, scale=(6,)), floats(3, 6)),
    plain(
        "class-token",
        function(lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1), token=(1, 1, 6)),
        floats(3, 6),
    ),
    plain(
        "class-token-repeated",
        function(lambda m, x: torch.cat([m.token.repeat(len(x), 1, 1), x], 1), token=(1, 1, 6)),
        floats(3, 6),
    ),
    plain(
        "mask-token",
        function(lambda m, x: torch.where(x > 0.5, m.token, x), token=(6,)),
        floats(3, 6),
        slow=True,
    ),
    plain("prelu", lambda: nn.PReLU(3), floats(3, 6), slow=True),
    plain(
        "slices",
        function(lambda m, x: x @ m.weight[:4].t() + x @ m.weight[4:].t(), weight=(8, 6)),
        floats(6),
    ),
    plain(
        "overlapping-slices",
        function(lambda m, x: x @ m.weight[:5].t() + x @ m.weight[2:7].t(), weight=(8, 6)),
        floats(6),
    ),
    plain("weight-norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), floats(6)),
]

TIED = [
    plain(
        "layer-called-twice",
        function(lambda m, x: m.layer(m.layer(x).tanh()), layer=lambda: nn.Linear(6, 6)),
        floats(6),
    ),
    plain(
        "layer-called-twice-on-sequences",
        function(lambda m, x: m.layer(m.layer(x).tanh()), layer=lambda: nn.Linear(6, 6)),
        floats(3, 6),
    ),
    plain(
        "autoencoder",
        function(
            lambda m, x: functional.linear(functional.linear(x, m.w).tanh(), m.w.t()), w=(4, 6)
        ),
        floats(6),
    ),
    plain(
        "embedding-and-head",
        function(
            lambda m, x: functional.linear(m.words(x).tanh(), m.words.weight),
            words=lambda: nn.Embedding(7, 4),
        ),
        words(3),
    ),
    plain(
        "embedding-twice",
        function(lambda m, x: m.words(x) * m.words(x.flip(1)), words=lambda: nn.Embedding(7, 4)),
        words(3),
    ),
    plain(
        "norm-called-twice",
        function(lambda m, x: m.norm(m.norm(x).tanh()), norm=lambda: nn.LayerNorm(6)),
        floats(3, 6),
    ),
]


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, **options)
        self.batch_first = options.get("batch_first", False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        mixed, _ = self.attention(x, memory, memory)
        return mixed if self.batch_first else mixed.transpose(0, 1)


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


ATTENTION = [
    plain("attention", lambda: Attention(), floats(3, 6)),
    plain("attention-batch-first", lambda: Attention(batch_first=True), floats(3, 6)),
    plain("attention-bias-kv", lambda: Attention(add_bias_kv=True), floats(3, 6)),
    Problem(
        "cross-attention", lambda: Attention(), lambda n: (floats(3, 6)(n), floats(4, 6)(n)), square
    ),
    Problem(
        "cross-attention-other-sizes",
        lambda: Attention(kdim=5, vdim=5),
        lambda n: (floats(3, 6)(n), floats(4, 5)(n)),
        square,
    ),
    plain("scaled-dot-product", CausalAttention, floats(3, 6)),
    plain("transformer-encoder", encoder, floats(3, 6)),
    plain("transformer-encoder-norm-first", lambda: encoder(norm_first=True), floats(3, 6)),
    plain("transformer-encoder-evaluation", lambda: encoder().eval(), floats(3, 6)),
]

SEVERAL_ROWS = [
    plain("rows-mlp", mlp, floats(6), rows_per_record=3),
    plain("rows-sequences", lambda: nn.Linear(6, 4), floats(2, 6), rows_per_record=3),
    plain("rows-embedding", lambda: nn.Embedding(7, 4), words(3), rows_per_record=3),
    plain("rows-attention", lambda: Attention(), floats(3, 6), rows_per_record=2),
    plain(
        "rows-flattened-position-major",
        function(
            lambda m, x: (
                m.layer(x.transpose(0, 1).reshape(-1, 6)).view(3, len(x), 4).transpose(0, 1)
            ),
            layer=lambda: nn.Linear(6, 4),
        ),
        floats(3, 6),
        rows_per_record=2,
    ),
]

LOSSES = [
    Problem(
        f"loss-{name}",
        mlp,
        lambda rows: (torch.randn(rows, 6), torch.randint(0, 4, (rows,))),
        objective_of(loss),
    )
    for name, loss in {
        "cross-entropy": nn.CrossEntropyLoss(),
        "cross-entropy-sum": nn.CrossEntropyLoss(reduction="sum"),
        "cross-entropy-none": nn.CrossEntropyLoss(reduction="none"),
        "cross-entropy-function": functional.cross_entropy,
        "class-weights": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2),
    }.items()
]

CONVOLUTION = [
    plain("conv1d", lambda: nn.Conv1d(2, 3, 3), floats(2, 7)),
    plain("conv2d", lambda: nn.Conv2d(2, 3, 3, padding=1), floats(2, 5, 4)),
    plain("conv3d", lambda: nn.Conv3d(2, 3, 2), floats(2, 3, 4, 3)),
    plain(
        "conv2d-dilation-groups-stride",
        lambda: nn.Conv2d(4, 6, 2, stride=2, dilation=2, groups=2, padding=1),
        floats(4, 6, 5),
    ),
    plain(
        "conv1d-circular",
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"),
        floats(2, 7),
    ),
    plain("conv2d-same", lambda: nn.Conv2d(2, 3, 3, padding="same"), floats(2, 5, 4)),
    plain(
        "conv2d-over-time",
        function(
            lambda m, x: m.conv(x.flatten(0, 1)).unflatten(0, (len(x), -1)),
            conv=lambda: nn.Conv2d(2, 3, 2),
        ),
        floats(3, 2, 4, 4),
    ),
    plain(
        "conv2d-twice",
        function(lambda m, x: m.conv(m.conv(x).tanh()), conv=lambda: nn.Conv2d(2, 2, 3, padding=1)),
        floats(2, 4, 4),
    ),
    plain("conv-transpose", lambda: nn.ConvTranspose1d(2, 3, 3), floats(2, 5), slow=True),
    plain("rows-conv2d", lambda: nn.Conv2d(2, 3, 3), floats(2, 5, 4), rows_per_record=3),
]


class Recurrent(nn.Module):
    """A recurrent layer on padded, or packed, sequences."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.layer(x)[0]
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        outputs, _ = rnn.pad_packed_sequence(self.layer(packed)[0], True, total_length=x.shape[1])
        return outputs


class Swapped(nn.Module):
    """A recurrent layer that wants its steps first."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


def recurrent(layer: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Recurrent(layer(3, 4, batch_first=True, **options))


def with_lengths(rows: int) -> Any:
    return torch.randn(rows, 5, 3), torch.randint(1, 6, (rows,))


RECURRENT = [
    plain("rnn", recurrent(nn.RNN), floats(5, 3), vmap=False),
    plain("rnn-relu", recurrent(nn.RNN, nonlinearity="relu"), floats(5, 3), vmap=False),
    plain("gru", recurrent(nn.GRU, num_layers=2), floats(5, 3), vmap=False),
    plain("lstm", recurrent(nn.LSTM), floats(5, 3), vmap=False),
    plain(
        "lstm-bidirectional-two-layers",
        recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        floats(5, 3),
        vmap=False,
    ),
    plain("lstm-steps-first", lambda: Swapped(nn.LSTM(3, 4)), floats(5, 3), vmap=False),
    Problem(
        "lstm-packed", recurrent(nn.LSTM, bidirectional=True), with_lengths, square, vmap=False
    ),
    Problem("gru-packed", recurrent(nn.GRU), with_lengths, square, vmap=False),
    plain("rows-lstm", recurrent(nn.LSTM), floats(5, 3), rows_per_record=2, vmap=False),
]

PROBLEMS = [
    *CONVOLUTION,
    *RECURRENT,
    *LINEAR,
    *EMBEDDING,
    *NORMALIZATION,
    *BARE,
    *TIED,
    *ATTENTION,
    *SEVERAL_ROWS,
    *LOSSES,
]
