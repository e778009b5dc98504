"""Opacus's own per-layer cases (its tests ship with it), run through our engine and compared.

`pytest -m slow tests/gradients/test_opacus_cases.py` runs it; without Opacus it is skipped.
"""

from __future__ import annotations

import copy
import importlib
import unittest
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from dpis.gradients import RecordGradients

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus")
    from opacus.grad_sample import GradSampleModule
    from opacus.layers import DPGRU, DPLSTM, DPRNN
    from opacus.tests.grad_samples.common import GradSampleHooks_test

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MODULES = [
    *("conv1d", "conv2d", "conv3d", "linear", "embedding", "embedding_bag", "sequence_bias"),
    *(
        "group_norm",
        "instance_norm1d",
        "instance_norm2d",
        "instance_norm3d",
        "layer_norm",
        "rms_norm",
    ),
    *("dp_multihead_attention", "dp_rnn"),
]


def row_losses(output: Any, batch_dim: int) -> Tensor:
    """A loss that depends on every output: half its square, row by row."""
    if isinstance(output, PackedSequence):
        output, _ = pad_packed_sequence(output, batch_first=True)
        batch_dim = 0
    output = output[0] if isinstance(output, tuple) else output
    return output.movedim(batch_dim, 0).flatten(1).square().sum(1) / 2


def rows_first(x: Any, batch_first: bool) -> tuple[tuple[Tensor, ...], Any]:
    """The case's input as a batch of ours, and the function that turns it back."""
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        dim = 0 if batch_first else 1

        def pack(values: Tensor, lengths: Tensor) -> PackedSequence:
            ordered = values if dim == 0 else values.transpose(0, 1)
            return pack_padded_sequence(ordered, lengths, batch_first, enforce_sorted=False)

        return (padded, lengths), pack
    inputs = tuple(x) if isinstance(x, list | tuple) else (x,)
    if [value.ndim for value in inputs] == [1, 1]:  # bags end to end, and where each begins
        return bags_first(*inputs)
    if batch_first:
        return inputs, lambda *values: values if len(values) > 1 else values[0]
    turned = tuple(value.transpose(0, 1).contiguous() for value in inputs)

    def back(*values: Tensor) -> Any:
        restored = tuple(value.transpose(0, 1) for value in values)
        return restored if len(restored) > 1 else restored[0]

    return turned, back


def bags_first(words: Tensor, offsets: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    """Bags of unequal lengths as rows, and the function that lays them end to end again."""
    bags = torch.tensor_split(words, offsets[1:])
    lengths = torch.tensor([len(bag) for bag in bags])

    def end_to_end(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        counted = torch.arange(rows.shape[1]) < lengths[:, None]
        return rows[counted], lengths.cumsum(0) - lengths

    return (pad_sequence(list(bags), batch_first=True), lengths), end_to_end


def by_opacus(module: nn.Module, x: Any, batch_first: bool) -> dict[str, Tensor]:
    wrapped = GradSampleModule(module, batch_first=batch_first, loss_reduction="sum")
    output = wrapped(x) if isinstance(x, Tensor | PackedSequence) else wrapped(*x)
    row_losses(output, 0 if batch_first else 1).sum().backward()
    samples = {name: p.grad_sample for name, p in module.named_parameters()}
    wrapped.to_standard_module()
    if isinstance(x, PackedSequence) and x.unsorted_indices is not None:
        # Opacus lists records in the order in which they were packed.
        samples = {name: value[x.unsorted_indices] for name, value in samples.items()}
    return samples


def torchs_own(module: nn.Module) -> nn.Module:
    """Opacus's recurrent layers replaced by those of torch that they stand for, weights kept."""
    copied = copy.deepcopy(module)
    layer = getattr(copied, "dp_rnn", None)
    if layer is None:
        return copied
    kind = {DPLSTM: nn.LSTM, DPGRU: nn.GRU, DPRNN: nn.RNN}[type(layer)]
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
    plain = kind(**{name: getattr(layer, name) for name in names})
    plain.load_state_dict(layer.state_dict())
    copied.dp_rnn = plain
    return copied


def by_dpis(module: nn.Module, x: Any, batch_first: bool) -> tuple[dict[str, Tensor], Tensor]:
    module = torchs_own(module)
    batch, restore = rows_first(x, batch_first)

    def objective(model: nn.Module, rows: Any) -> Tensor:
        value = restore(*rows)
        output = model(*value) if type(value) is tuple else model(value)
        return row_losses(output, 0 if batch_first else 1)

    tape = RecordGradients(module, objective=objective).record(batch)
    each = [tape.weighted_sum(row) for row in torch.eye(tape.records)]
    return {name: torch.stack([sums[name] for sums in each]) for name in each[0]}, tape.norms()


def run_test(
    self: unittest.TestCase, x: Any, module: nn.Module, batch_first: bool = True, **_: Any
) -> None:
    """What Opacus's cases call with each layer and input they draw."""
    first = x.data if isinstance(x, PackedSequence) else x if isinstance(x, Tensor) else x[0]
    if first.numel() == 0:
        return  # empty batches are tested elsewhere
    theirs = by_opacus(module, x, batch_first)
    ours, norms = by_dpis(module, x, batch_first)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-4, msg=name)
    squares = sum(value.flatten(1).square().sum(1) for value in theirs.values())
    torch.testing.assert_close(norms, squares.sqrt().double(), rtol=1e-4, atol=1e-5)


def _cases() -> dict[str, type[unittest.TestCase]]:
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"opacus.tests.grad_samples.{name}_test")
        for case in vars(module).values():
            own = case is not GradSampleHooks_test
            if own and isinstance(case, type) and issubclass(case, GradSampleHooks_test):
                found[case.__name__] = type(case.__name__, (case,), {"run_test": run_test})
    return found


globals().update(_cases())
