"""Writes to a model, past autograd's versions: small tensors by a copy, large ones by a digest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpis.coupling import writes
from dpis.coupling.writes import SMALL, ModelState, digest, unwritten
from dpis.errors import CouplingError
from tests.mechanism.test_gradient_sum import LargestAllocation

SIZES = {"small": 3, "large": SMALL // 4 + 3}
either = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


class Holder(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(size))
        self.frozen = nn.Parameter(torch.randn(size), requires_grad=False)
        self.register_buffer("kept", torch.randn(size))


def the_last_bit(value: Tensor) -> None:
    bits = value.view(torch.int32)
    bits[len(bits) // 2] ^= 1


def two_exchanged(value: Tensor) -> None:
    value[[0, 1]] = value[[1, 0]]


def one_step_up(value: Tensor) -> None:
    value[-1] = torch.nextafter(value[-1], torch.tensor(9.0))


WRITES = [the_last_bit, two_exchanged, one_step_up]


@either
@pytest.mark.parametrize("name", ["trained", "frozen", "kept"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_past_versions_is_seen(
    write: Callable[[Tensor], None], name: str, size: int
) -> None:
    model = Holder(size)
    with unwritten(model):
        pass
    with pytest.raises(CouplingError, match=f"wrote to '{name}'"), unwritten(model):
        write(getattr(model, name).data)


@either
def test_frozen_parameters_go_by_version_between_looks(size: int) -> None:
    model = Holder(size)
    with unwritten(model, closely=False):
        the_last_bit(model.frozen.data)
    with pytest.raises(CouplingError, match="frozen"), unwritten(model, closely=False):
        model.frozen[0] += 1
    for name in ("trained", "kept"):
        with pytest.raises(CouplingError, match=name), unwritten(model, closely=False):
            the_last_bit(getattr(model, name).data)


@either
def test_an_equal_value_in_another_place_is_no_write(size: int) -> None:
    model = Holder(size)
    model.kept[1] = torch.nan
    with unwritten(model):
        model.kept = model.kept.clone()


@either
@pytest.mark.parametrize("name", ["trained", "frozen"])
def test_freezing_and_its_reverse_are_seen(name: str, size: int) -> None:
    model = Holder(size)
    parameter = model.get_parameter(name)
    with pytest.raises(CouplingError, match=name), unwritten(model):
        parameter.requires_grad_(not parameter.requires_grad)


@either
def test_another_shape_and_another_set_are_seen(size: int) -> None:
    model = Holder(size)
    with pytest.raises(CouplingError, match="kept"), unwritten(model):
        model.kept = model.kept[None]
    with pytest.raises(CouplingError, match="trained"), unwritten(model):
        del model.trained
    with pytest.raises(CouplingError, match="more"), unwritten(model):
        model.register_buffer("more", torch.zeros(1))


def test_types_that_numpy_does_not_know_and_odd_layouts() -> None:
    large = torch.randn(300, 200)
    for value in (large.bfloat16(), large.mT, large.expand(2, -1, -1), large > 0, large[:, ::2]):
        assert digest(value) == digest(value.clone())
        other = value.clone(memory_format=torch.contiguous_format)
        other.view(-1)[7] = not other.view(-1)[7]
        assert digest(value) != digest(other)


@pytest.mark.parametrize("at_once", [1 << 10, 100_001])
def test_a_digest_of_several_parts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(100, 400)
    whole = digest(value)
    monkeypatch.setattr(writes, "_AT_ONCE", at_once)
    parts = digest(value)
    assert len(parts) == 1 + -(-value.nbytes // at_once) > len(whole)
    value[99, 399] += 1
    assert digest(value)[:-1] == parts[:-1]
    assert digest(value)[-1] != parts[-1]


@pytest.mark.parametrize("size", [1, 2047, 2048, 100_000])
@pytest.mark.parametrize("write", [the_last_bit, one_step_up])
def test_what_is_done_elsewhere_than_on_the_cpu(write: Callable[[Tensor], None], size: int) -> None:
    value = torch.randn(size)
    before = writes._column_sums(value)
    assert torch.equal(writes._column_sums(value.clone()), before)
    write(value)
    assert not torch.equal(writes._column_sums(value), before)


def test_no_model_is_held_twice() -> None:
    model = Holder(1_000_000)
    with LargestAllocation() as made:
        ModelState(model, closely=True).check_unwritten()
    assert made.bytes <= SMALL
