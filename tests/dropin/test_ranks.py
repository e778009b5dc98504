"""A loop of one's own on several processes: bare or wrapped, it is the loop of one process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dpis
from dpis import BatchMemoryManager
from dpis.distributed import DifferentiallyPrivateDistributedDataParallel
from dpis.errors import InputError
from tests.ranks import on_ranks, outcomes_on_ranks

from .loops import BATCH, Loop, data, mlp, private

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "ddp": DistributedDataParallel,
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
}


def _trained(rank: int, wrapper: str, parts: bool = False, **options: Any) -> dict[str, Any]:
    """Two epochs: what was drawn here, what came out, what was spent."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop = private(WRAPPERS[wrapper](_begun_alone(rank)), **options)
    drawn = list[list[int]]()
    for _ in range(2):
        drawn += _epoch(loop, rank, parts)
    return {
        "drawn": drawn,
        "weights": loop.weights,
        "events": loop.engine.accountant.history,
        "epsilon": loop.engine.get_epsilon(1e-3),
        "length": len(loop.loader),
        "said": [str(one.message) for one in said],
    }


def _begun_alone(rank: int) -> nn.Module:
    """Every process begins elsewhere: the model of rank 0 is that of all."""
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


def _epoch(loop: Loop, rank: int, parts: bool = False) -> list[list[int]]:
    drawn = []
    if parts:
        with BatchMemoryManager(
            data_loader=loop.loader, max_physical_batch_size=1 + rank, optimizer=loop.optimizer
        ) as smaller:
            for inputs, targets in smaller:
                loop.step(inputs, targets)
        return []
    for inputs, targets in loop.loader:
        (waiting, _), *_ = loop.session.mechanism._outstanding
        drawn.append(waiting.indices.tolist())
        assert len(inputs) == len(drawn[-1])
        loop.step(inputs, targets)
    return drawn


@pytest.mark.parametrize(
    ("size", "wrapper"),
    [
        (2, "ddp"),
        pytest.param(2, "bare", marks=pytest.mark.slow),
        pytest.param(4, "dpddp", marks=pytest.mark.slow),
    ],
)
def test_wrapped_or_bare_it_is_the_loop_of_one_process(size: int, wrapper: str) -> None:
    alone, ranks = _trained(0, "bare"), on_ranks(size, _trained, wrapper)
    for one in ranks:
        assert torch.equal(one["weights"], ranks[0]["weights"])
        assert one["events"] == alone["events"]
        assert one["epsilon"] == alone["epsilon"]
        assert one["length"] == alone["length"]
    steps = zip(*(one["drawn"] for one in ranks), strict=True)
    assert [sorted(chain.from_iterable(parts)) for parts in steps] == alone["drawn"]
    torch.testing.assert_close(ranks[0]["weights"], alone["weights"], rtol=0, atol=1e-12)
    expected = f"a step expects {BATCH} records over all {size} processes, {BATCH // size} on each"
    assert [expected in text for text in ranks[0]["said"]] == [True]
    assert all(not one["said"] for one in ranks[1:])


@pytest.mark.slow
def test_parts_differ_from_rank_to_rank() -> None:
    whole, parts = on_ranks(2, _trained, "bare"), on_ranks(2, _trained, "bare", True)
    torch.testing.assert_close(parts[1]["weights"], whole[0]["weights"], rtol=0, atol=1e-12)
    assert torch.equal(parts[0]["weights"], parts[1]["weights"])


def _rarely(rank: int) -> tuple[int, torch.Tensor]:
    loop = private(loader={"batch_size": 1})
    empty = 0
    for inputs, targets in loop.loader:
        empty += not len(inputs)
        loop.step(inputs, targets)
    return empty, loop.weights


@pytest.mark.slow
def test_empty_local_batches_are_steps() -> None:
    (empty, one), (_, other) = on_ranks(2, _rarely)
    assert empty > 3
    assert torch.equal(one, other)
    torch.testing.assert_close(one, _rarely(0)[1], rtol=0, atol=1e-12)


def _with_distributed_sampler(rank: int, replicas: int) -> tuple[int, list[str]]:
    sampler = DistributedSampler(data(), num_replicas=replicas, rank=rank % replicas)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop = private(loader={"batch_size": 4, "sampler": sampler})
    loop.train()
    return loop.optimizer.expected_batch_size, [str(one.message) for one in said]


@pytest.mark.slow
def test_a_distributed_sampler_is_replaced_and_its_batch_size_is_each_process_s() -> None:
    (size, said), (other, unsaid) = on_ranks(2, _with_distributed_sampler, 2)
    assert size == other == 8
    assert "DistributedSampler is replaced by private draws: a step expects 8" in said[0]
    assert not unsaid
    for _, told in outcomes_on_ranks(2, _with_distributed_sampler, 3):
        assert "made for 3 processes, and 2 train" in told


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────


def _saves(rank: int, place: str) -> torch.Tensor:
    loop = private().train()
    loop.engine.save_checkpoint(path=place, module=loop.model, optimizer=loop.optimizer)
    return loop.train().weights


def _goes_on(rank: int, place: str) -> tuple[torch.Tensor, int]:
    loop = private()
    loop.engine.load_checkpoint(path=place, module=loop.model, optimizer=loop.optimizer)
    loop.train()
    return loop.weights, len(loop.engine.accountant)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_as_many_processes_as_one_likes(tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    unbroken = on_ranks(2, _saves, place)[0]
    for weights, events in on_ranks(2, _goes_on, place):
        assert torch.equal(weights, unbroken)
        assert events == 10
    for size in (1, 4):
        ranks = on_ranks(size, _goes_on, place) if size > 1 else [_goes_on(0, place)]
        torch.testing.assert_close(ranks[-1][0], unbroken, rtol=0, atol=1e-12)
    assert {oct(p.stat().st_mode & 0o777) for p in tmp_path.iterdir()} == {"0o600", "0o700"}


def _saves_on_rank_0(rank: int, place: str) -> None:
    loop = private().train()
    if rank == 0:
        loop.engine.save_checkpoint(path=place, module=loop.model)
    loop.train()


@pytest.mark.slow
def test_a_checkpoint_on_rank_0_alone_is_told_within_a_minute(tmp_path: Path) -> None:
    (ok, told), _ = outcomes_on_ranks(2, _saves_on_rank_0, str(tmp_path / "kept"), seconds=100)
    assert not ok
    assert "save_checkpoint must be called on every rank" in told
    assert not list(tmp_path.iterdir())


# ── misuse ───────────────────────────────────────────────────────────────────────────────────────────


def _leaves_early(rank: int) -> None:
    private().train(steps=3 if rank == 1 else None).train()


def _other_records(rank: int) -> None:
    private(dataset=TensorDataset(*data(40 - rank).tensors))


def _other_seed(rank: int) -> None:
    private(seed=rank)


def _other_model(rank: int) -> None:
    private(nn.Linear(4, 3 + rank).double())


def _other_noise(rank: int) -> None:
    loop = private()
    if rank == 1:
        loop.optimizer.noise_multiplier = 0.5
    loop.train()


def _freezes(rank: int) -> None:
    model = mlp()
    for parameter in model[2 * rank].parameters() if rank else ():
        parameter.requires_grad_(False)
    private(model, optimizer=lambda _: torch.optim.SGD(_trained_of(model), lr=0.1)).train()


def _trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _learns_faster(rank: int) -> None:
    private(optimizer=lambda p: torch.optim.SGD(p, lr=0.1 * (1 + rank))).train(epochs=2)


def _skips_a_batch(rank: int) -> None:
    loop = private()
    for number, (inputs, targets) in enumerate(loop.loader):
        if not (rank == 1 and number == 2):
            loop.step(inputs, targets)


def _bad_options(rank: int) -> None:
    private(max_grad_norm=1.0 if rank == 0 else -1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misuse", "told_by_0"),
    [
        (_leaves_early, "different places"),
        (_other_records, "rank 1 has another than rank 0: arguments and dataset"),
        (_other_seed, "rank 1 has another than rank 0: seed"),
        (_other_model, "rank 1 has another than rank 0: model"),
        (_other_noise, "different noise multipliers"),
        (_learns_faster, "rank 1 has another than rank 0: weights"),
        (_freezes, "rank 1 has another than rank 0: weights"),
        (_skips_a_batch, "rank 1 stopped: the next batch was taken before"),
        (_bad_options, "rank 1 stopped: "),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_ranks_do_otherwise_stops_all_of_them(
    misuse: Callable[[int], None], told_by_0: str
) -> None:
    outcomes = outcomes_on_ranks(2, misuse, seconds=40)
    assert not any(ok for ok, _ in outcomes)
    assert told_by_0 in outcomes[0][1], outcomes[0][1]


RAISES = """
import os, sys, torch, torch.distributed as dist
from torch.nn import functional
from tests.dropin.loops import private
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
loop = private()
for number, (inputs, targets) in enumerate(loop.loader):
    if number == 2 and dist.get_rank() == 1:
        raise ArithmeticError("for a try")
    loop.step(inputs, targets)
"""


@pytest.mark.slow
def test_a_loop_that_raises_stops_the_others_with_rank_and_cause(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RAISES, str(tmp_path / "group")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    first, second = (rank.communicate(timeout=120)[1] for rank in ranks)
    assert "RankError: rank 1 stopped: ArithmeticError: for a try." in first
    assert second.rstrip().endswith("ArithmeticError: for a try")


def test_an_environment_of_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"not connected.*Nothing was released"):
        private()
    folder = tmp_path / "run"
    with pytest.raises(InputError, match="init_process_group"):
        dpis.train(
            nn.Linear(4, 3).double(), data(), nn.CrossEntropyLoss(), n_public=40, batch_size=8,
            delta=1e-3, epochs=1, out=folder,
        )  # fmt: skip
    assert not folder.exists()


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_process_is_one_process(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert private().train(steps=1).weights.isfinite().all()


def _connects_late(rank: int, store: str) -> None:
    torch.distributed.destroy_process_group()
    loop = private()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    loop.train()


def test_processes_that_connect_after_they_were_made_private_are_refused(tmp_path: Path) -> None:
    for _, told in outcomes_on_ranks(2, _connects_late, str(tmp_path / "store"), seconds=20):
        assert "2 processes are connected, and there were 1" in told
