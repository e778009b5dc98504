"""Gradients of single records, where the loss is computed later: the same as one record after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpis.errors import InputError
from dpis.gradients.deferred import DeferredGradients
from dpis.mechanism.contribution import contribution_weights

ROWS = 5


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(ROWS, *shape)


def words() -> Tensor:
    return torch.randint(7, (ROWS, 6))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """Hidden states come out too: their rows are in the second dimension; layers may be as many as rows."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=layers, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        output, (hidden, cell) = self.lstm(x)
        return {"output": output, "state": (hidden, cell)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x)).mean(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(x))))


class Odd(nn.Module):
    """Functions that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x[:, None] * self.scale, self.shift[None].expand(len(x), 4, 4))[:, 0]


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, num_layers=2)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


class Unseen(nn.Module):
    """Goes through the records one by one: where they are cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row @ self.weight for row in x])


@dataclass(frozen=True)
class Case:
    id: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    row_dims: tuple[int, ...] = (0,)
    batch_first: bool = True


CASES = [
    Case("linear", lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), floats(4)),
    Case("conv", Conv, floats(2, 6, 6)),
    Case("lstm", lambda: Recurrent(1), floats(5, 4), (0, 1, 1)),
    Case("lstm of two layers", lambda: Recurrent(2), floats(5, 4), (0, 1, 1)),
    Case("lstm of as many layers as rows", lambda: Recurrent(ROWS), floats(5, 4), (0, 1, 1)),
    Case("attention", Attention, words),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), words),
    Case("tied", Tied, words),
    Case("no rule", Odd, floats(4)),
    Case("unseen", Unseen, floats(4)),
    Case("time first", TimeFirst, lambda: torch.randn(6, ROWS, 4), (1, 1), False),
]


def tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values for tensor in tensors(value)]


def loss_of(outputs: Any, row: int | None, case: Case) -> Tensor:
    """A loss in which every output counts; of one row, or of all."""
    total = torch.zeros(())
    for number, tensor in enumerate(tensors(outputs)):
        by_row = tensor.movedim(case.row_dims[number], 0).flatten(1)
        scale = torch.linspace(0.5, 1.5, by_row.shape[1]) + number
        rows = ((by_row * scale + 0.1) ** 2).sum(1)
        total = total + (rows.sum() if row is None else rows[row])
    return total


@pytest.mark.filterwarnings("ignore::dpis.gradients.SlowGradientsWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_records_have_the_gradients_of_the_loop(case: Case, scale: float):
    torch.manual_seed(2)
    module, inputs = case.module(), case.inputs()
    deferred = DeferredGradients(module, batch_first=case.batch_first)
    passed = deferred.run((inputs,), {})
    assert passed.rows == ROWS
    assert not passed.backward_done
    (loss_of(passed.outputs, None, case) / scale).backward()
    tape = deferred.tape(passed, scale)
    plain = module(inputs)
    parameters = [p for p in module.parameters() if p.requires_grad]
    for row in range(ROWS):
        oracle = torch.autograd.grad(loss_of(plain, row, case), parameters, retain_graph=True)
        only = torch.zeros(ROWS)
        only[row] = 1.0
        for fast, expected in zip(tape.weighted_sum(only).values(), oracle, strict=True):
            assert torch.allclose(fast, expected, rtol=1e-5, atol=1e-6 * float(expected.norm()))
        norm = torch.cat([g.flatten() for g in oracle]).double().norm()
        assert float(tape.norms()[row]) == pytest.approx(float(norm), rel=1e-5)


def test_clipped_sums_weigh_records_by_their_norms():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    deferred = DeferredGradients(module)
    passed = deferred.run((1e3 * torch.randn(4, 3),), {})
    passed.outputs.square().sum().backward()
    tape = deferred.tape(passed, 1.0)
    sums = tape.weighted_sum(1 / tape.norms())
    assert torch.cat([value.flatten() for value in sums.values()]).norm() <= 4 + 1e-5


def test_a_record_that_is_not_finite_adds_nothing():
    torch.manual_seed(0)
    inputs = torch.randn(3, 4)
    inputs[1, 2] = float("nan")
    deferred = DeferredGradients(nn.Linear(4, 2))
    passed = deferred.run((inputs,), {})
    passed.outputs.sum().backward()
    tape = deferred.tape(passed, 1.0)
    norms = tape.norms()
    assert norms.isfinite().tolist() == [True, False, True]
    weights = contribution_weights(norms, torch.full((3,), 1e-3), clip_norm=1e-3)
    expected = (weights[[0, 2], None] * inputs[[0, 2]]).sum(0).expand(2, 4)
    assert torch.allclose(tape.weighted_sum(weights)["weight"].double(), expected.double())


def test_outputs_without_rows_keep_their_other_sizes():
    passed = DeferredGradients(Recurrent(2)).run((torch.randn(4, 5, 4),), {})
    blank = passed.blank
    assert blank["output"].shape == (0, 5, 3)
    assert blank["state"][0].shape == (2, 0, 3)


def test_gradients_must_have_arrived():
    deferred = DeferredGradients(nn.Linear(3, 2))
    passed = deferred.run((torch.randn(4, 3),), {})
    with pytest.raises(InputError, match="backward"):
        deferred.tape(passed, 1.0)


def test_something_must_be_trained():
    with pytest.raises(InputError, match="nothing to train"):
        DeferredGradients(nn.Linear(3, 2).requires_grad_(False))

    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(InputError, match="no tensor that depends"):
        DeferredGradients(Detached(3, 2)).run((torch.randn(4, 3),), {})
