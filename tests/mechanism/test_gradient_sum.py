"""Sums of gradients: the precision they are kept in, and how much memory their release takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpis import noise
from dpis.mechanism.gradient_sum import GradientSum
from dpis.randomness import TILE, Key
from dpis.sampling import Draw

from .systems import Small, config

NOBODY = Draw(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64))
ONE = torch.ones(1, dtype=torch.float64)


def summed(parameter: Tensor, *parts: Tensor) -> Tensor:
    total = GradientSum(NOBODY, {"w": parameter})
    for part in parts:
        total.add(ONE, [("w", part)])
    assert total.records == len(parts)
    return total.take()["w"]


def test_a_single_part_is_kept_as_it_came() -> None:
    for dtype in (torch.float32, torch.float64):
        part = torch.ones(3, dtype=dtype)
        assert summed(torch.zeros(3), part) is part


def test_parts_are_added_in_float64() -> None:
    """Parts of one record after a part of very many: in float32 they would be lost."""
    parts = [torch.tensor([value]) for value in (2.0**25, *[1.0] * 16)]
    assert float(summed(torch.zeros(1), *parts)) == 2.0**25 + 16


def test_nothing_is_zero_and_half_precision_is_not_enough() -> None:
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        parameter = torch.ones(2, dtype=dtype, requires_grad=True)
        nothing = summed(parameter)
        assert (nothing.dtype, nothing.tolist(), nothing.requires_grad) == (kept, [0.0, 0.0], False)
        assert summed(parameter, torch.ones(2, dtype=dtype)).dtype == kept


def test_what_was_taken_is_gone() -> None:
    total = GradientSum(NOBODY, {"w": torch.zeros(1)})
    total.add(ONE, [("w", torch.ones(1))])
    assert [float(total.take()["w"]) for _ in range(2)] == [1.0, 0.0]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


class LargestAllocation(TorchDispatchMode):
    """How many bytes the largest tensor has that an operation made anew."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is_tensor(t)
        }
        for made in filter(_is_tensor, tree_leaves(result)):
            if made.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


WIDTH = 20 * TILE


def largest_of_a_release(parts: int) -> int:
    """Beside the gradients of one parameter of 20 tiles, in float32."""
    system = Small(config(), torch.zeros(5, 1), Key.from_seed(1))
    system.begin()
    mechanism, parameter = system.mechanism, torch.zeros(WIDTH)
    draw = mechanism.draw()
    total = mechanism.start_sum(draw, {"w": parameter})
    for own in torch.zeros(len(draw), dtype=torch.float64).tensor_split(parts):
        total.add(own, [("w", torch.ones(WIDTH))])
    with LargestAllocation() as made:
        update = mechanism.release_sum(total)
    assert update["w"].dtype == torch.float32
    assert len(update["w"].unique()) > WIDTH / 2
    return made.bytes


def test_a_release_makes_tiles_beside_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part: nothing larger than two tiles in float64. Several: their sum in float32 takes its place."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # others are not watched
    assert largest_of_a_release(parts=1) == 2 * 8 * TILE
    assert largest_of_a_release(parts=2) == 4 * WIDTH
    monkeypatch.setattr(noise, "TILE", WIDTH)  # a vector of noise for the whole parameter
    monkeypatch.setattr("dpis.randomness.TILE", WIDTH)
    monkeypatch.setattr("dpis.randomness._ZEROS", memoryview(bytes(8 * WIDTH)))
    assert largest_of_a_release(parts=1) == 2 * 8 * WIDTH
