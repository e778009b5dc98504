"""What was delivered, told from what was not: by its contents, also where memory seems to be the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dpis.dropin.delivered import Delivered

BATCH = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))


class Wrapped(Tensor):
    """A tensor around another, as masked and quantised ones are: without memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:  # type: ignore[misc]
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = (a.inner if isinstance(a, cls) else a for a in args)
        result = function(*plain, **(kwargs or {}))
        return cls(result) if isinstance(result, Tensor) and result.ndim else result


def contradicts(delivered: Tensor, given: Tensor, start: int = 0) -> bool:
    return Delivered.of([delivered], len(delivered), 0).contradicts([given], start)


@pytest.mark.parametrize("given", [BATCH, BATCH.detach(), BATCH.clone(), BATCH[1:4], BATCH[5:]])
def test_what_was_delivered_is_known_again(given: Tensor):
    start = given.storage_offset() // 3
    assert not contradicts(BATCH, given, start)


@pytest.mark.parametrize(
    "given",
    [BATCH.flip(0), torch._neg_view(BATCH), BATCH[:1].expand(5, 3), BATCH + 1],
    ids=["other order", "negative", "one for all", "others"],
)
def test_what_was_not_is_told(given: Tensor):
    assert contradicts(BATCH, given)


def test_a_conjugate_in_the_same_memory_is_told():
    waves = torch.complex(BATCH, BATCH)
    assert contradicts(waves, waves.conj())


def test_tensors_without_memory_of_their_own_are_compared():
    assert not contradicts(Wrapped(BATCH), Wrapped(BATCH.clone()))
    assert contradicts(Wrapped(BATCH), Wrapped(BATCH + 1))


def test_a_change_in_place_shows():
    batch = BATCH.clone()
    delivered = Delivered.of([batch], 5, 0)
    batch[0] = 0
    assert delivered.contradicts([batch], 0)
