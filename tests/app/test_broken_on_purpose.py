"""How a job holds records out: plant the bug, and a law must fail. The laws hold for the real code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from dpis.app.jobs import sources
from dpis.app.jobs.job_options import JobOptions
from dpis.errors import DpisError
from dpis.files.split import split_by_coins
from dpis.randomness import Key

ROWS = 400
BOUNDS = 1000


def sides(folder: Path, seed: int, rows: int = ROWS, users: bool = False) -> tuple[set[int], ...]:
    """The rows that a job trains on, and those that it holds out, by number."""
    path = folder / "table.csv"
    lines = [f"{row},{row % 50},{'yes' if row % 3 else 'no'}" for row in range(rows)]
    path.write_text("\n".join(["number,who,sick", *lines]) + "\n")
    column: dict[str, Any] = {"user_column": "who"} if users else {"drop": ("who",)}
    options = JobOptions(
        dataset=str(path),
        bounds=(f"number=0:{BOUNDS}",),
        target="sick",
        classes="no,yes",
        eval_share=0.3,
        **column,
    )
    encoded = sources.open_source(options, Key.from_seed(seed)).encode(None)
    return numbers(encoded.features), numbers(encoded.held_out_features)


def numbers(features: Any) -> set[int]:
    assert isinstance(features, Tensor)
    return set(((features[:, 0].double() + 1) / 2 * BOUNDS).round().long().tolist())


def law_nobody_is_on_both_sides(folder: Path) -> None:
    for users in (False, True):
        train, held_out = sides(folder, 1, users=users)
        assert not train & held_out
        assert train | held_out == set(range(ROWS))
        if users:
            assert not {row % 50 for row in train} & {row % 50 for row in held_out}


def law_the_coins_of_a_split_are_secret(folder: Path) -> None:
    """They are of the run's key and nothing else: a third of two splits is shared by chance (rule 17)."""
    for users in (False, True):
        held_out = [sides(folder, seed, users=users)[1] for seed in (1, 1, 2, 3)]
        assert held_out[0] == held_out[1]
        assert len({frozenset(rows) for rows in held_out}) == 3
    shares = [len(sides(folder, seed)[1]) / ROWS for seed in range(8)]
    assert len(set(shares)) > 1  # coins: how many they hold out is random
    assert abs(np.mean(shares) - 0.3) < 5 * (0.3 * 0.7 / ROWS / 8) ** 0.5


def law_other_records_move_nobody(folder: Path) -> None:
    _, held_out = sides(folder, 1)
    _, with_others = sides(folder, 1, rows=ROWS + 20)
    assert {row for row in with_others if row < ROWS} == held_out


LAWS = {name: law for name, law in vars().items() if name.startswith("law_")}


@pytest.mark.parametrize("name", LAWS)
def test_law(name: str, tmp_path: Path) -> None:
    LAWS[name](tmp_path)


def by_a_permutation(n: int, share: float, coins: Any, users: Any = None) -> Any:
    if users is not None:
        return split_by_coins(n, share, coins, users)
    order = np.argsort(coins)
    return np.sort(order[round(share * n) :]), np.sort(order[: round(share * n)])


def by_public_coins(n: int, share: float, coins: Any, users: Any = None) -> Any:
    return split_by_coins(n, share, np.random.default_rng(0).random(len(coins)), users)


def users_torn_apart(n: int, share: float, coins: Any, users: Any = None) -> Any:
    return split_by_coins(
        n, share, np.resize(coins, n) if users is None else np.modf(np.arange(n) * 0.37)[0]
    )


def trains_on_all(n: int, share: float, coins: Any, users: Any = None) -> Any:
    return np.arange(n), split_by_coins(n, share, coins, users)[1]


PLANTS: dict[str, tuple[Any, Callable[[Path], None]]] = {
    "17 a permutation": (by_a_permutation, law_other_records_move_nobody),
    "17 a permutation of fixed size": (by_a_permutation, law_the_coins_of_a_split_are_secret),
    "17 public coins": (by_public_coins, law_the_coins_of_a_split_are_secret),
    "17 a user on both sides": (users_torn_apart, law_nobody_is_on_both_sides),
    "17 held-out records are trained on": (trains_on_all, law_nobody_is_on_both_sides),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_noticed(
    plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug, law = PLANTS[plant]
    monkeypatch.setattr(sources, "split_by_coins", bug)
    with pytest.raises((AssertionError, DpisError)):
        law(tmp_path)
