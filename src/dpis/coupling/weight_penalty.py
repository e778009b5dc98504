"""A penalty on weights in the loss: of no record, so it is taken out and applied behind the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpis.errors import MisuseError

Function = Callable[..., Any]

ADDITIONS: frozenset[Function] = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
)
"""How a penalty is joined to a loss."""
DIGITS = 3
"""Of a coefficient that somebody chose. One that is made of data has more."""
ROUNDING = 2e-6
"""Of coefficients in float32. So few numbers are this close to one of so few digits that data hardly makes one."""
OFF = 1e-4
"""How far a gradient may be from a multiple of its parameter."""


class WeightPenalty:
    """``decay / 2 * Σ ||p||²``, with one coefficient for each parameter from the first step to the last.

    Its gradient is ``decay * p``: released weights and a number of the user's. How often it arrives is private (once
    for every physical batch, never for an empty one that a loop skips), so once known it is applied in every step.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: Mapping[str, Tensor] = {}
        self._decays: dict[str, float] = {}
        self._steps = 0

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """From now on these are trained, and there is no penalty yet."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters, self._decays, self._steps = parameters, {}, 0

    def stand_in(self, penalty: Tensor, leads_to: Sequence[Tensor]) -> tuple[Tensor, float] | None:
        """What is to stand for a penalty in the loss, and the coefficient of its gradient; None: it is none.

        Args:
            penalty: a single number, made of parameters.
            leads_to: these parameters.
        """
        if penalty.ndim or any(id(parameter) not in self._names for parameter in leads_to):
            return None
        gradients = torch.autograd.grad(penalty, leads_to, retain_graph=True)
        coefficients = set[float]()
        for parameter, gradient in zip(leads_to, gradients, strict=True):
            p, g = parameter.detach().double(), gradient.double()
            size = float(p.square().sum())
            coefficient = float((g * p).sum()) / size if size else 0.0
            if not float((g - coefficient * p).norm()) <= OFF * float(g.norm()):
                return None
            if size:
                coefficients.add(coefficient)
        if not coefficients or not _alike(min(coefficients), max(coefficients)):
            return None
        return penalty.detach().requires_grad_(), max(coefficients, key=abs)

    def arrived(self, decay: float, at: Sequence[Tensor]) -> None:
        """A gradient arrived at a stand-in.

        Args:
            decay: its coefficient, with all that the loss was multiplied by.
            at: the parameters that the penalty is of.

        Raises:
            MisuseError: if it is another than before, or looks as if data had made it.
        """
        rounded = float(f"{decay:.{DIGITS - 1}e}")
        names = [self._names[id(parameter)] for parameter in at]
        late = self._steps > 0 and not self._decays.keys() >= set(names)
        known = {self._decays.get(name, rounded) for name in names}
        if late or known != {rounded} or not _alike(decay, rounded):
            raise MisuseError(
                "a penalty on weights in the loss must have one coefficient from the first step to the last, of at "
                f"most {DIGITS} digits; it is applied behind the noise, and one that follows the data would be "
                f"released without any. Leave it to the optimizer: weight_decay={decay:.6g} equals this one"
            )
        self._decays |= dict.fromkeys(names, rounded)

    def add_to(self, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient that a step releases, with that of the penalty."""
        self._steps += 1
        for name, decay in self._decays.items():
            update[name] = update[name] + decay * self._parameters[name].detach().to(update[name])
        return update


def _alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING)
