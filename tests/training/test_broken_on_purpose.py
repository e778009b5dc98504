"""For the way of records to the model: plant the bug, and a law must fail.

The laws hold for the real code, which is tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpis import batches
from dpis import generators as chance
from dpis.coupling import items as fetching
from dpis.coupling.differences import differ
from dpis.coupling.items import CollateProbe
from dpis.coupling.looks import Looks
from dpis.errors import CouplingError, DpisError
from dpis.files import users as users_module
from dpis.mechanism import secret_state
from dpis.randomness import Key, Stream
from dpis.training import records as module
from dpis.training import run as run_module
from dpis.training import trainer as trainer_module
from dpis.training.records import Records
from dpis.training.result import Result
from tests.runs import test_checkpoint

from . import laws_of_records as laws
from . import test_methods, test_unseeded

LAWS = {name: law for name, law in vars(laws).items() if name.startswith("law_")}


@pytest.mark.parametrize("name", LAWS)
def test_law(name: str) -> None:
    LAWS[name]()


# ── the bugs ─────────────────────────────────────────────────────────────────────────────────────────

LOOK, STREAM, DRAWN, ALL, RAW, ROWS_OF = (
    CollateProbe.look,
    Key.stream,
    Records.drawn,
    Records.all,
    Records.raw_items,
    Records._rows_of,
)


def one_stream(purpose_of: str) -> Callable[..., Any]:
    """All steps have the randomness of the first, for this purpose."""

    def stream(self: Key, purpose: str, step: int) -> Any:
        return STREAM(self, purpose, 0 if purpose.startswith(purpose_of) else step)

    return stream


def one_stream_a_step(purpose_of: str) -> Callable[..., Any]:
    """All parts of a draw have the randomness of the first, for this purpose."""

    def stream(self: Key, purpose: str, step: int) -> Any:
        return STREAM(self, purpose_of if purpose.startswith(purpose_of) else purpose, step)

    return stream


def later_parts_are_turned_around(
    self: Records, records: Any, key: Key, step: int
) -> Iterator[Any]:
    first, rest = records[: module.RECORDS_AT_ONCE], records[module.RECORDS_AT_ONCE :]
    yield from DRAWN(self, np.concatenate([first, rest[::-1]]), key, step)


def full_pass_turned_around(self: Records, key: Key, epoch: int) -> Iterator[Any]:
    for number, rows in enumerate(ALL(self, key, epoch)):
        turned = batches.apply(lambda tensor: tensor.flip(0), rows.batch) if number else rows.batch
        yield module.Rows(turned, rows.present)


def rows_for_a_first_look(self: Records, key: Key, places: Any) -> Iterator[Any]:
    yield next(iter(RAW(self, key, places)))


def every_row_counts(self: Records, *given: Any) -> Any:
    rows, present = ROWS_OF(self, *given)
    return rows, None if present is None else torch.ones_like(present)


def presence_in_another_order(self: Records, present: Any) -> Any:
    return None if present is None else present.repeat(1, self.views * self.augmentations)


def copies_in_turns(self: Records, batch: Any) -> Any:
    def turns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(self.augmentations, *[1] * (tensor.ndim - 1))

    return batches.apply(turns, batch)


def first_rows(counts: Any, uniforms: Any) -> Any:
    return np.broadcast_to(np.arange(uniforms.shape[1]), uniforms.shape)


def one_row_for_all_places(counts: Any, uniforms: Any) -> Any:
    return np.zeros(uniforms.shape, dtype=np.int64)


def looks_once(self: Looks) -> bool:
    return self._owed or self.occasions <= 1


def content_with_a_look(self: CollateProbe, *given: Any) -> None:
    LOOK(self, *given)
    self._looks.showed(True)


def one_for_all(self: Any, place: int, secret: bytes) -> Any:
    with chance.seeded_generators(Stream(secret)):
        return self._make(place)


def exchanges_the_last(self: Any, places: list[int], items: Any, chance: Any) -> None:
    others = self._fetch([*places[:-1], places[0]])
    if any(differ(a, b) for a, b in zip(items[:-1], others[:-1], strict=True)):
        raise CouplingError("mixes")


def compares_the_first(self: Any, places: list[int], items: Any, chance: Any) -> None:
    if differ(items[0], self._fetch(places[:1] * len(places))[0]):
        raise CouplingError("mixes")


# ── and who notices ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plant:
    """A bug: what is replaced by what, and the law that has to notice."""

    rule: str
    target: Any
    name: str
    bug: Any
    law: Callable[..., None]

    def __str__(self) -> str:
        return self.rule


ANEW, OF_ITS_STEP = (
    laws.law_a_users_rows_are_drawn_anew,
    laws.law_what_is_random_about_a_row_is_of_its_step_and_place,
)
NEIGHBOURS = laws.law_the_rows_of_a_user_are_neighbours_and_filled_up
PLANTS = [
    Plant("12 later parts of a draw are turned around", Records, "drawn", later_parts_are_turned_around,
          laws.law_rows_come_in_the_order_of_their_records),
    Plant("12 later parts of a full pass are turned around", Records, "all", full_pass_turned_around,
          laws.law_a_full_pass_comes_in_the_order_of_the_records),
    Plant("21 a fingerprint of the first rows", Records, "raw_items", rows_for_a_first_look,
          laws.law_a_fingerprint_sees_every_row),
    Plant("23 augmentation: the same in all steps", Key, "stream", one_stream("augment"), OF_ITS_STEP),
    Plant("23 augmentation: the same in all parts", Key, "stream", one_stream_a_step("augment"), OF_ITS_STEP),
    Plant("23 items: the same in all steps", Key, "stream", one_stream("items"), OF_ITS_STEP),
    Plant("23 items: the same for all", chance.ItemChance, "_item", one_for_all, OF_ITS_STEP),
    Plant("users: the same rows in all steps", Key, "stream", one_stream("rows"), ANEW),
    Plant("users: the same coins in all parts", Key, "stream", one_stream_a_step("rows"), ANEW),
    Plant("users: the same rows in all full passes", Key, "stream", one_stream("all-rows"), ANEW),
    Plant("users: always the first rows", users_module, "_subsets", first_rows, ANEW),
    Plant("users: a row twice", users_module, "_subsets", one_row_for_all_places, NEIGHBOURS),
    Plant("users: rows that fill up count", Records, "_rows_of", every_row_counts, NEIGHBOURS),
    Plant("users: the wrong copies count", Records, "_repeated_presence", presence_in_another_order, NEIGHBOURS),
    Plant("9 augmentation is looked at once", Looks, "now", property(looks_once),
          laws.law_augmentation_is_looked_at_again),
    Plant("9 collation is looked at once", Looks, "now", property(looks_once),
          laws.law_collation_is_looked_at_again),
    Plant("9 a look that showed nothing will do", CollateProbe, "look", content_with_a_look,
          laws.law_a_batch_in_which_nothing_shows_is_no_look),
    Plant("9 items: only the last is exchanged", fetching.FetchProbe, "look", exchanges_the_last,
          laws.law_items_fetched_at_once_are_made_by_themselves),
    Plant("9 items: only the first is compared", fetching.FetchProbe, "look", compares_the_first,
          laws.law_items_fetched_at_once_are_made_by_themselves),
    Plant("copies in turns", Records, "_repeated", copies_in_turns, NEIGHBOURS),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_bug_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant.target, plant.name, plant.bug)
    with pytest.raises((AssertionError, DpisError)):
        plant.law()


# ── runs and their folders ───────────────────────────────────────────────────────────────────────────


def claims_what_was_spent(*, claim: Any, summary: Any, **given: Any) -> Result:
    """A run that stopped early says that it cost less."""
    if summary.stopped_early:
        claim = replace(claim, epsilon=0.9 * claim.epsilon)
    return Result(claim=claim, summary=summary, **given)


class FreshAtEveryStart(Key):
    """What was saved is asked for and not used, unless a seed was given."""

    def __init__(self, secret: bytes, seed: int | None = None) -> None:
        super().__init__(secret if seed is not None else bytes(reversed(secret)), seed)


def trusts_pickle(content: Any, **_: Any) -> Any:
    return torch.load(content, map_location="cpu", weights_only=False)


def resumes_with_its_key(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_unseeded.test_an_unseeded_run_goes_on_with_its_own_key(folder, patch, "dpis", 6)


def runs_nothing(folder: Path) -> None:
    test_checkpoint.test_nothing_in_a_checkpoint_is_run(folder, test_checkpoint._saved_by_torch)


PLANTS_IN_FOLDERS: dict[str, tuple[Any, str, Any, Callable[[Path], None]]] = {
    "the claim of a run that stopped early is what it spent": (
        trainer_module, "Result", claims_what_was_spent,
        test_methods.law_the_claim_is_the_plans_wherever_a_run_stops,
    ),
    "18 21 a run without a seed goes on with another key": (
        run_module, "Key", FreshAtEveryStart, resumes_with_its_key,
    ),
    "27 a checkpoint is unpickled": (
        secret_state, "torch", SimpleNamespace(load=trusts_pickle, save=torch.save), runs_nothing,
    ),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS_IN_FOLDERS)
def test_a_planted_bug_of_runs_is_noticed(
    plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, name, bug, law = PLANTS_IN_FOLDERS[plant]
    monkeypatch.setattr(target, name, bug)
    with pytest.raises((AssertionError, DpisError, pytest.fail.Exception)):
        law(tmp_path)
