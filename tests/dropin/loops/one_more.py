"""The law of everything that a loop may do: a record adds its own contribution, whoever else is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from dpis.mechanism import noisy_update

from . import Loop, private

MOST = 16
"""As many are planned for; all that there are, are drawn."""

Step = Callable[..., None]
"""``step(loop, *batch)``: everything between two batches."""


def summed(
    step: Step, model: Callable[[], nn.Module], dataset: Dataset[Any], **options: Any
) -> Tensor:
    """What the first step adds up, before its noise."""
    seen, real = list[Tensor](), noisy_update.add_noise

    def add_noise(values: dict[str, Tensor], *given: Any) -> dict[str, Tensor]:
        seen.append(torch.cat([value.double().flatten() for value in values.values()]))
        return real(values, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noisy_update, "add_noise", add_noise)
        everybody = {"method": "dp-sgd", "n_public": MOST, "loader": {"batch_size": MOST}}
        loop: Loop = private(model(), dataset, **{**everybody, **options})
        for batch in loop.loader:
            step(loop, *batch) if isinstance(batch, list | tuple) else step(loop, batch)
            break
    return seen[0]


def moved_by_one_more(
    step: Step, model: Callable[[], nn.Module], dataset: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """How far the last record moves the sum; and the sum of that record alone."""
    last = len(dataset) - 1
    whole, fewer, alone = (
        summed(step, model, Subset(dataset, list(records)), **options)
        for records in (range(last + 1), range(last), range(last, last + 1))
    )
    return whole - fewer, alone


def assert_adds_its_own(
    step: Step, model: Callable[[], nn.Module], dataset: Any, **options: Any
) -> None:
    """The last record moves the sum by its contribution, which is of norm one at most, and moves nobody else."""
    moved, alone = moved_by_one_more(step, model, dataset, **options)
    assert 0.01 < alone.norm() <= 1.001
    torch.testing.assert_close(moved, alone, rtol=1e-3, atol=1e-4)
