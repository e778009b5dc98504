"""The models that are measured: a module, one batch of random data, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpis.models.kinds import KINDS
from dpis.models.kinds import paper as models


@dataclass(frozen=True)
class Workload:
    """One model at one batch size; all engines treat the same batch in one physical chunk."""

    name: str
    description: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def images(records: int, *shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(records, *shape), torch.randint(10, (records,)))


def words(
    records: int, length: int, vocabulary: int, classes: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (
        torch.randint(vocabulary, (records, length)),
        torch.randint(classes, (records,)),
    )


def imdb_rnn() -> nn.Module:
    return models.ImdbRnn(torch.randn(20_000, 100))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )


class Encoder(nn.Module):
    """Four transformer layers over word embeddings, averaged, classified."""

    def __init__(self, vocabulary: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.classify = nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of ten classes."""
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.classify(hidden.mean(dim=1))


class Logits(nn.Module):
    """A classifier of the transformers library, from token ids to logits alone."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, words: Tensor) -> Tensor:
        """The logits alone."""
        return self.classifier(input_ids=words).logits


def lora() -> nn.Module:
    """BERT with four layers of width 256; adapters of rank 8 on queries and values."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    adapters = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = get_peft_model(BertForSequenceClassification(config), adapters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first; then the gradients of A would all be zero
            nn.init.normal_(parameter, std=0.02)
    return Logits(model)


def scatter_linear() -> nn.Module:
    """What `dpis train` builds for Fashion-MNIST."""
    return KINDS["scatter-linear"].build((81, 7, 7), 10)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("scatter-linear", "81x7x7, 512", scatter_linear, images(512, 81, 7, 7)),
        Workload("scatter-cnn", "81x7x7, 512", models.scatter_cnn_mnist, images(512, 81, 7, 7)),
        Workload("pixel-cnn", "3x32x32, 128", models.pixel_cnn_cifar10, images(128, 3, 32, 32)),
        Workload("imdb-lstm", "80 words, 512", imdb_rnn, words(512, 80, 20_000, 2)),
        Workload("mlp", "784-512-256-10, 512", mlp, images(512, 784)),
        Workload("encoder", "4 layers, 64 words, 64", Encoder, words(64, 64, 1000, 10)),
        Workload("lora", "BERT 4x256, 64 words, 32", lora, words(32, 64, 1000, 4)),
    )
}
