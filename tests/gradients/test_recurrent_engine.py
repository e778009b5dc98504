"""Recurrent models through the whole engine, against autograd, one record at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpis.errors import CouplingError
from dpis.gradients import RecordGradients
from dpis.gradients.record_gradients import CHUNK_BYTES

WORDS, STEPS, CLASSES = 11, 6, 3


class Classifier(nn.Module):
    """The shape of the IMDb model: frozen embedding, linear, recurrence, linear."""

    def __init__(self, recurrence: nn.Module, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5).requires_grad_(False)
        self.enter = nn.Linear(5, 4)
        self.recurrence = recurrence
        self.leave = nn.Linear(features, CLASSES)

    def read(self, words: Tensor) -> Tensor:
        return torch.relu(self.enter(self.embedding(words)))

    def forward(self, words: Tensor) -> Tensor:
        outputs, _ = self.recurrence(self.read(words))
        return self.leave(outputs[:, -1])


class LearnedState(Classifier):
    """The first state is a parameter."""

    def __init__(self) -> None:
        super().__init__(nn.GRU(4, 4, batch_first=True), 4)
        self.first = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, words: Tensor) -> Tensor:
        state = self.first.expand(-1, len(words), -1).contiguous()
        outputs, _ = self.recurrence(self.read(words), state)
        return self.leave(outputs[:, -1])


class Packed(Classifier):
    """Records of different lengths, packed; the state after each record's own last word."""

    def __init__(self, enforce_sorted: bool) -> None:
        super().__init__(nn.LSTM(4, 4, bidirectional=True, batch_first=True), 8)
        self.enforce_sorted = enforce_sorted

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.read(words), lengths, True, self.enforce_sorted)
        _, (hidden, _) = self.recurrence(packed)
        return self.leave(hidden.transpose(0, 1).flatten(1))


class Cells(Classifier):
    """A loop over a cell, which uses the same weights at every step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__(cell, 4)

    def forward(self, words: Tensor) -> Tensor:
        state = None
        for step in self.read(words).unbind(1):
            state = self.recurrence(step, state)
        return self.leave(state if isinstance(state, Tensor) else state[0])


MODELS = {
    "lstm-bidirectional": lambda: Classifier(
        nn.LSTM(4, 4, bidirectional=True, batch_first=True), 8
    ),
    "lstm-large-weights": lambda: Classifier(nn.LSTM(4, 20, batch_first=True), 20),
    "gru-two-layers": lambda: Classifier(nn.GRU(4, 4, num_layers=2, batch_first=True), 4),
    "rnn-dropout": lambda: Classifier(nn.RNN(4, 4, 2, dropout=0.5, batch_first=True).eval(), 4),
    "learned-state": LearnedState,
    "packed": lambda: Packed(enforce_sorted=True),
    "packed-unsorted": lambda: Packed(enforce_sorted=False),
    "lstm-cell": lambda: Cells(nn.LSTMCell(4, 4)),
    "gru-cell": lambda: Cells(nn.GRUCell(4, 4)),
}


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(2)
    module = MODELS[name]().double()
    words, labels = torch.randint(WORDS, (5, STEPS)), torch.randint(CLASSES, (5,))
    lengths = torch.tensor([3, 1, STEPS, 2, 3])
    if name == "packed":
        lengths = lengths.sort(descending=True).values
    return module, (words, lengths, labels) if name.startswith("packed") else (words, labels)


def one_by_one(module: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for index in range(len(batch[0])):
        *inputs, label = (part[index : index + 1] for part in batch)
        loss = nn.functional.cross_entropy(module(*inputs), label)
        rows.append(torch.autograd.grad(loss, list(trainable.values())))
    return {name: torch.stack(grads) for name, *grads in zip(trainable, *rows, strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_autograd(name: str) -> None:
    module, batch = make(name)
    expected = one_by_one(module, batch)
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.3], dtype=torch.float64)
    tape = RecordGradients(module, nn.CrossEntropyLoss(reduction="none")).record(batch)
    norms = sum(grads.flatten(1).square().sum(1) for grads in expected.values()).sqrt()
    torch.testing.assert_close(tape.norms(), norms, rtol=1e-10, atol=0)
    for parameter, total in tape.weighted_sum(weights).items():
        wanted = torch.tensordot(weights, expected[parameter], 1)
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["lstm-bidirectional", "lstm-large-weights", "packed-unsorted"])
def test_several_rows_a_record(name: str) -> None:
    module, batch = make(name)
    batch = tuple(part[:4] for part in batch)
    rows = one_by_one(module, batch)
    expected = {n: grads.unflatten(0, (2, 2)).mean(1) for n, grads in rows.items()}
    gradients = RecordGradients(module, nn.CrossEntropyLoss(reduction="none"), rows_per_record=2)
    norms = sum(grads.flatten(1).square().sum(1) for grads in expected.values()).sqrt()
    # Two records are fewer than the engine looks at to learn the model: it repeats them.
    torch.testing.assert_close(gradients.record(batch).norms(), norms, rtol=1e-10, atol=0)


def test_batches_of_other_lengths_need_no_second_plan() -> None:
    module, (words, lengths, labels) = make("packed-unsorted")
    gradients = RecordGradients(module, nn.CrossEntropyLoss(reduction="none"))
    for shorter in (lengths, lengths.clamp(max=1), lengths.clamp(max=4)):
        batch = words, shorter, labels
        expected = one_by_one(module, batch)
        norms = sum(grads.flatten(1).square().sum(1) for grads in expected.values()).sqrt()
        torch.testing.assert_close(gradients.record(batch).norms(), norms, rtol=1e-10, atol=0)


@pytest.mark.parametrize("lengths", [[6, 3, 3, 2, 1], [6, 6, 6, 6, 1]])
def test_a_model_may_want_the_longest_first(lengths: list[int]) -> None:
    """What the engine tries out keeps the order of the records."""
    module, (words, _, labels) = make("packed")
    batch = words, torch.tensor(lengths), labels
    squares = [grads.flatten(1).square().sum(1) for grads in one_by_one(module, batch).values()]
    gradients = RecordGradients(module, nn.CrossEntropyLoss(reduction="none"))
    norms = gradients(batch, lambda norms, _: torch.ones_like(norms)).norms
    torch.testing.assert_close(norms, sum(squares).sqrt(), rtol=1e-10, atol=0)
    assert gradients.batch_shaped(batch)


def test_chunks_of_a_recurrence_count_what_it_keeps() -> None:
    """Eight numbers a step and feature: gates, candidate, cell, its tanh, the hidden state."""
    steps, features = 60, 512
    module = Classifier(nn.LSTM(4, features, batch_first=True), features)
    gradients = RecordGradients(module, nn.CrossEntropyLoss())
    batch = torch.randint(WORDS, (3, steps)), torch.randint(CLASSES, (3,))
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    assert gradients.chunk(batch) * 8 * steps * features * 4 <= max(CHUNK_BYTES, 8 * parameters)


def test_records_taken_for_steps_are_refused() -> None:
    """The classic slip: without ``batch_first`` the state passes from record to record."""
    torch.manual_seed(0)
    module = Classifier(nn.LSTM(4, 4), 4)
    batch = torch.randint(WORDS, (5, STEPS)), torch.randint(CLASSES, (5,))
    with pytest.raises(CouplingError, match="must not depend on one another"):
        RecordGradients(module, nn.CrossEntropyLoss(reduction="none")).record(batch)
