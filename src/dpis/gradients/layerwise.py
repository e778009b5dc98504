"""A record's fast gradient against plain autograd's, parameter by parameter: neither is ever held as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpis.coupling.agreement import HALF_TOLERANCE, TOLERANCES, VANISHING
from dpis.gradients.rules.rule import widened
from dpis.gradients.tape import Tape

# Takes the name of a parameter and its gradient; None: it has none.
Meeting = Callable[[str, Tensor | None], None]


@dataclass(frozen=True)
class Comparison:
    """One record.

    Attributes:
        plain: the norm of the gradient by plain autograd.
        fast: that by which the record is clipped.
        apart: by parameter, the norm of the difference between both gradients.
    """

    plain: float
    fast: float
    apart: Mapping[str, float]

    def off(self, dtype: torch.dtype) -> list[str]:
        """The parameters whose gradients differ by more than rounding; all, where only the norms do."""
        if not self.plain < torch.inf:
            return []
        most = TOLERANCES.get(dtype, HALF_TOLERANCE) * self.plain + VANISHING
        off = [name for name, distance in self.apart.items() if not distance <= most]
        return off or (list(self.apart) if not abs(self.fast - self.plain) <= most else [])


def compare(tape: Tape, record: int, loss: Tensor) -> Comparison:
    """Run plain backward from the loss of one record, and meet every gradient as it arrives.

    Args:
        tape: the fast gradients of some records. Its parameters are leaves of the loss, gathered in turn.
        record: which of them.
        loss: of that record alone, from a forward pass of its own.
    """
    only = torch.zeros(tape.records, dtype=torch.float64, device=loss.device)
    only[record] = 1.0
    squares, apart = list[float](), dict[str, float]()

    def meet(name: str, plain: Tensor | None) -> None:
        fast = tape.weighted_sum_of(name, only)
        if plain is None:
            apart[name] = _norm(fast)
            return
        squares.append(_norm(plain) ** 2)
        apart[name] = _norm(fast.sub_(plain))

    backward_meeting(loss, tape.parameters, meet)
    fast = float(tape.norms()[record])
    return Comparison(sum(squares) ** 0.5, fast, apart)


def same_sums(one: Tape, other: Tape, half: bool) -> bool:
    """Whether the gradients of two batches, summed over their records, differ by rounding at most."""
    squares = [0.0, 0.0, 0.0]
    every, others = (torch.ones_like(tape.norms()) for tape in (one, other))
    for (_, a), (_, b) in zip(one.weighted_sums(every), other.weighted_sums(others), strict=True):
        for place, value in enumerate((a, b, a - b)):
            squares[place] += _norm(value) ** 2
    size, apart = max(squares[:2]) ** 0.5, squares[2] ** 0.5
    loosest = HALF_TOLERANCE if half else max(TOLERANCES.values())
    return not (size < torch.inf and apart > loosest * size + VANISHING)


def backward_meeting(loss: Tensor, parameters: Mapping[str, Tensor], meet: Meeting) -> None:
    """Plain backward; gradients go to ``meet`` instead of ``grad``, and None for parameters that got none."""
    left = dict.fromkeys(parameters)

    def arrived(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        del left[name]
        assert gradient is not None
        meet(name, widened(gradient.to_dense() if gradient.is_sparse else gradient))

    with ExitStack() as stack:
        for name, parameter in parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(partial(arrived, name))  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        loss.backward()  # type: ignore[no-untyped-call]
    for name in list(left):
        meet(name, None)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
