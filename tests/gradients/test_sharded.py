"""A model sharded over two processes has the per-example gradients of the same model in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpis.gradients.record_gradients import RecordGradients
from tests.gradients.sharded_models import (
    CASES,
    Case,
    Sharded,
    built,
    case,
    inverse,
    no_warnings,
    relative,
    sharded,
)
from tests.ranks import on_ranks

CUTS = (4, 0, 11, 1)
"""So many of eleven records are rank 0's: some chunks more here than there, and no record on one rank or the other."""
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}


def errors_of(rank: int, names: list[str], dtypes: list[torch.dtype]) -> dict[Any, Any]:
    """Of norms and of sums, by model, type and cut."""
    found = {}
    for name in names:
        for dtype in dtypes:
            with no_warnings():
                found |= {(name, dtype, cut): e for cut, e in _errors(rank, case(name), dtype)}
    return found


def _errors(rank: int, own: Case, dtype: torch.dtype) -> Any:
    mine = Sharded(RecordGradients(sharded(own, dtype), nn.CrossEntropyLoss(), chunk=3))
    whole = RecordGradients(built(own, dtype), nn.CrossEntropyLoss(), chunk=3)
    for cut in CUTS:
        torch.manual_seed(cut)
        batch = own.rows(11, dtype)
        right = whole(batch, inverse)
        here = slice(0, cut) if rank == 0 else slice(cut, None)
        norms, sums = mine.of(tuple(tensor[here] for tensor in batch))
        yield cut, (relative(norms, right.norms[here]), mine.error(sums, right.sums))


@pytest.mark.parametrize("names", [[c.id for c in CASES]], ids=["all"])
def test_norms_and_sums_are_those_of_one_process(names: list[str]) -> None:
    for found in on_ranks(2, errors_of, names, list(EXACT)):
        for (name, dtype, cut), (norms, sums) in found.items():
            assert norms < EXACT[dtype], (name, dtype, cut, norms)
            assert sums < EXACT[dtype], (name, dtype, cut, sums)
