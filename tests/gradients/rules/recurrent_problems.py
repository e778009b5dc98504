"""Recurrent modules with a batch each, and two ways to their gradients.

The slow way is autograd, one record at a time, in double precision. The fast way is the recurrent rule
alone, without the engine around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from dpis.gradients.factors.factor import Factor
from dpis.gradients.layout import Layout
from dpis.gradients.rules.recurrent import RULES
from dpis.gradients.rules.rule import Call, Ran, WatchedGradient

FEATURES, HIDDEN = 3, 4


@dataclass(frozen=True)
class Batch:
    """Inputs ``[records, steps, features]`` and the parts of the first state, records in front."""

    inputs: Tensor
    state: tuple[Tensor, ...] = ()
    lengths: tuple[int, ...] | None = None
    enforce_sorted: bool = True

    def record(self, index: int) -> Batch:
        own = slice(index, index + 1)
        lengths = None if self.lengths is None else self.lengths[own]
        return Batch(self.inputs[own], tuple(part[own] for part in self.state), lengths)

    def leaves(self, dtype: torch.dtype) -> Batch:
        state = tuple(_leaf(part, dtype) for part in self.state)
        return Batch(_leaf(self.inputs, dtype), state, self.lengths, self.enforce_sorted)

    def sorted_order(self) -> Tensor | None:
        """Which record stands at each place of the packed batch."""
        if self.lengths is None or self.enforce_sorted:
            return None
        return torch.tensor(self.lengths).sort(descending=True).indices


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).clone().requires_grad_()


@dataclass(frozen=True)
class Problem:
    """A recurrent module and the shape of its batch."""

    name: str
    module: Callable[[], nn.Module]
    steps: int = 5
    records: int = 3
    lengths: tuple[int, ...] | None = None
    enforce_sorted: bool = True
    with_state: bool = False

    def make(self) -> tuple[nn.Module, Batch]:
        torch.manual_seed(1)
        module = self.module().double()
        inputs = torch.randn(self.records, self.steps, FEATURES, dtype=torch.float64)
        state = first_state(module, self.records) if self.with_state else ()
        return module, Batch(inputs, state, self.lengths, self.enforce_sorted)


def first_state(module: nn.Module, records: int) -> tuple[Tensor, ...]:
    hidden = torch.randn(records, HIDDEN, dtype=torch.float64)
    if isinstance(module, nn.RNNCellBase):
        return (hidden, torch.randn_like(hidden)) if isinstance(module, nn.LSTMCell) else (hidden,)
    stacked = module.num_layers * (2 if module.bidirectional else 1)
    projected = getattr(module, "proj_size", 0) or HIDDEN
    hidden = torch.randn(records, stacked, projected, dtype=torch.float64)
    cell = torch.randn(records, stacked, HIDDEN, dtype=torch.float64)
    return (hidden, cell) if isinstance(module, nn.LSTM) else (hidden,)


def losses(module: nn.Module, batch: Batch) -> Tensor:
    """A loss per record in which every output and every part of the final state counts."""
    run = _run_cell if isinstance(module, nn.RNNCellBase) else _run_sequence
    outputs = run(module, batch)
    return sum((_curved(output) for output in outputs), start=torch.zeros(()))


def _curved(output: Tensor) -> Tensor:
    slope = torch.linspace(0.5, 2.0, output[0].numel() if len(output) else 1).to(output)
    return (torch.sin(output.flatten(1)) * slope).sum(1)


def _run_cell(cell: nn.Module, batch: Batch) -> list[Tensor]:
    state = batch.state if len(batch.state) != 1 else batch.state[0]
    state = state if len(batch.state) else None
    outputs = []
    for step in batch.inputs.unbind(1):
        state = cell(step, state)
        outputs += [state] if isinstance(state, Tensor) else [*state]
    return outputs


def _run_sequence(module: nn.Module, batch: Batch) -> list[Tensor]:
    inputs = batch.inputs if module.batch_first else batch.inputs.transpose(0, 1)
    if batch.lengths is not None:
        inputs = pack_padded_sequence(
            inputs, torch.tensor(batch.lengths), module.batch_first, batch.enforce_sorted
        )
    state = tuple(part.transpose(0, 1).contiguous() for part in batch.state)
    outputs, final = module(inputs, (state if len(state) > 1 else state[0]) if state else None)
    if batch.lengths is not None:
        steps = batch.inputs.shape[1]
        outputs, _ = pad_packed_sequence(outputs, module.batch_first, total_length=steps)
    outputs = outputs if module.batch_first else outputs.transpose(0, 1)
    parts = [final] if isinstance(final, Tensor) else [*final]
    return [outputs, *(part.transpose(0, 1) for part in parts)]


@dataclass(frozen=True)
class Gradients:
    """Gradients of the summed losses by the batch, and every record's by the parameters."""

    losses: Tensor
    inputs: Tensor
    state: tuple[Tensor, ...]
    parameters: dict[str, Tensor]


def slow_gradients(module: nn.Module, batch: Batch) -> Gradients:
    """Autograd, one record at a time."""
    parameters = dict(module.named_parameters())
    rows = []
    for index in range(len(batch.inputs)):
        own = batch.record(index).leaves(torch.float64)
        loss = losses(module, own)
        wanted = (own.inputs, *own.state, *parameters.values())
        rows.append((loss.detach(), *torch.autograd.grad(loss.sum(), wanted)))
    loss, inputs, *rest = zip(*rows, strict=True)
    state = tuple(torch.cat(part) for part in rest[: len(batch.state)])
    grads = (torch.stack(grad) for grad in rest[len(batch.state) :])
    named = dict(zip(parameters, grads, strict=True))
    return Gradients(torch.cat(loss), torch.cat(inputs), state, named)


class _RulesAtWork(TorchFunctionMode):
    """Sends every call that has a rule to it."""

    def __init__(self, parameters: tuple[Tensor, ...], record_order: Tensor | None) -> None:
        super().__init__()
        self.parameters, self.record_order = parameters, record_order
        self.ran: list[tuple[Call, Ran]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function not in RULES:
            return function(*args, **(kwargs or {}))
        call = Call(function, args, kwargs or {}, self.parameters, self.record_order)
        assert RULES[function].accepts(call)
        self.ran.append((call, RULES[function].run(call)))
        return self.ran[-1][1].result


@dataclass(frozen=True)
class Fast:
    """What the rule found: the losses, the gradients by the batch, the factors by name."""

    losses: Tensor
    inputs: Tensor
    state: tuple[Tensor, ...]
    factors: dict[str, list[Factor]]


def fast_gradients(module: nn.Module, batch: Batch, dtype: torch.dtype = torch.float64) -> Fast:
    """The rule. A parameter has one factor for each call it was used in."""
    own = batch.leaves(dtype)
    name_of = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    wanted = tuple(p for p in module.parameters() if p.requires_grad)
    with _RulesAtWork(wanted, batch.sorted_order()) as mode:
        loss = losses(module, own)
    watched = [stand_in for _, ran in mode.ran for stand_in in ran.watched]
    grads = iter(torch.autograd.grad(loss.sum(), (own.inputs, *own.state, *watched)))
    inputs, *state = (next(grads) for _ in range(1 + len(own.state)))
    factors: dict[str, list[Factor]] = defaultdict(list)
    for call, ran in mode.ran:
        own_grads = [WatchedGradient(next(grads), Layout(dim=0)) for _ in ran.watched]
        for parameter, factor in RULES[call.function].factors(ran.saved, own_grads):
            factors[name_of[id(parameter)]].append(factor)
    return Fast(loss.detach(), inputs, tuple(state), dict(factors))


_lstm = partial(nn.LSTM, FEATURES, HIDDEN)
_gru = partial(nn.GRU, FEATURES, HIDDEN)
_rnn = partial(nn.RNN, FEATURES, HIDDEN)
_SEQUENCES = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn-tanh": _rnn,
    "rnn-relu": partial(_rnn, nonlinearity="relu"),
    "lstm-projected": partial(_lstm, proj_size=2),
}
_CELLS = {
    "lstm-cell": partial(nn.LSTMCell, FEATURES, HIDDEN),
    "gru-cell": partial(nn.GRUCell, FEATURES, HIDDEN),
    "rnn-tanh-cell": partial(nn.RNNCell, FEATURES, HIDDEN),
    "rnn-relu-cell": partial(nn.RNNCell, FEATURES, HIDDEN, nonlinearity="relu"),
}
_LENGTHS, _UNSORTED = (5, 3, 3, 1), (3, 5, 1, 3)

PROBLEMS = [
    problem
    for name, make in _SEQUENCES.items()
    for problem in (
        Problem(name, make),
        Problem(f"{name}-batch-first-no-bias", partial(make, batch_first=True, bias=False)),
        Problem(
            f"{name}-bidirectional-given-state", partial(make, bidirectional=True), with_state=True
        ),
        Problem(
            f"{name}-three-layers-bidirectional",
            partial(make, num_layers=3, bidirectional=True, batch_first=True),
            with_state=True,
        ),
        Problem(f"{name}-one-step", partial(make, bidirectional=True), steps=1, with_state=True),
        Problem(f"{name}-two-steps", partial(make, num_layers=2), steps=2, records=1),
        Problem(
            f"{name}-packed",
            partial(make, num_layers=2, bidirectional=True),
            records=4,
            lengths=_LENGTHS,
            with_state=True,
        ),
        Problem(
            f"{name}-packed-unsorted",
            partial(make, bidirectional=True, batch_first=True),
            records=4,
            lengths=_UNSORTED,
            enforce_sorted=False,
            with_state=True,
        ),
        Problem(
            f"{name}-packed-unsorted-short",
            partial(make, num_layers=2),
            records=3,
            steps=2,
            lengths=(1, 2, 1),
            enforce_sorted=False,
        ),
    )
] + [
    problem
    for name, make in _CELLS.items()
    for problem in (
        Problem(name, make),
        Problem(f"{name}-given-state-no-bias", partial(make, bias=False), steps=2, with_state=True),
    )
]
