"""Every model runs with every engine that is said to run it, and all of them clip to the same sum."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts that import each other

from engines import CLIP_NORM, ENGINES, UnsupportedError, attempted, norm, prepared
from workloads import WORKLOADS, Batch, Task

RECORDS = 3

REFUSED = {
    ("gpt2", "opacus ghost"): "tied weights",
    ("lstm", "opake"): "no vmap",
    ("imdb-lstm", "opake"): "no vmap",
}
"""Peers that cannot run a model, and what its cell says."""

OTHER_FUNCTION = {("encoder", engine) for engine in ENGINES if engine.startswith("opacus")}
"""Opacus's attention with ``batch_first`` computes another function of the same weights."""


def clipped_sum(task: Task, batch: Batch, clip_norm: float) -> list[Tensor]:
    """Record by record, with plain autograd."""
    model = copy.deepcopy(task.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for record in range(RECORDS):
        inputs, targets = (part[record : record + 1] for part in batch)
        own = torch.autograd.grad(task.loss(model(inputs), targets), parameters)
        weight = min(1.0, clip_norm / norm(own))
        total = [sum_ + weight * value for sum_, value in zip(total, own, strict=True)]
    return total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "engine", ["sgd", "dpis", *(pytest.param(peer, marks=pytest.mark.slow) for peer in ENGINES[2:])]
)
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_engine_takes_both_kinds_of_steps(name: str, engine: str) -> None:
    if engine == "opake" and importlib.util.find_spec("opake") is None:
        pytest.skip("comes with the extra `bench`")
    torch.manual_seed(0)
    task = WORKLOADS[name].make(**WORKLOADS[name].tiny)
    batch = task.batch(RECORDS)
    if (name, engine) in REFUSED:
        with pytest.raises(UnsupportedError) as caught:
            attempted(prepared(engine, "gradients", task, batch))
        assert caught.value.short == REFUSED[name, engine]
        return
    found = norm(prepared(engine, "gradients", task, batch)())
    if engine == "sgd":
        expected = norm(clipped_sum(task, batch, torch.inf)) / RECORDS
    else:
        expected = norm(clipped_sum(task, batch, CLIP_NORM))
    same = found == pytest.approx(expected, rel=1e-4)
    assert same == ((name, engine) not in OTHER_FUNCTION)
    prepared(engine, "step", task, batch)()
