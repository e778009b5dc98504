"""What is random about a record: secret, its own where it can be, and of one law whoever else was drawn (rule 23)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpis
from dpis import generators as chance
from dpis.generators import GeneratorStates, seeded_generators
from dpis.mechanism import noisy_update

from .loops import Loop, mlp, private

FALSE_ALARM = 1e-6  # of every statistical assertion; keys are fixed
RATE_ONE = {"n_public": 8, "loader": {"batch_size": 8}}  # everybody is drawn in every step


class Shaken(Dataset[Any]):
    """Every item moves at random, by the numbers of torch, numpy and Python."""

    def __init__(self, records: int, features: int = 4) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(64, features, generator=generator).double()[:records]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        moved = torch.randn(len(self.inputs[0])) + np.random.randn() + random.gauss(0, 1)
        return self.inputs[place] + 3.0 * moved, place % 3


class Still(Shaken):
    """Nothing about it is random."""

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.inputs[place], place % 3


class First(Dataset[Any]):
    """A data set with one record more, before all others."""

    def __init__(self, dataset: Shaken) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset) + 1

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.dataset[place - 1] if place else (torch.full((4,), 9.0).double(), 2)


def dropping(layers: int = 1) -> nn.Module:
    torch.manual_seed(3)
    hidden = [part for _ in range(layers) for part in (nn.Linear(12, 12), nn.Dropout(0.5))]
    return nn.Sequential(nn.Linear(4, 12), nn.Dropout(0.5), *hidden, nn.Linear(12, 3)).double()


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was summed up, before its noise."""
    seen, real = list[Tensor](), noisy_update.add_noise

    def add_noise(values: dict[str, Tensor], std: float, normals: Any) -> dict[str, Tensor]:
        seen.append(torch.cat([value.double().flatten() for value in values.values()]))
        return real(values, std, normals)

    monkeypatch.setattr(noisy_update, "add_noise", add_noise)
    return seen


def delivered(loop: Loop, steps: int = 3) -> list[Tensor]:
    """The inputs of some steps, which are taken with the public seed of so many scripts."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    seen = []
    while len(seen) < steps:
        for inputs, targets in loop.loader:
            seen.append(inputs)
            loop.step(inputs, targets)
    return seen


# ── items ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_public_seed_says_nothing_about_items(workers: int) -> None:
    settings = {"n_public": 8, "loader": {"batch_size": 8, "num_workers": workers}}
    one, same, other = (
        delivered(private(dataset=Shaken(8), seed=seed, method="dp-sgd", **settings))
        for seed in (1, 1, 2)
    )
    assert all(map(torch.equal, one, same))  # repeatable: a function of the key
    assert not any(map(torch.equal, one, other))
    assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_who_else_was_drawn_changes_no_item(workers: int) -> None:
    settings = {"n_public": 8, "loader": {"batch_size": 8, "num_workers": workers}}
    without = delivered(private(dataset=Still(8), method="dp-sgd", **settings))
    assert torch.equal(without[0], Still(8).inputs)

    class Late(Shaken):
        """Item 5 takes random numbers of its own: those after it must not notice."""

        def __getitem__(self, place: int) -> tuple[Tensor, int]:
            if place == 5:
                torch.randn(7)
            return super().__getitem__(place)

    one = delivered(private(dataset=Shaken(8), method="dp-sgd", **settings))
    other = delivered(private(dataset=Late(8), method="dp-sgd", **settings))
    for a, b in zip(one, other, strict=True):
        assert [bool((a[i] == b[i]).all()) for i in range(8)] == [i != 5 for i in range(8)]


class Greedy(Shaken):
    """Its first record takes one random number more in one of two worlds."""

    def __init__(self, more: bool) -> None:
        super().__init__(32)
        self.more = more

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if place == 0 and self.more:
            torch.randn(1)
        return super().__getitem__(place)


def moved_by_the_first(sums: list[Tensor], workers: int) -> float:
    """How far the sum of a step moves where the first record is another: one is taken away, one is added."""
    loader = {"batch_size": 32, "num_workers": workers}
    for more in (False, True):
        settings = {"method": "dp-sgd", "n_public": 32, "loader": loader}
        delivered(private(dataset=Greedy(more), **settings), steps=1)
    return float((sums[1] - sums[0]).norm())


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_record_moves_no_other_where_items_are_random(workers: int, sums: list[Tensor]) -> None:
    assert moved_by_the_first(sums, workers) <= 2.002


def test_items_from_a_shared_stream_would_move_others(
    monkeypatch: pytest.MonkeyPatch, sums: list[Tensor]
) -> None:
    def by_place(self: Any, places: list[int], secret: bytes) -> list[Any]:
        return [self._make(place) for place in places]

    monkeypatch.setattr(chance.ItemChance, "items", by_place)
    assert moved_by_the_first(sums, 0) > 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [mlp, lambda: dropping(0)], ids=["transforms", "and dropout"])
def test_one_record_more_moves_the_sum_by_one(
    model: Callable[[], nn.Module], workers: int, sums: list[Tensor]
) -> None:
    loader = {"batch_size": 32, "num_workers": workers}
    for records in (32, 33):
        settings = {"method": "dp-sgd", "n_public": 32, "loader": loader}
        delivered(private(model(), Shaken(records), **settings), steps=1)
    assert 0.1 < float((sums[1] - sums[0]).norm()) <= 1.001


# ── masks ────────────────────────────────────────────────────────────────────────────────────────────


class Masks(nn.Module):
    """Keeps the masks of its dropout: how much of ones is left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.seen = nn.Linear(4, 3).double(), nn.Dropout(0.5), []

    def forward(self, rows: Tensor) -> Tensor:
        self.drop(rows[: len(rows) // 2])  # how much is taken before depends on the batch
        kept = self.drop(torch.ones_like(rows))
        self.seen.append((kept != 0).detach())
        return self.linear(rows * kept)


def masks(seed: int, dataset: Any = None) -> Tensor:
    """Those of the first step, which everybody takes part in."""
    model = Masks()
    loop = private(model, Still(8) if dataset is None else dataset, seed=seed, **RATE_ONE)
    torch.manual_seed(0)
    for inputs, targets in loop.loader:
        model.seen.clear()
        loop.optimizer.zero_grad()
        outputs = loop.model(inputs)
        mask = model.seen[-1].clone()
        nn.functional.cross_entropy(outputs, targets).backward()
        loop.optimizer.step()
        return mask
    raise AssertionError


def test_a_public_seed_says_nothing_about_masks() -> None:
    one, same, other = masks(1), masks(1), masks(2)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.statistical
def test_the_law_of_a_mask_is_the_same_whoever_else_is_drawn() -> None:
    """Every entry a fair coin, of one record independent of another's, with a record more before them or not."""
    for dataset, start in ((Still(8), 0), (First(Still(8)), 1)):
        drawn = torch.stack([masks(seed, dataset)[start : start + 8] for seed in range(60)])
        kept = int(drawn.sum())
        assert FALSE_ALARM < stats.binom.cdf(kept, drawn.numel(), 0.5) < 1 - FALSE_ALARM
        equal = int((drawn[:, :-1] == drawn[:, 1:]).sum())
        assert FALSE_ALARM < stats.binom.cdf(equal, drawn[:, 1:].numel(), 0.5) < 1 - FALSE_ALARM


def test_one_record_moves_the_sum_by_one_under_one_layer_of_dropout(sums: list[Tensor]) -> None:
    """The last row takes its mask after all others; with the same key nobody else's changes."""
    for records in (8, 9):
        loop = private(dropping(0), Still(records), method="dp-sgd", **RATE_ONE)
        delivered(loop, steps=1)
    assert float((sums[1] - sums[0]).norm()) <= 1.001


def test_masks_are_the_same_when_a_batch_is_delivered_again() -> None:
    first, again = private(dropping(), **RATE_ONE), private(dropping(), **RATE_ONE)
    for loop, looks in ((first, 0), (again, 3)):
        for _ in range(looks):
            next(iter(loop.loader))
        loop.train(steps=1)
    assert torch.equal(first.weights, again.weights)


# ── full entropy ─────────────────────────────────────────────────────────────────────────────────────


def numbers_of_torch(secret: int) -> Tensor:
    with seeded_generators(dpis.randomness.Key.from_seed(secret).stream("masks", 0)):
        return torch.randint(1 << 30, (700,))


def test_torch_is_filled_with_more_than_a_seed_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seed of ``manual_seed`` held fast, the numbers still differ."""
    monkeypatch.setattr(chance, "_seed", lambda _: 0)
    assert not torch.equal(numbers_of_torch(1), numbers_of_torch(2))
    monkeypatch.setattr(
        chance, "_torch_state", lambda _: torch.Generator().manual_seed(0).get_state()
    )
    assert torch.equal(numbers_of_torch(1), numbers_of_torch(2))  # and would be the same without


def test_the_state_is_that_of_a_mersenne_twister() -> None:
    """Known answer: numpy's, from the same 624 words. Torch gives its words in the same order."""
    words = np.frombuffer(dpis.randomness.Key.from_seed(4).stream("t", 0).bytes(4 * 624), np.uint32)
    torch_source = torch.Generator()
    torch_source.set_state(chance._torch_state(dpis.randomness.Key.from_seed(4).stream("t", 0)))
    numpy_source = np.random.RandomState()
    numpy_source.set_state(("MT19937", words, 624))
    expected = numpy_source.randint(0, 1 << 32, 1000, dtype=np.uint32) & ((1 << 24) - 1)
    found = torch.randint(1 << 24, (1000,), generator=torch_source)
    assert found.tolist() == expected.tolist()


# ── the process's own generators ─────────────────────────────────────────────────────────────────────


def trained_by_hand() -> Iterator[Callable[[], object]]:
    loop = private(dropping(), Shaken(40), loader={"batch_size": 4})
    batches = iter(loop.loader)
    yield lambda: None
    for inputs, targets in batches:
        before = GeneratorStates.now()
        loop.step(inputs, targets)
        assert not before.moved()
        before = GeneratorStates.now()
        yield before.moved


def test_generators_stay_where_they_are() -> None:
    """How far they move would tell how many records were drawn, to whoever saved their states."""
    for moved in trained_by_hand():
        assert not moved()
