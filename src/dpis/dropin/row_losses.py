"""One loss for every row: what a model that is given labels would mix over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

RowLosses = Callable[[Any, Tensor], Tensor]
"""From the model's outputs and the labels to one loss for every row."""


def classification_losses(outputs: Any, labels: Tensor) -> Tensor:
    """One loss a row for classifiers of sequences and of tokens.

    - labels ``[rows]`` of integers: cross-entropy; of floats: squared error of one output.
    - labels ``[rows, classes]`` of floats: binary cross-entropy, the mean over classes.
    - labels ``[rows, tokens]`` of integers (-100: ignored): cross-entropy, the mean over a row's own tokens.

    >>> import torch
    >>> logits = torch.zeros(2, 3, 4)
    >>> classification_losses({"logits": logits}, torch.tensor([[0, 1, -100], [-100, -100, -100]]))
    tensor([1.3863, 0.0000])
    """
    logits = outputs["logits"]
    if labels.is_floating_point():
        if labels.ndim == 1:
            return functional.mse_loss(logits.reshape(labels.shape), labels, reduction="none")
        each = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return each.flatten(1).mean(1)
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels, reduction="none")
    by_token = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return by_token.sum(1) / (labels != -100).sum(1).clamp(min=1)
