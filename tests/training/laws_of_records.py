"""What the rows of drawn records must satisfy on their way to the model. Every law raises where it is broken.

They are run on the real code and on broken code by `test_broken_on_purpose`. There are more records than are fetched
at once, so that whatever is done part by part shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpis.errors import CouplingError
from dpis.randomness import Key
from dpis.sampling import Shards
from dpis.training.data_fingerprint import DataFingerprint
from dpis.training.records import RECORDS_AT_ONCE, ROWS_AT_ONCE, Records

N = 2 * RECORDS_AT_ONCE + 30
KEY = Key.from_seed(3)
EVERYBODY = np.arange(N, dtype=np.int64)


class Items(Dataset[Any]):
    """Item i holds i, and a number drawn when it is fetched."""

    def __init__(self, count: int = N) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(place), torch.rand((), dtype=torch.float64)


def augmented(batch: Any, generator: torch.Generator) -> Any:
    numbers, rest = batch
    return numbers, rest + torch.rand(len(rest), dtype=torch.float64, generator=generator)


def drawn(records: Records, step: int, who: np.ndarray = EVERYBODY) -> list[Tensor]:
    """The tensors of all rows of these records."""
    parts = [rows.batch for rows in records.drawn(who, KEY, step)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def law_rows_come_in_the_order_of_their_records() -> None:
    """Norms and weights go by place (rule 12): a drawn record's row stands where the record stands."""
    plain = TensorDataset(torch.arange(N), torch.zeros(N))
    who = np.flatnonzero(KEY.stream("some", 0).uniforms(N) < 0.9)
    assert len(who) > RECORDS_AT_ONCE
    for dataset in (plain, Items()):
        for some in (who, who[:0], who[:1]):
            found = drawn(Records(dataset), 0, some)[0].tolist() if len(some) else []
            assert found == some.tolist()
        every = [rows.batch[0] for rows in Records(dataset).all(KEY, 1)]
        assert torch.cat(every).tolist() == list(range(N))


def law_a_full_pass_comes_in_the_order_of_the_records() -> None:
    """Also where it takes several parts."""
    count = ROWS_AT_ONCE + 9
    plain = TensorDataset(torch.arange(count))
    every = [rows.batch[0] for rows in Records(plain).all(KEY, 1)]
    assert len(every) > 1
    assert torch.cat(every).tolist() == list(range(count))


def law_what_is_random_about_a_row_is_of_its_step_and_place() -> None:
    """Items and augmentations: no number serves two steps, or two parts of a draw (rule 23)."""
    for records in (
        Records(Items()),
        Records(TensorDataset(torch.arange(N), torch.zeros(N)), augment=augmented),
    ):
        numbers = [drawn(records, step)[1] for step in (0, 1)]
        assert len(torch.cat(numbers).unique()) == 2 * N
        assert torch.equal(drawn(records, 1)[1], numbers[1])  # done again, it is the same


def law_a_users_rows_are_drawn_anew() -> None:
    """In every step and every full pass, for each user by itself: two choices of four agree in a quarter."""
    users = np.repeat(np.arange(N), 4)
    rows = TensorDataset(torch.arange(4 * N))
    records = Records(rows, user_ids=users, max_rows_per_user=1)

    def chosen(parts: Any) -> Tensor:
        found = torch.cat([part.batch[0] for part in parts])
        assert torch.equal(found // 4, torch.arange(N))  # of the user's own
        return found % 4

    steps = [chosen(records.drawn(EVERYBODY, KEY, step)) for step in (0, 1)]
    passes = [chosen(records.all(KEY, epoch)) for epoch in (1, 2)]
    half = RECORDS_AT_ONCE
    for one, other in (
        steps,
        passes,
        (steps[0], passes[0]),
        (steps[0][:half], steps[0][half : 2 * half]),
    ):
        share = float((one == other).double().mean())
        assert abs(share - 0.25) < 5 * (0.25 * 0.75 / len(one)) ** 0.5
    for choice in (*steps, *passes):
        counts = torch.bincount(choice, minlength=4) / N
        assert (counts - 0.25).abs().max() < 5 * (0.25 * 0.75 / N) ** 0.5


def law_a_fingerprint_sees_every_row() -> None:
    """Other data behind the first part, or other labels, are other data (rule 21)."""
    count = ROWS_AT_ONCE + 9
    items = [i for part in Records(Items(count)).raw_items(KEY, np.arange(count)) for i in part]
    assert [int(number) for number, _ in items] == list(range(count))
    inputs, labels = torch.arange(5), torch.arange(5) % 2

    def text(*columns: torch.Tensor) -> str:
        records = Records(TensorDataset(*columns))
        seen = DataFingerprint(records, KEY, Shards.whole(len(records)))
        return seen.combined(seen.own_digests())

    assert text(inputs, labels) == text(inputs.clone(), labels)
    for other in (
        text(inputs, 1 - labels),
        text(inputs.flip(0), labels),
        text(inputs[:4], labels[:4]),
    ):
        assert other != text(inputs, labels)


def law_the_rows_of_a_user_are_neighbours_and_filled_up() -> None:
    """With views and copies: which rows count is said in the order in which they come."""
    views = torch.arange(12).reshape(6, 2)
    users = [0, 0, 0, 1, 2, 2]
    records = Records(
        TensorDataset(views, torch.arange(6)),
        user_ids=users,
        max_rows_per_user=2,
        views=2,
        augment=lambda batch, generator: batch,
        augmentations=2,
    )
    for part in (*records.drawn(np.arange(3), KEY, 0), *records.all(KEY, 1)):
        values, numbers = (column.reshape(3, 2, 2, 2) for column in part.batch)
        present = part.present.reshape(3, 2, 2, 2)
        assert torch.equal(values // 2, numbers)  # a view goes with its own row
        assert (values[..., 0] == values[..., 1]).all()  # copies are neighbours
        assert torch.equal(values[:, :, :, 0] % 2, torch.arange(2).expand(3, 2, 2))
        assert torch.equal(
            torch.tensor(users)[numbers], torch.arange(3)[:, None, None, None].expand(3, 2, 2, 2)
        )
        assert present.sum((1, 2, 3)).tolist() == [8, 4, 8]
        assert present[1, 0].all()  # user 1 has one row, and it is the first
        for user in (0, 2):
            assert len(numbers[user].unique()) == 2  # no row twice


# ── what is tried out now and then ───────────────────────────────────────────────────────────────────


def refused(records: Records, step: int, who: np.ndarray) -> bool:
    """Whether a draw of these shows that records couple."""
    try:
        list(records.drawn(who, KEY, step))
    except CouplingError:
        return True
    return False


def law_augmentation_is_looked_at_again() -> None:
    """What begins to mix rows after a while is refused, later (rule 9)."""
    mixing = [False]

    def augment(batch: Any, _: torch.Generator) -> Any:
        numbers, rest = batch
        return numbers, rest + rest.mean() if mixing[0] else rest

    records = Records(TensorDataset(torch.arange(N), torch.rand(N)), augment=augment)
    assert not any(refused(records, step, EVERYBODY[:6]) for step in range(3))
    mixing[0] = True
    assert any(refused(records, step, EVERYBODY[:6]) for step in range(3, 9))


def collated(items: list[float], mixing: list[bool]) -> Records:
    def collate(some: list[float]) -> tuple[Tensor]:
        column = torch.tensor(some, dtype=torch.float64)
        return (column + column.mean(),) if mixing[0] else (column,)

    return Records(items, collate_fn=collate)  # type: ignore[arg-type]


def law_collation_is_looked_at_again() -> None:
    """The same for a collate function."""
    mixing = [False]
    records = collated([float(number) for number in range(20)], mixing)
    assert not any(refused(records, step, EVERYBODY[:6]) for step in range(3))
    mixing[0] = True
    assert any(refused(records, step, EVERYBODY[:6]) for step in range(3, 9))


def law_a_batch_in_which_nothing_shows_is_no_look() -> None:
    """Of equal items nothing shows: then the next batch is asked, whichever that is."""
    records = collated([1.0] * 10 + [float(number) for number in range(10)], [True])
    assert not any(refused(records, step, EVERYBODY[:5]) for step in range(2))
    assert refused(records, 2, EVERYBODY[10:15])


class AtOnce(list[float]):
    """Items fetched at once: one of them takes something of another."""

    def __init__(self, taker: int, giver: int) -> None:
        super().__init__(float(number) for number in range(20))
        self._taker, self._giver = taker, giver

    def __getitems__(self, places: list[int]) -> list[float]:
        items = [self[place] for place in places]
        items[self._taker] += items[self._giver]
        return items


def law_items_fetched_at_once_are_made_by_themselves() -> None:
    """Whoever takes from whomever after it."""
    for taker, giver in ((0, 1), (0, 3), (1, 3), (2, 3)):
        assert refused(Records(AtOnce(taker, giver)), 0, EVERYBODY[4:8])  # type: ignore[arg-type]
