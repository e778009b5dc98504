"""`dpis.train` in a process group: a result on every rank, one warning, one end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpis
from dpis import Training
from dpis.training import Result
from tests.ranks import on_ranks, outcomes_on_ranks


class Items(Dataset[Any]):
    """One of them cannot be read where it says so."""

    def __init__(self, broken: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(60, 4, generator=generator, dtype=torch.float64)
        self._targets = torch.randint(3, (60,), generator=generator)
        self._broken = broken

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self._broken:
            raise ArithmeticError("for a try")
        return self._inputs[index], self._targets[index]


def _train(out: str, data: Dataset[Any] | None = None, **options: Any) -> Result:
    torch.manual_seed(0)
    settings = {"epochs": 2, "batch_size": 12, "delta": 1e-3, "seed": 1, **options}
    model = settings.pop("model", None) or nn.Linear(4, 3).double()
    data = Items(None) if data is None else data
    return dpis.train(model, data, nn.CrossEntropyLoss(), out=out, **settings)


def _trains(rank: int, out: str) -> tuple[Any, ...]:
    torch.manual_seed(rank)
    data = Items(None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = _train(out, held_out=TensorDataset(data._inputs + 1, data._targets))
    told = [one for one in said if "public" in str(one.message)]
    return result.claim, result.metrics, str(result.folder), result.epochs, len(told)


def test_every_rank_has_the_result_and_one_of_them_warns(tmp_path: Path) -> None:
    first, second = on_ranks(2, _trains, str(tmp_path / "two"))
    assert first[:4] == second[:4]
    assert (first[4], second[4]) == (1, 0)
    alone = _trains(0, str(tmp_path / "one"))
    assert alone[0] == first[0]
    assert alone[1] == pytest.approx(first[1])
    one, two = (
        (tmp_path / run / "ledger.jsonl").read_text().splitlines() for run in ("one", "two")
    )
    assert one[:-1] == two[:-1]


def _cannot_read(rank: int, out: str) -> None:
    _train(out, Items(59))  # of the last shard: rank 1's own; its fingerprint is read by all


def _reads_less(rank: int, out: str) -> None:
    _train(
        out, TensorDataset(*(t[: 60 - rank] for t in (Items(None)._inputs, Items(None)._targets)))
    )


def _reads_others(rank: int, out: str) -> None:
    data = Items(None)
    _train(out, TensorDataset(data._inputs + rank, data._targets))


def _other_seed(rank: int, out: str) -> None:
    _train(out, seed=rank)


def _other_epochs(rank: int, out: str) -> None:
    _train(out, epochs=1 + rank)


def _other_model(rank: int, out: str) -> None:
    _train(out, model=nn.Linear(4, 3 + rank).double())


def _other_decay(rank: int, out: str) -> None:
    _train(out, training=Training(optimizer=lambda p: torch.optim.SGD(p, lr=0.1 + rank)))


def _wrong_option_on_one(rank: int, out: str) -> None:
    _train(out, epsilon=1.0 - 2 * rank)


def _raises_on_one(rank: int, out: str) -> None:
    _train(out, Items(7 if rank else None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misuse", "told_by_0"),
    [
        (_cannot_read, "for a try"),
        (_reads_less, "options and number of records"),
        (_reads_others, "rank 1 has another than rank 0: the data and their order"),
        (_other_seed, "rank 1 has another than rank 0: seed"),
        (_other_epochs, "options and number of records"),
        (_other_model, "rank 1 has another than rank 0: model"),
        (_other_decay, "rank 1 has another than rank 0: the optimizer"),
        (_wrong_option_on_one, "rank 1 stopped: "),
        (_raises_on_one, "rank 1 stopped: "),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_ranks_do_otherwise_stops_all_before_anything_is_released(
    misuse: Callable[[int, str], None], told_by_0: str, tmp_path: Path
) -> None:
    outcomes = outcomes_on_ranks(2, misuse, str(tmp_path / "run"), seconds=40)
    assert not any(ok for ok, _ in outcomes)
    assert told_by_0 in outcomes[0][1], outcomes[0][1]
    assert not (tmp_path / "run").exists()
