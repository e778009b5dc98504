"""`dpis.train` in a process group: one model, one ledger, whatever the number of processes and whoever dies."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import dpis
from dpis.errors import LedgerError
from dpis.randomness import Key
from dpis.training.progress import Silent
from tests.ranks import on_ranks, outcomes_on_ranks

from .toys import (
    Crash,
    N,
    assert_verifies,
    crash_at,
    fit,
    ledger,
    linear,
    mlp,
    points,
    released,
)

CLIPPING = {"clip_ceiling": 2.0, "clip_lowest": 0.1}
USERS = [i // 3 for i in range(N)]
RUNS: dict[str, dict[str, Any]] = {
    "dpis": {"ema": 0.9, "held_out": points(10), "kappa": 0.5},
    "adaptive": {"method": "dpis-adaptive", "optimizer": "adam", **CLIPPING},
    "count": {"method": "dpis-adaptive", "release_n": True},
    "users": {"user_ids": USERS, "max_rows_per_user": 3, "n_public": 22, "batch_size": 8},
    "uniform": {"method": "dp-sgd-decay", "decay_rate": 0.1},
}


def in_double(data: TensorDataset) -> TensorDataset:
    """Sums of any ranks then round alike, but for the last bits."""
    inputs, targets = data.tensors
    return TensorDataset(inputs.double(), targets)


def _fit(rank: int, folder: Path, runs: list[str]) -> dict[str, Any]:
    """On every rank another model to begin with: that of rank 0 counts."""
    seen = {}
    for name in runs:
        settings = dict(RUNS[name])
        if "held_out" in settings:
            settings["held_out"] = in_double(settings["held_out"])
        model = mlp(seed=1 + rank).double()
        result = fit(folder / name, model, in_double(points()), diagnostics=True, **settings)
        seen[name] = weights_of(model), result
    return seen


def weights_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_ranks_train_what_one_process_trains(ranks: int, tmp_path: Path) -> None:
    names = ["dpis", "adaptive", "uniform"] if ranks == 2 else list(RUNS)
    alone = _fit(0, tmp_path / "alone", names)
    seen = on_ranks(ranks, _fit, tmp_path / "ranks", names)
    for name in names:
        weights, result = alone[name]
        of_ranks = [one[name] for one in seen]
        assert all(torch.equal(own, of_ranks[0][0]) for own, _ in of_ranks)
        torch.testing.assert_close(of_ranks[0][0], weights, rtol=0, atol=1e-12)
        for _, told in of_ranks:
            assert told.claim == result.claim
            assert told.metrics == pytest.approx(result.metrics)
            assert told.diagnostics == result.diagnostics, "the same records were looked at"
        one, several = (ledger(tmp_path / kind / name) for kind in ("alone", "ranks"))
        assert several.entries == one.entries
        assert several.header == one.header
        assert set(released(tmp_path / "ranks" / name)) == set(released(tmp_path / "alone" / name))
        assert_verifies(tmp_path / "ranks" / name)


# ── going on ─────────────────────────────────────────────────────────────────────────────────────────


def _crash(rank: int, folder: Path, step: int) -> None:
    fit(folder, mlp(dropout=0.3), epochs=3, progress=crash_at(step))


def _go_on(rank: int, folder: Path) -> None:
    fit(folder, mlp(dropout=0.3), epochs=3, resume=True)


def _whole(rank: int, folder: Path) -> None:
    fit(folder, mlp(dropout=0.3), epochs=3)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_any_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    """On as many as before, bit for bit, dropout included."""
    outcomes = outcomes_on_ranks(before, _crash, tmp_path / "run", 6, seconds=20)
    assert not any(ok for ok, _ in outcomes)
    assert (tmp_path / "run" / "checkpoint.secret").exists()
    on_ranks(after, _go_on, tmp_path / "run")
    assert_verifies(tmp_path / "run")
    on_ranks(before, _whole, tmp_path / "whole")
    one, other = released(tmp_path / "run"), released(tmp_path / "whole")
    assert one["ledger.jsonl"].splitlines()[:-1] == other["ledger.jsonl"].splitlines()[:-1]
    if before == after:
        assert one == other


def _purposes(rank: int, folder: Path, dropout: float, resume: bool) -> list[str]:
    """Of the noise of all steps."""
    seen, real = list[str](), Key.normals

    def normals(self: Key, purpose: str, step: int, count: int) -> Any:
        seen.append(purpose)
        return real(self, purpose, step, count)

    Key.normals = normals  # type: ignore[method-assign]
    try:
        progress: Any = Silent() if resume else crash_at(6)
        fit(folder, mlp(dropout=dropout), epochs=3, resume=resume, progress=progress)
    except Crash:
        os._exit(0)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "moved"), [(0.0, False), (0.3, True)])
def test_noise_moves_with_masks(tmp_path: Path, dropout: float, moved: bool) -> None:
    outcomes_on_ranks(2, _purposes, tmp_path / "run", dropout, False, seconds=20)
    purposes = set(on_ranks(1, _purposes, tmp_path / "run", dropout, True)[0])
    assert purposes == ({"noise:1@4"} if moved else {"noise"})
    assert_verifies(tmp_path / "run")


def _with_other_data(rank: int, folder: Path) -> None:
    fit(folder, mlp(dropout=0.3), points(seed=rank), epochs=3)


def _with_other_options(rank: int, folder: Path) -> None:
    fit(folder, epochs=2 + rank)


def _with_another_length(rank: int, folder: Path) -> None:
    fit(folder, dataset=points(60 + rank))


@pytest.mark.slow
def test_ranks_that_would_train_something_else_are_refused(tmp_path: Path) -> None:
    for wrong, words in (
        (_with_other_data, "rank 1 has another than rank 0: the data and their order"),
        (_with_other_options, "options and number of records"),
        (_with_another_length, "options and number of records"),
    ):
        outcomes = outcomes_on_ranks(2, wrong, tmp_path / wrong.__name__)
        assert all(not ok and words in told for ok, told in outcomes), outcomes
        assert not (tmp_path / wrong.__name__).exists(), "nothing half-written stays"


class Fails(torch.nn.Module):
    """On one rank, after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._runs = linear(), [0]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.distributed.get_rank() == 1:
            self._runs[0] += 1
            if self._runs[0] > 40:
                raise ValueError("the sensor is unplugged")
        return self.linear(inputs)


def _fails(rank: int, folder: Path) -> None:
    fit(folder, Fails(), epochs=9)


@pytest.mark.slow
def test_a_rank_that_raises_stops_all(tmp_path: Path) -> None:
    (_, first), (_, second) = outcomes_on_ranks(2, _fails, tmp_path / "run", seconds=30)
    assert "RankError: rank 1 stopped: ValueError: the sensor is unplugged." in first
    assert second.startswith("ValueError")
    assert (tmp_path / "run" / "checkpoint.secret").exists()


# ── killed ───────────────────────────────────────────────────────────────────────────────────────────

KILLS = 20
SLOW_DISK = 0.004


def _on_a_slow_disk(rank: int, folder: Path, resume: bool) -> None:
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(SLOW_DISK), fsync(file))[1]  # type: ignore[assignment]
    fit(folder, mlp(dropout=0.3), epochs=4, resume=resume, ema=0.9, **CLIPPING)


@pytest.mark.slow
def test_a_rank_killed_at_any_moment(tmp_path: Path) -> None:
    """What is left is a run that ends as the unbroken one does, and claims no less than it released."""
    began = time.monotonic()
    on_ranks(2, _on_a_slow_disk, tmp_path / "whole", False)
    seconds = time.monotonic() - began
    whole, chance = released(tmp_path / "whole"), random.Random(20221107)
    broken = 0
    for number in range(KILLS):
        folder = tmp_path / f"run-{number}"
        kill = chance.randrange(2), chance.uniform(0.2, 1.0) * seconds
        checkpoint = folder / "checkpoint.secret"
        outcomes = outcomes_on_ranks(2, _on_a_slow_disk, folder, False, seconds=30, kill=kill)
        if not all(ok for ok, _ in outcomes):
            broken += 1
            on_ranks(2, _on_a_slow_disk, folder, checkpoint.exists())
        assert released(folder) == whole, f"killed {kill}, it ended differently"
    assert broken >= KILLS // 3, "most kills are to fall into the run"


def test_two_processes_agree_that_they_are_two(tmp_path: Path) -> None:
    """The group of `dpis.train` is torch's own."""
    sizes = on_ranks(2, _size)
    assert sizes == [2, 2]


def _size(rank: int) -> int:
    from dpis.group import current_group

    assert dpis.train is not None
    return current_group().size


# ── who stops between two words ──────────────────────────────────────────────────────────────────────


def _loses_its_terminal(rank: int, folder: Path) -> None:
    fit(folder, mlp(), progress=crash_at(2))


def _steps_fail(rank: int, folder: Path) -> None:
    def broken(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(_fails_on_rank_1)
        return optimizer

    fit(folder, mlp(), optimizer=broken)


def _fails_on_rank_1(*_: object) -> None:
    if torch.distributed.get_rank() == 1:
        raise OSError("no space left")


def _does_not_see_the_folder(rank: int, folder: Path) -> None:
    if rank == 1:
        seen = Path.is_dir
        Path.is_dir = lambda path: ".parts-" not in path.name and seen(path)  # type: ignore[method-assign,assignment]
    fit(folder, mlp())


@pytest.mark.parametrize(
    ("train", "rank", "cause"),
    [
        (_loses_its_terminal, 0, ""),
        (_steps_fail, 1, "no space left"),
        (_does_not_see_the_folder, 1, "does not see"),
    ],
    ids=["reporter", "optimizer", "storage"],
)
def test_a_failure_of_one_rank_is_told_by_the_other(
    train: Any, rank: int, cause: str, tmp_path: Path
) -> None:
    told = [words for _, words in outcomes_on_ranks(2, train, tmp_path / "run", seconds=20)]
    assert cause in told[rank]
    assert f"rank {rank} stopped: " in told[1 - rank]
    assert cause in told[1 - rank]


def _adapts(rank: int, folder: Path, **more: Any) -> None:
    fit(folder, mlp(dropout=0.3), epochs=3, **RUNS["adaptive"], **more)


def _adapts_and_crashes(rank: int, folder: Path) -> None:
    _adapts(rank, folder, progress=crash_at(6))


def test_a_norm_sum_under_other_masks_does_not_show_beside_the_first(tmp_path: Path) -> None:
    """It has the same noise: what it came to must not be read from an error."""
    outcomes_on_ranks(2, _adapts_and_crashes, tmp_path / "run")
    with pytest.raises(LedgerError, match="as many processes as it had") as refused:
        _adapts(0, tmp_path / "run", resume=True)
    numbers = [part for part in str(refused.value).split() if "." in part.rstrip(".")]
    assert not numbers
