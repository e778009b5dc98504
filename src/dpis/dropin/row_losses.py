"""One loss for every row, for models that are given labels and return one loss for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis import batches
from dpis.errors import InputError

RowLosses = Callable[[Any, Tensor], Tensor]
"""From the model's outputs and the labels to one loss for every row."""
Losses = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""The same for labels by the names under which a model takes them."""

IGNORED = -100
LABELS = "labels", "start_positions", "end_positions"
"""What makes a model of ``transformers`` compute its loss."""
OF_THE_BATCH = "num_items_in_batch"
"""What it would divide by, if it were told."""
TRIALS, AGREEMENT = 4, 1e-2
"""How often the loss of a single record is compared, and how closely it must agree (half precision included)."""


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
    logits = outputs["logits"].float()
    if labels.is_floating_point():
        if labels.ndim == 1:
            return functional.mse_loss(logits.reshape(labels.shape), labels, reduction="none")
        each = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return each.flatten(1).mean(1)
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels, reduction="none")
    by_token = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return by_token.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def causal_losses(outputs: Any, labels: Tensor) -> Tensor:
    """One loss a row for language models: every token from those before it, the mean over a row's own tokens."""
    return classification_losses({"logits": outputs["logits"][:, :-1]}, labels[:, 1:])


def squared_losses(outputs: Any, labels: Tensor) -> Tensor:
    """One loss a row for regression: the mean over its outputs."""
    logits = outputs["logits"].float()
    each = functional.mse_loss(logits, labels.reshape(logits.shape), reduction="none")
    return each.flatten(1).mean(1)


def span_losses(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """One loss a row for answers to questions: where they start and end; positions past the text do not count."""
    ends = []
    for which in ("start", "end"):
        logits = outputs[f"{which}_logits"].float()
        length = logits.shape[1]
        where = labels[f"{which}_positions"].reshape(-1).clamp(0, length)
        ends.append(functional.cross_entropy(logits, where, ignore_index=length, reduction="none"))
    return (ends[0] + ends[1]) / 2


def _of_labels(losses: RowLosses) -> Losses:
    return lambda outputs, labels: losses(outputs, labels["labels"])


KINDS: tuple[Losses, ...] = (
    _of_labels(classification_losses),
    _of_labels(lambda outputs, labels: classification_losses(outputs, labels.reshape(-1))),
    _of_labels(causal_losses),
    _of_labels(squared_losses),
    span_losses,
)
"""Of losses that models are known to compute."""


class HeadLosses:
    """Which loss a model computes when it is given labels, found out once, and the same for every row.

    The model is asked for the loss of single records with made-up labels: the mean over a batch of one is the record's
    own. Whichever kind gives the same from the same logits stands in for it.

    Args:
        module: the model.
        undisturbed: to look around with it leaves no trace meanwhile.
    """

    def __init__(
        self, module: nn.Module, undisturbed: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._module, self._undisturbed = module, undisturbed
        self._asked = False
        self._kind: Losses | None = None

    def kind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Mapping[str, Tensor]
    ) -> Losses | None:
        """Of the model's loss; None, where there are no labels, or they are an input as any other.

        Args:
            args: a batch, as the model is given it.
            kwargs: what it is given by name, without labels.
            labels: of the batch.

        Raises:
            InputError: if it returns one loss for the batch, of a kind that is not known.
        """
        if not labels:
            return None
        if not self._asked and batches.rows(labels):
            with torch.no_grad(), self._undisturbed():
                self._kind = self._find(args, kwargs, labels)
            self._asked = True
        return self._kind

    def _find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Mapping[str, Tensor]
    ) -> Losses | None:
        errors = dict.fromkeys(KINDS, 0.0)
        rows, generator = batches.rows(labels), torch.Generator().manual_seed(0)
        for trial in range(TRIALS):
            index = torch.tensor([trial % rows], device=batches.device(labels))
            (some, named), own = (
                batches.take(given, index) for given in ((args, dict(kwargs)), dict(labels))
            )
            try:
                unlabelled = self._module(*some, **named)
            except Exception:
                return None  # it cannot do without: then it returns what it returns
            made_up = {n: _made_up(n, label, unlabelled, generator) for n, label in own.items()}
            try:
                outputs = self._module(*some, **named, **made_up)
            except TypeError:
                return None  # it takes no labels
            if not _has_loss(outputs):
                return None
            for kind in KINDS:
                errors[kind] = max(errors[kind], _difference(kind, outputs, made_up))
        best = min(KINDS, key=lambda kind: errors[kind])
        if not errors[best] <= AGREEMENT:
            raise InputError(
                "the model was given labels and returned one loss for the batch, of a kind that is not known: it may "
                "divide by something of all records, and the guarantee would not hold. Call it without labels, compute "
                "one loss for every row from its outputs, and take their mean: "
                "cross_entropy(model(inputs).logits, labels)"
            )
        return best


def labels_among(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a model is given by name, without labels; and the labels."""
    labels = {name: kwargs[name] for name in LABELS if isinstance(kwargs.get(name), Tensor)}
    left_out = {*labels, OF_THE_BATCH} if labels else set[str]()
    return {name: value for name, value in kwargs.items() if name not in left_out}, labels


def _has_loss(outputs: Any) -> bool:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    return isinstance(loss, Tensor) and loss.numel() == 1


def _difference(kind: Losses, outputs: Any, labels: Mapping[str, Tensor]) -> float:
    """How far the loss that a model returned is from that of a kind; infinite, where it has another form."""
    try:
        ours = kind(outputs, labels)
    except (RuntimeError, ValueError, IndexError, KeyError):
        return torch.inf
    given = float(outputs["loss"])
    if ours.shape != (1,) or not given > 0:
        return torch.inf
    return abs(float(ours) / given - 1)


def _made_up(name: str, label: Tensor, outputs: Any, generator: torch.Generator) -> Tensor:
    """Labels of the same form, nobody's; every third token is ignored."""
    if label.is_floating_point():
        return torch.rand(label.shape, generator=generator).to(label)
    named = outputs if isinstance(outputs, Mapping) else {}
    logits = named.get("logits", named.get("start_logits"))
    most = 2 if logits is None else logits.shape[-1]
    drawn = torch.randint(most, label.shape, generator=generator).to(label)
    if name == "labels" and label.ndim > 1 and label.shape[1] > 2:
        drawn[:, ::3] = IGNORED
    return drawn


def with_loss(outputs: Mapping[str, Any], loss: Tensor) -> Any:
    """The same outputs, and a loss before all others."""
    entries = {"loss": loss, **outputs}
    try:
        return type(outputs)(**entries)
    except TypeError:
        return entries
