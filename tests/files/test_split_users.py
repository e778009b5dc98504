"""Coins that split, and rows that speak for a user: against slow oracles, and by frequency."""

import itertools
import math
import uuid
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.files.split import split_by_coins
from dpis.files.users import choose_rows, group_by_user

COIN = st.floats(0, 1, exclude_max=True)
USERS = st.lists(st.integers(0, 4), min_size=1, max_size=20)


@settings(deadline=None)
@given(coins=st.lists(COIN, max_size=12), share=st.floats(0, 1), data=st.data())
def test_every_record_has_its_own_coin(
    coins: list[float], share: float, data: st.DataObject
) -> None:
    train, held = split_by_coins(len(coins), share, np.array(coins))
    assert held.tolist() == [i for i, coin in enumerate(coins) if coin < share]
    assert sorted([*train, *held]) == list(range(len(coins)))
    more = np.array([*coins, data.draw(COIN)])
    assert set(held) <= set(split_by_coins(len(more), share, more)[1])  # another record moves none


@settings(deadline=None)
@given(users=USERS, share=st.floats(0, 1), data=st.data())
def test_users_are_never_torn_apart(users: list[int], share: float, data: st.DataObject) -> None:
    order = list(dict.fromkeys(users))
    coins = np.array(data.draw(st.lists(COIN, min_size=len(order), max_size=len(order))))
    train, held = split_by_coins(len(users), share, coins, np.array(users))
    side = dict(zip(order, coins < share, strict=True))
    assert held.tolist() == [i for i, user in enumerate(users) if side[user]]
    assert sorted([*train, *held]) == list(range(len(users)))


def test_splits_that_are_refused() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="share held out"):
            split_by_coins(2, share, np.zeros(2))
    with pytest.raises(InputError, match="3 coins are needed, one a row"):
        split_by_coins(3, 0.5, np.zeros(2))
    with pytest.raises(InputError, match="1 coins are needed, one a user"):
        split_by_coins(3, 0.5, np.zeros(3), np.array([1, 1, 1]))
    with pytest.raises(InputError, match="user ids must be one a row"):
        split_by_coins(3, 0.5, np.zeros(1), np.array([1, 1]))


@settings(deadline=None)
@given(users=USERS, as_text=st.booleans())
def test_users_are_numbered_by_first_appearance(users: list[int], as_text: bool) -> None:
    index = group_by_user(np.array([f"u{u}" for u in users] if as_text else users))
    order = list(dict.fromkeys(users))
    assert len(index) == len(order)
    for number, user in enumerate(order):
        assert index.rows_of(number).tolist() == [i for i, u in enumerate(users) if u == user]
    assert index.counts.tolist() == [users.count(user) for user in order]


def slow_choice(rows: list[int], max_rows: int, coins: list[float]) -> tuple[list[int], list[bool]]:
    """Floyd's algorithm as in the book, for one user."""
    if len(rows) <= max_rows:
        fill = max_rows - len(rows)
        return rows + rows[:1] * fill, [True] * len(rows) + [False] * fill
    chosen: set[int] = set()
    for coin, last in zip(coins, range(len(rows) - max_rows, len(rows)), strict=True):
        pick = int(coin * (last + 1))
        chosen.add(last if pick in chosen else pick)
    return [rows[place] for place in sorted(chosen)], [True] * max_rows


@settings(deadline=None, max_examples=150)
@given(users=USERS, max_rows=st.integers(1, 6), data=st.data())
def test_chosen_rows_agree_with_the_slow_way(
    users: list[int], max_rows: int, data: st.DataObject
) -> None:
    index = group_by_user(np.array(users))
    drawn = data.draw(st.lists(st.integers(0, len(index) - 1), max_size=6))
    coins = data.draw(
        st.lists(
            st.lists(COIN, min_size=max_rows, max_size=max_rows),
            min_size=len(drawn),
            max_size=len(drawn),
        )
    )
    uniforms = np.array(coins, dtype=np.float64).reshape(len(drawn), max_rows)
    rows, present = choose_rows(index, np.array(drawn, dtype=np.int64), max_rows, uniforms)
    assert rows.shape == present.shape == (len(drawn), max_rows)
    for i, user in enumerate(drawn):
        expected = slow_choice(index.rows_of(user).tolist(), max_rows, coins[i])
        assert (rows[i].tolist(), present[i].tolist()) == expected


def test_all_subsets_are_equally_likely() -> None:
    """10 subsets of 2 rows out of 5, 20,000 draws: chi-square with 9 degrees above 40 has probability 8e-6."""
    index = group_by_user(np.zeros(5, dtype=np.int64))
    draws = 20_000
    coins = np.random.default_rng(11).random((draws, 2))
    rows, _ = choose_rows(index, np.zeros(draws, dtype=np.int64), 2, coins)
    counts = Counter(map(tuple, rows.tolist()))
    assert set(counts) == set(itertools.combinations(range(5), 2))
    assert sum((n - draws / 10) ** 2 / (draws / 10) for n in counts.values()) < 40


def test_choices_that_are_refused() -> None:
    index, one = group_by_user(np.array([1, 1])), np.zeros(1, dtype=np.int64)
    with pytest.raises(InputError, match="max_rows"):
        choose_rows(index, one, 0, np.zeros((1, 0)))
    with pytest.raises(InputError, match="coins must have the shape"):
        choose_rows(index, one, 2, np.zeros(2))
    for bad in (1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="coins must lie"):
            choose_rows(index, one, 1, np.full((1, 1), bad))
    with pytest.raises(InputError, match="one a row"):
        group_by_user(np.zeros((2, 2)))


class ComparedByIdentity:
    """One user's rows would be those of several."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize(
    ("user_ids", "problem"),
    [
        ([1.0, math.nan, 2.0, math.nan], "have no user, found nan"),
        (np.array([1.0, np.nan]), "have no user"),
        ([torch.tensor(1.0), torch.tensor(math.nan)], "have no user"),
        (np.array(["2020-01-01", "NaT"], dtype="M8[D]"), "have no user"),
        (np.ma.MaskedArray([1, 2], mask=[False, True]), "have no user, found None"),
        (["a", None, "b"], "have no user"),
        (np.array(["a", "", "b"]), "have no user, found ''"),
        (np.array(["a", np.nan], dtype=object), "have no user"),
        ([b"a", b" "], "have no user"),
        ([1, "1"], "of one type"),
        (np.array(["a", None, None], dtype=str), "have no user, found 'None'"),
        (["a", " NONE "], "have no user"),
        (np.array(["2020-01-01", "NaT"], dtype="M8[ns]"), "have no user, found None"),
        ([("a", 1), (None, 1)], "have no user"),
        ([("a", 1), ()], "have no user"),
        ([Decimal("7"), Decimal("-NaN")], "have no user"),
        ([Decimal("7"), Decimal("sNaN")], "have no user"),
        ([Decimal("7"), Decimal("inf")], "have no user"),
        (
            np.ma.MaskedArray(
                np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"), mask=[False, True]
            ),
            "have no user",
        ),
        ({0: "a", 1: "a", 2: "b"}, "in the order of the rows, found dict"),
        ({"a", "b"}, "found set"),
        ("aab", "found str"),
        (iter([1, 1, 2]), "found list_iterator"),
        ([True, True, False], "whole numbers or text"),
        (["1.23457E+12", "1.23457E+12"], "whole numbers or text"),
        (np.array([1, 1.0], dtype=object), "whole numbers or text"),
        ((1.5, 1.5, 2.0), "whole numbers or text"),
        (np.array([16777216, 16777217], dtype=np.float32), "whole numbers or text"),
        (torch.tensor([1.0, 2.0]), "whole numbers or text"),
        ([ComparedByIdentity(1), ComparedByIdentity(1)], "ComparedByIdentity"),
        ([("a", ComparedByIdentity(1))], "ComparedByIdentity"),
        ([torch.tensor([1, 2]), torch.tensor([1, 2])], "whole numbers or text"),
        (np.array([[1], [2]]), "one a row"),
        ([[1], [2]], "whole numbers or text"),
    ],
)
def test_ids_that_do_not_tell_users_apart_are_refused(user_ids, problem):
    """Rows without a user would be pooled: without one of their owners, the record of the others would change."""
    with pytest.raises(InputError, match=problem):
        group_by_user(user_ids)


def objects(*values):
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


@pytest.mark.parametrize(
    "user_ids",
    [
        [5, 5, 6],
        ["a", "a", "b"],
        [torch.tensor(3), torch.tensor(3), torch.tensor(1)],
        np.array(["2020-01-01", "2020-01-01", "2021-01-01"], dtype="M8[D]"),
        torch.tensor([3, 3, 1]),
        [2**63, 2**63, 2**63 + 1],
        [b"\xff\xfe", b"\xff\xfe", b"\xfd"],
        objects("x", np.str_("x"), "x\0"),
        objects(1, np.int64(1), 2),
        objects(("a", 1), ("a", 1), ("a", 2)),
        objects(Decimal("7"), Decimal("7.0"), Decimal("8")),
        [uuid.UUID(int=1), uuid.UUID(int=1), uuid.UUID(int=2)],
    ],
    ids=repr,
)
def test_users_are_told_apart_by_equality(user_ids):
    assert group_by_user(user_ids).counts.tolist() == [2, 1]
