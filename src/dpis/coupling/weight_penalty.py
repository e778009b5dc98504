"""A penalty on weights in the loss: refused, with the weight decay that equals it.

It is of no record, so it could be applied behind the noise. But its coefficient may be made of data (a count, the size
of a batch) and look as round as one that somebody chose: applied as it came, it would be released without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpis.errors import MisuseError

Function = Callable[..., Any]

ADDITIONS: frozenset[Function] = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
)
"""How a penalty is joined to a loss."""
OFF = 1e-4
"""How far a gradient may be from a multiple of its parameter."""


def refuse_penalty(function: Function, added: Tensor, leads_to: Sequence[Tensor]) -> None:
    """Say which weight decay equals ``decay / 2 * Σ ||p||²`` that is added to a loss; nothing, if it is no such sum.

    Args:
        function: what is about to be called.
        added: what is made of parameters there.
        leads_to: these parameters.

    Raises:
        MisuseError: if it is one.
    """
    if function not in ADDITIONS or added.ndim:
        return
    coefficients = []
    for parameter, gradient in zip(
        leads_to, torch.autograd.grad(added, leads_to, retain_graph=True), strict=True
    ):
        p, g = parameter.detach().double(), gradient.double()
        size = float(p.square().sum())
        coefficient = float((g * p).sum()) / size if size else 0.0
        if not float((g - coefficient * p).norm()) <= OFF * float(g.norm()):
            return
        coefficients += [coefficient] if size else []
    if coefficients and max(coefficients) - min(coefficients) <= OFF * abs(max(coefficients)):
        raise MisuseError(
            "a penalty on weights was added to the loss: it belongs to no record, and whatever made its coefficient "
            "would be released without noise. Leave it to the optimizer, which applies it behind the noise: "
            f"weight_decay={max(coefficients):.6g} equals this one"
        )
