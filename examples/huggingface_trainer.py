"""Train a text classifier of the transformers library privately, without any download.

    pip install 'dpis[huggingface]'
    python examples/huggingface_trainer.py

The model is built from a config; a pretrained one is used in the same way.
"""

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from dpis import Privacy
from dpis.dropin.huggingface import PrivateTrainer

WORDS, LENGTH = 200, 12


class Sentences(Dataset):
    """Random words; a sentence is of class 1 if it has more words from the second half."""

    def __init__(self, count: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        leaning = torch.rand(count, 1, generator=source) < 0.5
        second = torch.rand(count, LENGTH, generator=source) < torch.where(leaning, 0.9, 0.1)
        words = torch.randint(WORDS // 2, (count, LENGTH), generator=source)
        self.words = words + second * (WORDS // 2)
        self.labels = (second.sum(1) * 2 > LENGTH).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.words[index],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": self.labels[index],
        }


def classifier() -> BertForSequenceClassification:
    """BERT with two layers of width 64."""
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def accuracy(predicted) -> dict[str, float]:
    """Of held-out rows."""
    return {"accuracy": float(np.mean(predicted.predictions.argmax(1) == predicted.label_ids))}


def main(epochs: int = 4, records: int = 4000) -> PrivateTrainer:
    """At epsilon = 8; a random network needs it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=200,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = PrivateTrainer(
            classifier(),
            arguments,
            train_dataset=Sentences(records, seed=1),
            eval_dataset=Sentences(500, seed=2),
            compute_metrics=accuracy,
            privacy=Privacy(epsilon=8.0, clip_norm=1.0, n_public=records),
            max_physical_batch_size=100,
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
