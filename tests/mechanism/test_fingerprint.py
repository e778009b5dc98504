"""All processes hold the same data in the same order: a record with two coins would count twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

import dpis
from dpis.errors import InputError
from dpis.group import current_group
from dpis.mechanism.fingerprint import item_digest, require_same_data
from dpis.randomness import Key
from tests.dropin.loops import data, private
from tests.ranks import on_ranks, outcomes_on_ranks
from tests.training.toys import fit, mlp, points


def _split_anew(rank: int, dataset: Any) -> Subset[Any]:
    """As ``random_split`` without a generator does on every process."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(rank))
    return Subset(dataset, order.tolist())


def _trains(rank: int, folder: Path) -> None:
    fit(folder, mlp(), _split_anew(rank, points()))


def _loops(rank: int, folder: Path) -> None:
    private(dataset=_split_anew(rank, data()))


def _users(rank: int, folder: Path) -> None:
    users = [(row + rank) // 3 for row in range(len(points()))]
    n_public = len(set(users))
    fit(folder, mlp(), user_ids=users, max_rows_per_user=3, n_public=n_public, batch_size=8)


@pytest.mark.parametrize("train", [_trains, _loops, _users])
def test_another_order_on_a_process_is_refused_before_anything_is_drawn(
    train: Any, tmp_path: Path
) -> None:
    for ok, told in outcomes_on_ranks(2, train, tmp_path / "run", seconds=20):
        assert not ok
        assert "has another than rank 0: the data and their order" in told
    assert not (tmp_path / "run").exists()


class _Restless(Dataset[Any]):
    """Items with random numbers of their own, from no generator that could be filled."""

    def __getitem__(self, place: int) -> Any:
        return torch.tensor([random.SystemRandom().random()]), place

    def __len__(self) -> int:
        return 20


def _compare(rank: int) -> str:
    key = Key.from_seed(3)
    for dataset in (data(), _Restless()):
        require_same_data(lambda i: item_digest(dataset, i, key), 20, current_group())  # noqa: B023
    return item_digest(data(), 1, key)


def test_the_same_data_and_what_cannot_be_compared_pass() -> None:
    one, other = on_ranks(2, _compare)
    assert one == other


def test_one_process_compares_nothing() -> None:
    def refuse(place: int) -> str:
        raise InputError("not to be read")

    require_same_data(refuse, 20, dpis.group.Alone())
