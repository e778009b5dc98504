"""The models that are measured: a module, its loss, random batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.models.kinds import KINDS
from dpis.models.kinds import paper as models

Batch = tuple[Tensor, Tensor]
MakeBatch = Callable[[int], Batch]


class TokenLoss(nn.Module):
    """Cross entropy of every token of a text, averaged over the text."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """One loss a text, or their mean."""
        terms = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        losses = terms.view_as(tokens).mean(1)
        return losses.mean() if self.reduction == "mean" else losses


@dataclass(frozen=True)
class Task:
    """What an engine is given; ``batch`` makes so many random records."""

    model: nn.Module
    batch: MakeBatch
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)


@dataclass(frozen=True)
class Workload:
    """A model by name; ``make`` takes its sizes, of which ``tiny`` are quick to try."""

    name: str
    description: str
    make: Callable[..., Task]
    tiny: dict[str, Any] = field(default_factory=dict)


def images(*shape: int, classes: int = 10) -> MakeBatch:
    return lambda records: (torch.randn(records, *shape), torch.randint(classes, (records,)))


def words(length: int, vocabulary: int, classes: int) -> MakeBatch:
    return lambda records: (
        torch.randint(vocabulary, (records, length)),
        torch.randint(classes, (records,)),
    )


def texts(length: int, vocabulary: int) -> MakeBatch:
    return lambda records: (
        torch.randint(vocabulary, (records, length)),
        torch.randint(vocabulary, (records, length)),
    )


# ── the paper's networks, and small ones ─────────────────────────────────────────────────────────


def scatter_linear() -> Task:
    """What `dpis train` builds for Fashion-MNIST."""
    return Task(KINDS["scatter-linear"].build((81, 7, 7), 10), images(81, 7, 7))


def scatter_cnn() -> Task:
    return Task(models.scatter_cnn_mnist(), images(81, 7, 7))


def pixel_cnn() -> Task:
    return Task(models.pixel_cnn_cifar10(), images(3, 32, 32))


def imdb_lstm(vocabulary: int = 20_000) -> Task:
    return Task(models.ImdbRnn(torch.randn(vocabulary, 100)), words(80, vocabulary, 2))


def mlp(*widths: int) -> Task:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Task(nn.Sequential(*layers[:-1]), images(widths[0], classes=widths[-1]))


class OpacusCnn(nn.Module):
    """The network of Opacus's MNIST example, with the shapes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.third, self.last = nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of ten classes."""
        hidden = functional.max_pool2d(functional.relu(self.first(images)), 2, 1)
        hidden = functional.max_pool2d(functional.relu(self.second(hidden)), 2, 1)
        return self.last(functional.relu(self.third(hidden.flatten(1))))


class CharLstm(nn.Module):
    """The network of Opacus's char-LSTM example."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(259, 64)
        self.lstm = nn.LSTM(64, width, layers, batch_first=True)
        self.last = nn.Linear(width, 18)

    def forward(self, characters: Tensor) -> Tensor:
        """The logits of 18 languages."""
        return self.last(self.lstm(self.embedding(characters))[0][:, -1])


def lstm(width: int = 128, layers: int = 2) -> Task:
    return Task(CharLstm(width, layers), words(20, 259, 18))


# ── residual networks ────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(min(32, outputs), outputs) for _ in range(2))
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.GroupNorm(min(32, outputs), outputs),
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Half as large with a stride of two."""
        hidden = functional.relu(self.norms[0](self.first(images)))
        return functional.relu(self.norms[1](self.second(hidden)) + self.shortcut(images))


def resnet18(width: int = 64, side: int = 32) -> Task:
    """ResNet-18 for small images, GroupNorm in the place of BatchNorm."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(min(32, width), width)]
    blocks = [Block(width, width, 1), Block(width, width, 1)]
    for level in range(3):
        outputs = width << level + 1
        blocks += [Block(outputs // 2, outputs, 2), Block(outputs, outputs, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    return Task(nn.Sequential(*stem, nn.ReLU(), *blocks, *head), images(3, side, side))


# ── transformers ─────────────────────────────────────────────────────────────────────────────────


class Encoder(nn.Module):
    """Layers of ``torch.nn`` over word embeddings, averaged, classified."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.classify = nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of ten classes."""
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.classify(hidden.mean(dim=1))


def encoder(layers: int = 4, width: int = 128, vocabulary: int = 1000) -> Task:
    return Task(Encoder(layers, width, vocabulary), words(64, vocabulary, 10))


class Layer(nn.Module):
    """Attention and a feed-forward network, each normalised before, as people write them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """As wide as before."""
        parts = self.qkv(self.norms[0](hidden)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.wide(self.norms[1](hidden))


def places_of(words: Tensor) -> Tensor:
    """The place of every word of every text. Shared by the texts, or expanded, they break Opacus."""
    return torch.arange(words.shape[1], device=words.device).repeat(len(words), 1)


class Transformer(nn.Module):
    """Such layers over words and places, averaged, classified."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, width // 64 or 1) for _ in range(layers)))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of ten classes."""
        hidden = self.layers(self.words(words) + self.places(places_of(words)))
        return self.classify(self.norm(hidden).mean(dim=1))


def transformer(layers: int = 6, width: int = 384, vocabulary: int = 1000) -> Task:
    return Task(Transformer(layers, width, vocabulary, 64), words(64, vocabulary, 10))


class Logits(nn.Module):
    """A model of the transformers library, from its one input to logits alone."""

    def __init__(self, model: nn.Module, keyword: str, *given: str) -> None:
        super().__init__()
        self.model, self.keyword, self.given = model, keyword, given

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits alone."""
        more = {}
        if "position_ids" in self.given:
            more["position_ids"] = places_of(inputs)
        if "token_type_ids" in self.given:
            more["token_type_ids"] = torch.zeros_like(inputs)
        return self.model(**{self.keyword: inputs}, **more).logits


def adapted(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """The model frozen, with adapters of rank 8."""
    from peft import LoraConfig, get_peft_model

    adapters = get_peft_model(model, LoraConfig(r=8, target_modules=targets, **options))
    for name, parameter in adapters.named_parameters():
        if "lora_B" in name:  # zero at first; then the gradients of A would all be zero
            nn.init.normal_(parameter, std=0.02)
    return adapters


def bert(lora: bool, layers: int = 4, width: int = 256, vocabulary: int = 1000) -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForSequenceClassification(config)
    if lora:
        model = adapted(model, ["query", "value"], task_type="SEQ_CLS")
    wrapped = Logits(model, "input_ids", "position_ids", "token_type_ids")
    return Task(wrapped, words(64, vocabulary, 4))


def gpt2(
    lora: bool, layers: int = 12, width: int = 768, vocabulary: int = 50_257, length: int = 128
) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=layers,
        n_head=12 if width % 12 == 0 else 2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    if lora:
        model = adapted(model, ["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    wrapped = Logits(model, "input_ids", "position_ids")
    return Task(wrapped, texts(length, vocabulary), TokenLoss())


def vit(layers: int = 12, width: int = 384) -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=6 if width % 6 == 0 else 2,
        intermediate_size=4 * width,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Task(Logits(ViTForImageClassification(config), "pixel_values"), images(3, 32, 32))


TINY = {"layers": 1, "width": 16}
TINY_TEXT = {**TINY, "vocabulary": 50}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("scatter-linear", "81x7x7", scatter_linear),
        Workload("scatter-cnn", "81x7x7, the paper's", scatter_cnn),
        Workload("pixel-cnn", "3x32x32, the paper's", pixel_cnn),
        Workload("imdb-lstm", "80 words, the paper's", imdb_lstm, {"vocabulary": 50}),
        Workload("mlp", "784-512-256-10", lambda: mlp(784, 512, 256, 10)),
        Workload("mlp-100k", "784-128-10, .1 M parameters", lambda: mlp(784, 128, 10)),
        Workload(
            "opacus-cnn", "Opacus's MNIST network", lambda: Task(OpacusCnn(), images(1, 28, 28))
        ),
        Workload("lstm", "Opacus's char-LSTM, 2 layers", lstm, TINY),
        Workload("resnet18", "3x32x32, GroupNorm", resnet18, {"width": 8, "side": 16}),
        Workload("encoder", "torch.nn, 4 x 128, 64 words", encoder, TINY_TEXT),
        Workload("transformer", "6 x 384, 64 words", transformer, TINY_TEXT),
        Workload("bert", "4 x 256, 64 words", lambda **sizes: bert(False, **sizes), TINY_TEXT),
        Workload("bert-lora", "the same, LoRA", lambda **sizes: bert(True, **sizes), TINY_TEXT),
        Workload("vit", "12 x 384, 3x32x32, 65 patches", vit, TINY),
        Workload("gpt2", "12 x 768, 128 tokens", lambda **sizes: gpt2(False, **sizes), TINY_TEXT),
        Workload("gpt2-lora", "the same, LoRA", lambda **sizes: gpt2(True, **sizes), TINY_TEXT),
    )
}
