"""Several processes tell each other what they know, and stop together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dpis.errors import InputError
from dpis.group import Alone, current_group
from tests.ranks import on_ranks, outcomes_on_ranks


def _tell(rank: int) -> dict[str, Any]:
    group = current_group()
    slices = torch.arange(6.0).reshape(3, 2) + 10 * rank
    shared = torch.full((2,), float(rank))
    group.share(shared)
    with group.together():
        made = 7
    return {
        "gathered": group.gathered(f"of {rank}"),
        "first": group.from_first(lambda: f"made by {rank}"),
        "any": (group.any(rank == 2), group.any(False)),
        "exchanged": group.exchanged(slices).tolist(),
        "collected": group.collected(torch.full((2,), float(rank))).tolist(),
        "shared": shared.tolist(),
        "made": made,
        "leads": group.leads,
    }


def test_what_ranks_tell_each_other() -> None:
    for rank, told in enumerate(on_ranks(3, _tell)):
        assert told["gathered"] == ["of 0", "of 1", "of 2"]
        assert told["first"] == "made by 0"
        assert told["any"] == (True, False)
        assert told["exchanged"] == [
            [2.0 * rank + 10 * r, 2.0 * rank + 1 + 10 * r] for r in range(3)
        ]
        assert told["collected"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        assert told["shared"] == [0.0, 0.0]
        assert told["leads"] == (rank == 0)


def _fails_on_one(rank: int) -> None:
    with current_group().together():
        if rank == 1:
            raise InputError("the loss is not finite")


def _rank_0_fails(rank: int) -> None:
    def make() -> None:
        raise OSError("no space left")

    current_group().from_first(make)


def _dies(rank: int) -> None:
    group = current_group()
    group.gathered(rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.gathered(rank)


def _stays_away(rank: int) -> None:
    group = current_group()
    group.gathered(rank)
    if rank == 1:
        time.sleep(8)
        return
    group.gathered(rank)


def test_one_failure_stops_all_with_rank_and_cause() -> None:
    own, *others = [told for _, told in outcomes_on_ranks(3, _fails_on_one)][1::-1]
    assert own.startswith("InputError: the loss is not finite")
    assert all("rank 1 stopped: the loss is not finite." in told for told in others)


def test_a_failure_of_rank_0_is_told_by_all() -> None:
    first, second = (told for _, told in outcomes_on_ranks(2, _rank_0_fails))
    assert first.startswith("OSError")
    assert "rank 0 stopped: OSError: no space left." in second


def test_a_rank_that_dies_stops_the_others() -> None:
    begun = time.monotonic()
    first, second = (told for _, told in outcomes_on_ranks(2, _dies, seconds=40))
    assert "another process is gone" in first
    assert second == "died"
    assert time.monotonic() - begun < 30


def _fails_where_others_gather(rank: int) -> None:
    group = current_group()
    with group.stopping():
        if rank == 1:
            raise InputError("the loss is not finite")
        group.gathered(rank)


def test_a_failure_is_heard_wherever_others_wait() -> None:
    first, _ = (told for _, told in outcomes_on_ranks(2, _fails_where_others_gather))
    assert "rank 1 stopped: the loss is not finite." in first


def _finds(rank: int, folder: str) -> list[str]:
    def leave() -> list[str]:
        found = sorted(path.name for path in Path(folder).iterdir())
        (Path(folder) / str(rank)).touch()
        return found

    return current_group().after_first(leave)


def test_the_others_find_what_the_first_left(tmp_path: Path) -> None:
    first, second = on_ranks(2, _finds, str(tmp_path))
    assert (first, second) == ([], ["0"])


def _steps_by_other_terms(rank: int) -> None:
    current_group().hear(5, terms=rank)


def test_a_step_is_taken_by_the_same_terms_on_every_rank() -> None:
    for _, told in outcomes_on_ranks(2, _steps_by_other_terms):
        assert "different noise multipliers or clip norms" in told


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_so_long() -> None:
    first, _ = (told for _, told in outcomes_on_ranks(2, _stays_away, seconds=3))
    assert "waited in vain" in first
    assert "timeout=" in first


def _holds_another(rank: int) -> None:
    current_group().require_same(rank // 2, "model")


def test_what_differs_is_refused_on_every_rank() -> None:
    for _, told in outcomes_on_ranks(3, _holds_another):
        assert "rank 2 has another than rank 0: model" in told


def test_one_process_needs_nobody() -> None:
    group = current_group()
    assert isinstance(group, Alone)
    assert group.gathered(3) == [3]
    assert group.from_first(lambda: 4) == 4
    group.require_same(object(), "thing")


def test_processes_that_are_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"not connected.*init_process_group"):
        current_group()


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_process_by_the_environment(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert isinstance(current_group(), Alone)
