"""A collate function of one's own in a private loop: what mixes records or moves them about is refused."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import default_collate

from dpis.dropin.workers import Places, WorkerBatches
from dpis.errors import CouplingError

from .loops import private

Items = list[tuple[Tensor, int]]


def sequences(records: int = 40) -> Items:
    """Of one to six positions, two numbers each."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 7, (records,), generator=generator).tolist()
    return [(torch.randn(n, 2, generator=generator), i % 3) for i, n in enumerate(lengths)]


def fixed(records: int = 40) -> Items:
    """Of three positions each."""
    return [(torch.cat([x, x, x])[:3], y) for x, y in sequences(records)]


def padded(items: Items) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor(
        [y for _, y in items]
    )


def sorted_by_length(items: Items) -> tuple[Tensor, Tensor]:
    return padded(sorted(items, key=lambda item: -len(item[0])))


def reversed_order(items: Items) -> tuple[Tensor, Tensor]:
    return padded(items[::-1])


def mixup(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    return 0.5 * inputs + 0.5 * inputs.roll(1, 0), targets


def mixup_at_random(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    share = float(np.random.beta(2, 2))
    return share * inputs + (1 - share) * inputs[torch.randperm(len(inputs))], targets


def standardised(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    return (inputs - inputs.mean(0)) / (inputs.std(0) + 1), targets


def by_the_largest(items: Items) -> tuple[Tensor, Tensor]:
    inputs, targets = padded(items)
    return inputs / inputs.abs().max(), targets


def with_a_count(items: Items) -> tuple[Tensor, Tensor, float]:
    return *padded(items), float(sum(x.sum() for x, _ in items))


MIXING = [
    sorted_by_length,
    reversed_order,
    mixup,
    mixup_at_random,
    standardised,
    by_the_largest,
    with_a_count,
]


class OnePosition(nn.Module):
    """Of the items themselves, whatever the padding."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.out, self.position = nn.Linear(2, 3), position

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x[:, self.position])


def train(dataset: Any, collate: Callable[[Any], Any], **loader: Any) -> None:
    model = OnePosition(-1 if collate is padded_left else 0)
    loop = private(model, dataset, loader={"collate_fn": collate, **loader})
    for inputs, targets, *_ in loop.loader:
        loop.step(inputs, targets)


@pytest.mark.parametrize("collate", MIXING)
def test_a_collate_function_that_mixes_or_moves_records_is_refused(collate: Any):
    with pytest.raises(CouplingError, match=r"row i must be made of item i.*guarantee would not"):
        train(sequences() if collate is sorted_by_length else fixed(), collate)


@pytest.mark.parametrize("collate", [sorted_by_length, reversed_order, mixup, standardised])
def test_padding_hides_nothing(collate: Any):
    with pytest.raises(CouplingError, match="collate_fn mixes rows"):
        train(sequences(), collate)


def test_a_refusal_in_a_worker_reaches_the_loop():
    with pytest.raises(CouplingError, match=r"row i must be made of item i.*guarantee would not"):
        train(sequences(), sorted_by_length, num_workers=1)


# ── what treats every item by itself ─────────────────────────────────────────────────────────────────


def noisy(items: Items) -> tuple[Tensor, Tensor]:
    """All three generators, as many numbers as the batch has."""
    inputs, targets = padded(items)
    inputs = inputs + torch.rand(inputs.shape) + random.random()
    return inputs + torch.from_numpy(np.random.rand(*inputs.shape)).float(), targets


def popping(items: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Takes its items apart."""
    targets = torch.tensor([item.pop("y") for item in items])
    return torch.stack([item.pop("x") for item in items]), targets


def padded_left(items: Items) -> tuple[Tensor, Tensor]:
    flipped, targets = padded([(x.flip(0), y) for x, y in items])
    return flipped.flip(1), targets


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (fixed(), default_collate),
        (fixed(), padded),
        (sequences(), padded),
        (sequences(), padded_left),
        (sequences(), noisy),
        ([fixed()[0]] * 40, noisy),
    ],
    ids=["default", "stacked", "padded", "padded on the left", "random", "equal records"],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_items_by_themselves_are_taken(dataset: Any, collate: Any, workers: int):
    train(dataset, collate, num_workers=workers)


def test_items_may_be_taken_apart():
    class Dictionaries(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return {"x": x, "y": y}

    train(Dictionaries(fixed()), popping)


def test_a_look_leaves_the_generators_as_they_would_be():
    def numbers(collate: Any) -> list[float]:
        torch.manual_seed(2), np.random.seed(2), random.seed(2)
        train(fixed(), collate)
        return [torch.rand(1).item(), float(np.random.rand()), random.random()]

    def quietly(items: Items) -> tuple[Tensor, Tensor]:
        return padded(items)

    assert numbers(quietly) == numbers(default_collate)


def packed(items: Items) -> tuple[PackedSequence, Tensor]:
    return pack_sequence([x for x, _ in items], enforce_sorted=False), torch.tensor(
        [y for _, y in items]
    )


def packed_and_sorted(items: Items) -> tuple[PackedSequence, Tensor]:
    items = sorted(items, key=lambda item: -len(item[0]))
    return pack_sequence([x for x, _ in items]), torch.tensor([y for _, y in items])


def test_packed_sequences_are_looked_into():
    next(iter(private(dataset=sequences(), loader={"collate_fn": packed}).loader))
    with pytest.raises(CouplingError, match="collate_fn mixes rows"):
        next(iter(private(dataset=sequences(), loader={"collate_fn": packed_and_sorted}).loader))


class AtOnce(list[Any]):
    """Fetches several items at once, and centres them if it is told to."""

    centred = True

    def __getitems__(self, places: list[int]) -> Items:
        items = [self[place] for place in places]
        mean = torch.stack([x for x, _ in items]).mean(0)
        return [(x - mean, y) for x, y in items] if self.centred else items


class Unmixed(AtOnce):
    centred = False


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_items_that_are_fetched_at_once_are_made_by_themselves(workers: int):
    with pytest.raises(CouplingError, match=r"__getitems__ mixes records"):
        train(AtOnce(fixed()), default_collate, num_workers=workers)
    train(Unmixed(fixed()), default_collate, num_workers=workers)


def test_a_data_set_that_is_watched_is_the_users_in_all_else():
    loop = private(dataset=Unmixed(fixed()))
    assert loop.loader.dataset.centred is False
    assert len(loop.loader.dataset) == 40
    assert torch.equal(pickle.loads(pickle.dumps(loop.loader.dataset))[3][0], fixed()[3][0])


def test_names_of_items_in_an_array_are_taken() -> None:
    def with_names(items: Items) -> tuple[Tensor, Tensor, Any]:
        return *padded(items), np.array([f"item of class {y}" for _, y in items])

    batches = WorkerBatches(fixed(6), with_names, row_dim=0)
    batch = batches.__getitems__(Places(range(6), bytes(32))).batch
    assert batch[2].shape == (6,)


def test_what_a_worker_sets_is_for_the_data_set() -> None:
    class AtOnce(list):  # type: ignore[type-arg]
        def __getitems__(self, places: list[int]) -> Any:
            return [self[place] for place in places]

    dataset = AtOnce(fixed())
    WorkerBatches(dataset, default_collate, row_dim=0).opened = True
    assert dataset.opened  # type: ignore[attr-defined]
