"""Rows padded to the longest of their batch in a private loop: a model that sees how far is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from dpis.coupling.padding_trials import UntriedPaddingWarning
from dpis.dropin.memory import BatchMemoryManager
from dpis.errors import CouplingError

from .loops import BATCH, private

Items = list[tuple[Tensor, int]]
SEEN = r"how far it is padded.*guarantee would not hold"


def texts(records: int = 40) -> Items:
    """Of one to six words out of 1..8; 0 is for padding."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 7, (records,), generator=generator).tolist()
    return [(torch.randint(1, 9, (n,), generator=generator), i % 3) for i, n in enumerate(lengths)]


def padded(items: Items) -> tuple[Tensor, Tensor]:
    targets = torch.tensor([y for _, y in items])
    return pad_sequence([x for x, _ in items], batch_first=True), targets


def padded_in_front(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded([(x.flip(0), y) for x, y in items])
    return inputs.flip(1), targets


def to_one_length(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    return functional.pad(inputs, (0, 6 - inputs.shape[1])), targets


class Words(nn.Module):
    """Class scores from the vectors of some words."""

    def __init__(self, summary: Callable[[Words, Tensor], Tensor]) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)
        self.rnn, self.drop = nn.GRU(4, 4, batch_first=True), nn.Dropout(0.5)
        self._summary = summary
        used = torch.autograd.grad(
            self(torch.ones(2, 3, dtype=torch.long)).sum(),
            list(self.parameters()),
            allow_unused=True,
        )
        for parameter, gradient in zip(self.parameters(), used, strict=True):
            parameter.requires_grad_(gradient is not None)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.drop(self._summary(self, words)))


def mean(model: Words, words: Tensor) -> Tensor:
    return model.words(words).mean(1)


def sum_with_a_vector_for_padding(model: Words, words: Tensor) -> Tensor:
    return model.words(words).sum(1)


def last_state(model: Words, words: Tensor) -> Tensor:
    return model.rnn(model.words(words))[0][:, -1]


def share_of_words(model: Words, words: Tensor) -> Tensor:
    return (words > 0).float().mean(1, keepdim=True).expand(-1, 4)


def masked_mean(model: Words, words: Tensor) -> Tensor:
    shown = (words > 0)[..., None]
    return (model.words(words) * shown).sum(1) / shown.sum(1)


def packed_state(model: Words, words: Tensor) -> Tensor:
    lengths = (words > 0).sum(1).cpu()
    vectors = model.words(words)
    packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
    return model.rnn(packed)[1][0]


def each_word(model: Words, words: Tensor) -> Tensor:
    return model.words(words)


def train(model: nn.Module, collate: Any, steps: int = 4, **options: Any) -> None:
    loader = {"collate_fn": collate, **options.pop("loader", {})}
    private(model, texts(), loader=loader, **options).train(steps=steps)


@pytest.mark.parametrize(
    "summary", [mean, sum_with_a_vector_for_padding, last_state, share_of_words]
)
@pytest.mark.parametrize("collate", [padded, padded_in_front])
def test_a_model_that_sees_padding_is_refused(summary: Any, collate: Any) -> None:
    with pytest.raises(CouplingError, match=SEEN):
        train(Words(summary), collate)


@pytest.mark.parametrize("summary", [masked_mean, packed_state])
def test_a_model_that_masks_padding_is_taken(summary: Any) -> None:
    train(Words(summary), padded)


@pytest.mark.parametrize("summary", [mean, last_state, masked_mean])
def test_one_public_length_is_taken(summary: Any) -> None:
    train(Words(summary), to_one_length)


@pytest.mark.parametrize("collate", [padded, padded_in_front])
def test_scores_of_every_word_are_compared_word_by_word(collate: Any) -> None:
    loop = private(Words(each_word), texts(), loader={"collate_fn": collate})
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        scores, shown = loop.model(inputs), (inputs > 0).double()
        losses = functional.cross_entropy(
            scores.flatten(0, 1), targets.repeat_interleave(inputs.shape[1]), reduction="none"
        )
        ((losses.view_as(shown) * shown).sum(1) / shown.sum(1)).mean().backward()
        loop.optimizer.step()


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Words(mean)

    def forward(self, words: Tensor) -> Tensor:
        return self.model(words.t())


def time_first(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    return inputs.t().contiguous(), targets


def time_first_to_one_length(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = to_one_length(items)
    return inputs.t().contiguous(), targets


def test_rows_may_come_second() -> None:
    with pytest.raises(CouplingError, match=SEEN):
        train(TimeFirst(), time_first, batch_first=False)
    train(TimeFirst(), time_first_to_one_length, batch_first=False)


@pytest.mark.slow
def test_workers_look_too() -> None:
    with pytest.raises(CouplingError, match=SEEN):
        train(Words(mean), padded, loader={"num_workers": 1})
    train(Words(masked_mean), padded, loader={"num_workers": 1})


def test_parts_of_a_draw_are_looked_at() -> None:
    loop = private(Words(mean), texts(), loader={"collate_fn": padded})

    def train_in_parts() -> None:
        with BatchMemoryManager(
            data_loader=loop.loader, max_physical_batch_size=BATCH // 2, optimizer=loop.optimizer
        ) as parts:
            for inputs, targets in parts:
                loop.step(inputs, targets)

    with pytest.raises(CouplingError, match=SEEN):
        train_in_parts()


class States(nn.Module):
    """The state after every word, and the one after the last of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Words(last_state)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model.rnn(self.model.words(words))[0]
        return self.model.out(states), self.model.out(states[:, -1])


def test_what_the_loss_does_not_use_may_see_padding() -> None:
    loop = private(States(), texts(), loader={"collate_fn": padded})
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        lengths = (inputs > 0).sum(1)
        own_last = loop.model(inputs)[0][torch.arange(len(inputs)), lengths - 1]
        functional.cross_entropy(own_last, targets).backward()
        loop.optimizer.step()
    loop = private(States(), texts(), loader={"collate_fn": padded})
    inputs, targets = next(iter(loop.loader))
    functional.cross_entropy(loop.model(inputs)[1], targets).backward()
    with pytest.raises(CouplingError, match=SEEN):
        loop.optimizer.step()


class Named(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.model, self._masked = Words(masked_mean if masked else mean), masked

    def forward(self, *, words: Tensor, lengths: Tensor) -> Tensor:
        return self.model(words) + 0 * lengths[:, None]


@pytest.mark.parametrize("masked", [False, True])
def test_inputs_by_name_are_found(masked: bool) -> None:
    def by_name(items: Items) -> dict[str, Tensor]:
        inputs, targets = padded(items)
        return {"words": inputs, "targets": targets, "lengths": (inputs > 0).sum(1)}

    def go() -> None:
        loop = private(Named(masked), texts(), loader={"collate_fn": by_name})
        for batch in loop.loader:
            loop.optimizer.zero_grad()
            scores = loop.model(lengths=batch["lengths"], words=batch["words"])
            functional.cross_entropy(scores, batch["targets"]).backward()
            loop.optimizer.step()

    if masked:
        go()
    else:
        with pytest.raises(CouplingError, match=SEEN):
            go()


class EachWord(nn.Module):
    """Scores for every word, whatever the others."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.words = nn.Embedding(9, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words)


def of_the_last(scores: Tensor, _: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores[:, -1], targets)


def of_the_mean(scores: Tensor, _: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.mean(1), targets)


def of_padding_too(scores: Tensor, words: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(
        scores.flatten(0, 1), targets.repeat_interleave(words.shape[1]), reduction="none"
    )
    return losses.view_as(words).sum(1).mean()


def of_the_first(scores: Tensor, _: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores[:, 0], targets)


def train_with(loss: Any, collate: Any = padded, dataset: Any = None, **options: Any) -> None:
    loop = private(
        EachWord(),
        texts() if dataset is None else dataset,
        loader={"collate_fn": collate},
        **options,
    )
    for inputs, targets, *_ in loop.loader:
        loop.optimizer.zero_grad()
        loss(loop.model(inputs), inputs, targets).backward()
        loop.optimizer.step()


@pytest.mark.parametrize("loss", [of_the_last, of_the_mean, of_padding_too])
def test_a_loss_that_sees_padding_is_refused(loss: Any) -> None:
    with pytest.raises(CouplingError, match=SEEN):
        train_with(loss)


def test_a_loss_that_looks_at_own_positions_is_taken() -> None:
    train_with(of_the_first)


@pytest.mark.parametrize("length", [int, torch.tensor])
def test_a_length_in_the_batch_hides_nothing(length: Any) -> None:
    def with_its_length(items: Items) -> Any:
        inputs, targets = padded(items)
        return inputs, targets, length(inputs.shape[1])

    with pytest.raises(CouplingError, match=SEEN):
        train_with(of_the_last, with_its_length)
    train_with(of_the_first, with_its_length)


@pytest.mark.parametrize("seed", range(3))
def test_one_long_record_among_many_is_looked_at_when_it_comes(seed: int) -> None:
    words = torch.arange(1, 4)
    many = [(words, i % 3) for i in range(79)] + [(words.repeat(4), 0)]
    loop = private(EachWord(), many, loader={"collate_fn": padded}, n_public=80, seed=seed)
    for _ in range(50):
        for inputs, targets in loop.loader:
            loop.optimizer.zero_grad()
            of_the_last(loop.model(inputs), inputs, targets).backward()
            if inputs.shape[1] > 3 and len(inputs) > 1:
                with pytest.raises(CouplingError, match=SEEN):
                    loop.optimizer.step()
                return
            loop.optimizer.step()
    pytest.fail("it was never drawn")


class OwnTuple(tuple):  # type: ignore[type-arg]
    def __new__(cls, inputs: Tensor, targets: Tensor) -> OwnTuple:
        return super().__new__(cls, (inputs, targets))


@dataclass
class OwnBatch:
    words: Tensor
    targets: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.words, self.targets))


@pytest.mark.parametrize("kind", [OwnTuple, OwnBatch])
def test_batches_of_ones_own_kind_are_looked_into(kind: Any) -> None:
    with pytest.raises(CouplingError, match=SEEN):
        train_with(of_the_last, lambda items: kind(*padded(items)))
    train_with(of_the_first, lambda items: kind(*padded(items)))


def test_a_pass_that_was_given_up_does_not_use_up_the_look() -> None:
    loop = private(Words(mean), texts(), loader={"collate_fn": padded})
    inputs, targets = next(iter(loop.loader))
    for _ in range(2):
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(inputs), targets).backward()
    with pytest.raises(CouplingError, match=SEEN):
        loop.optimizer.step()


class BothWays(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.rnn = nn.GRU(4, 3, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.rnn(self.words(words))[0]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_parts_of_an_output_that_the_loss_uses_are_compared_alone(way: str) -> None:
    """Backward states have come through the padding; forward states have not."""
    loop = private(BothWays(), texts(), loader={"collate_fn": padded})
    inputs, targets = next(iter(loop.loader))
    last = loop.model(inputs)[torch.arange(len(inputs)), (inputs > 0).sum(1) - 1]
    used = last[:, :3] if way == "forward" else last[:, 3:]
    functional.cross_entropy(used, targets).backward()
    if way == "forward":
        loop.optimizer.step()
    else:
        with pytest.raises(CouplingError, match=SEEN):
            loop.optimizer.step()


# ── what cannot be compared ──────────────────────────────────────────────────────────────────────────


def masked_mean_with_noise(model: Words, words: Tensor) -> Tensor:
    vectors = masked_mean(model, words)
    return vectors + torch.randn_like(vectors)


def test_a_model_that_is_random_without_dropout_has_nothing_to_compare() -> None:
    train(Words(masked_mean_with_noise), padded)


def windows(model: Words, words: Tensor) -> Tensor:
    shown = (words > 0).unfold(1, 2, 1).all(2)[..., None]
    return (model.words(words).unfold(1, 2, 1).mean(3) * shown).sum(1)


def at_least_two(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    return functional.pad(
        inputs, (0, max(0, 2 - inputs.shape[1]) if len(items) > 1 else 0)
    ), targets


def test_a_model_that_needs_more_words_than_a_row_has_is_warned_of() -> None:
    short = [(x[:1] if i % 2 else x, y) for i, (x, y) in enumerate(texts())]
    loop = private(Words(windows), short, loader={"collate_fn": at_least_two})
    with pytest.warns(UntriedPaddingWarning, match=r"a row by itself cannot be run.*mask"):
        loop.train()


def test_inputs_that_the_loop_made_are_warned_of() -> None:
    loop = private(Words(mean), texts(), loader={"collate_fn": padded})
    inputs, targets = next(iter(loop.loader))
    with pytest.warns(UntriedPaddingWarning, match=r"not tensors of the batch.*no claim holds"):
        loop.model(inputs.flip(1)[:, :-1])
    del targets


def test_a_collate_function_that_needs_company_is_not_asked() -> None:
    def of_several(items: Items) -> tuple[Tensor, Tensor]:
        assert len(items) > 1
        return padded(items)

    loop = private(EachWord(), texts(), loader={"collate_fn": of_several, "batch_size": 20})
    next(iter(loop.loader))


def test_what_belongs_to_no_row_does_not_disturb() -> None:
    def with_more(items: Items) -> Any:
        names = [f"text of class {y}" for _, y in items]
        return *padded(items), names, torch.tensor(3.0), torch.ones(2)

    loop = private(Words(masked_mean), texts(), loader={"collate_fn": with_more})
    for inputs, targets, *_ in loop.loader:
        loop.step(inputs, targets)
