"""A model sharded by ``fully_shard`` takes the steps of the whole one: in a loop, and in `dpis.train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from dpis import BatchMemoryManager, PrivacyEngine
from tests.ranks import on_ranks, outcomes_on_ranks
from tests.training.toys import assert_verifies, crash_at, fit, released

RECORDS, BATCH = 90, 4
"""So few that some ranks draw nobody."""


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def model(how: str) -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()
    if how == "fsdp":
        for layer in (net[0], net[3], net[5]):
            fully_shard(layer)
        fully_shard(net)
    return net


def made_private(how: str) -> tuple[PrivacyEngine, nn.Module, Any, Any, Any]:
    net = model(how)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    engine = PrivacyEngine()
    parts = engine.make_private_with_epsilon(
        module=net, optimizer=optimizer, data_loader=DataLoader(records(), batch_size=BATCH),
        target_epsilon=3.0, target_delta=1e-4, epochs=2, max_grad_norm=0.5, n_public=RECORDS, seed=4,
        headroom=2.0, kappa=0.7,
    )  # fmt: skip
    return engine, net, *parts


def train(private: Any, optimizer: Any, loader: Any, most: int | None) -> list[int]:
    def taken(batches: Any) -> list[int]:
        sizes = []
        for inputs, targets in batches:
            sizes.append(len(inputs))
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(inputs), targets).backward()
            optimizer.step()
        return sizes

    if most is None:
        return taken(loader)
    settings = {"data_loader": loader, "max_physical_batch_size": most, "optimizer": optimizer}
    with BatchMemoryManager(**settings) as parts:
        return taken(parts)


def weights_of(net: nn.Module) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in whole])


def _two_epochs(rank: int, how: str, folder: Path | None = None, most: int | None = None) -> Any:
    warnings.simplefilter("ignore")
    engine, net, private, optimizer, loader = made_private(how)
    sizes = train(private, optimizer, loader, most)
    if folder is not None:
        engine.save_checkpoint(path=folder / "c.pt", module=private, optimizer=optimizer)
    train(private, optimizer, loader, most)
    return weights_of(net), sizes, engine.get_epsilon(1e-4), dict(engine.accountant.journal.events)


def _second_epoch(rank: int, how: str, folder: Path) -> Tensor:
    warnings.simplefilter("ignore")
    engine, net, private, optimizer, loader = made_private(how)
    engine.load_checkpoint(path=folder / "c.pt", module=private, optimizer=optimizer)
    train(private, optimizer, loader, None)
    return weights_of(net)


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sharded_model_takes_the_steps_of_the_whole_one(ranks: int, most: int | None) -> None:
    """With ranks that draw nobody, and with unequal numbers of physical batches."""
    alone = _two_epochs(0, "bare")
    seen = on_ranks(ranks, _two_epochs, "fsdp", None, most)
    if most is None:
        assert [sum(step) for step in zip(*(s for _, s, *_ in seen), strict=True)] == alone[1]
        assert ranks == 2 or any(0 in sizes for _, sizes, *_ in seen)
    else:
        assert len({len(sizes) for _, sizes, *_ in seen}) == 1, "equally many parts on all ranks"
    for weights, _, epsilon, events in seen:
        torch.testing.assert_close(weights, alone[0], rtol=0, atol=1e-12)
        assert (epsilon, events) == alone[2:]


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = on_ranks(2, _two_epochs, "fsdp", tmp_path)[0][0]
    for ranks in (2, 3):
        for weights in on_ranks(ranks, _second_epoch, "fsdp", tmp_path):
            torch.testing.assert_close(weights, whole, rtol=0, atol=1e-12)


def _sharded_backwards(rank: int) -> None:
    net = nn.Linear(6, 4)
    fully_shard(net, mesh=DeviceMesh("cpu", [1, 0]))
    PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(records(), batch_size=BATCH), max_grad_norm=0.5, n_public=RECORDS,
    )  # fmt: skip


def test_ranks_in_another_order_are_refused() -> None:
    for _, told in outcomes_on_ranks(2, _sharded_backwards, seconds=20):
        assert "in the order of their ranks" in told


def _unequal_passes(rank: int) -> None:
    """Rank 1 leaves the model out where it drew nobody."""
    warnings.simplefilter("ignore")
    _, _, private, optimizer, loader = made_private("fsdp")
    for inputs, targets in loader:
        if len(inputs):
            nn.functional.cross_entropy(private(inputs), targets).backward()
        optimizer.step()


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_pass_is_told(tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(3, _unequal_passes, seconds=20)
    assert not any(ok for ok, _ in outcomes)
    assert any("different places" in told for _, told in outcomes)


# ── dpis.train ───────────────────────────────────────────────────────────────────────────────────────

SETTINGS: dict[str, Any] = {
    "n_public": RECORDS,
    "batch_size": BATCH,
    "epochs": 2,
    "held_out": records(),
    "ema": 0.9,
    "optimizer": "adam",
}


def _fit(rank: int, how: str, folder: Path, more: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    net = model(how)
    result = fit(folder, net, records(), **SETTINGS, **more)
    return weights_of(net), result.metrics


def _crash(rank: int, how: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    fit(folder, model(how), records(), **SETTINGS, progress=crash_at(30))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"method": "dpis-adaptive"}], ids=["dpis", "adaptive"])
def test_train_has_the_model_and_ledger_of_one_process(tmp_path: Path, more: Any) -> None:
    weights, metrics = _fit(0, "bare", tmp_path / "alone", more)
    for own, told in on_ranks(2, _fit, "fsdp", tmp_path / "ranks", more):
        torch.testing.assert_close(own, weights, rtol=0, atol=1e-12)
        assert told == pytest.approx(metrics)
    one, other = released(tmp_path / "alone"), released(tmp_path / "ranks")
    assert one["ledger.jsonl"].splitlines()[1:-1] == other["ledger.jsonl"].splitlines()[1:-1]
    assert_verifies(tmp_path / "ranks")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_train_goes_on_on_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    assert not any(
        ok for ok, _ in outcomes_on_ranks(2, _crash, "fsdp", tmp_path / "run", seconds=20)
    )
    on_ranks(ranks, _fit, "fsdp", tmp_path / "run", {"resume": True})
    on_ranks(2, _fit, "fsdp", tmp_path / "whole", {})
    one, other = released(tmp_path / "run"), released(tmp_path / "whole")
    assert one["ledger.jsonl"].splitlines()[:-1] == other["ledger.jsonl"].splitlines()[:-1]
    assert_verifies(tmp_path / "run")
    if ranks == 2:
        assert one == other
