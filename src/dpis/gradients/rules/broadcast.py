"""Bare parameters that are broadcast against a batch: biases, scales, class tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.factors import Dense
from dpis.gradients.layout import Layout
from dpis.gradients.rules.rule import Call, Factors, Rule, RuleTable, Watched

# ``g ⊙ ∂f/∂operand`` from ``g`` and both operands.
Slope = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Elementwise(Rule):
    """``y = f(left, right)``, element by element after broadcasting, one side a parameter.

    The gradient of the parameter is ``Σ g ⊙ ∂f``, summed over what was broadcast within a record.

    Attributes:
        to_left: the slope of the left operand.
        to_right: that of the right one, which a function may scale by ``alpha`` beforehand.
        reads_parameters: whether the slope of a parameter depends on its value.
    """

    to_left: Slope
    to_right: Slope
    reads_parameters: bool = False

    def accepts(self, call: Call) -> bool:
        """Two operands, of which exactly one is a parameter. Rounding has no gradient."""
        left, right = call.argument(0, "input"), call.argument(1, "other")
        plain = "out" not in call.kwargs and call.kwargs.get("rounding_mode") is None
        return plain and call.wants(left) != call.wants(right)

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """The slope times the output gradient, summed to the parameter's shape."""
        grad, layout = watched[0]
        left, right = saved.argument(0, "input"), saved.argument(1, "other")
        if saved.wants(left):
            yield left, unbroadcast(self.to_left(grad, left, right), left, layout)
        else:
            alpha = saved.kwargs.get("alpha", 1)
            g = grad if alpha == 1 else grad * alpha
            yield right, unbroadcast(self.to_right(g, left, right), right, layout)


class Spread(Rule):
    """A parameter repeated along new or single dimensions (``expand``): ``dp = Σ g``."""

    reads_parameters = False

    def accepts(self, call: Call) -> bool:
        """The spread tensor is the parameter."""
        return call.wants(call.argument(0, "input"))

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Copies within a record add up."""
        grad, layout = watched[0]
        parameter = saved.argument(0, "input")
        yield parameter, unbroadcast(grad, parameter, layout)


class Repeat(Rule):
    """A parameter tiled (``repeat``): ``dp = Σ g`` over the tiles of a record."""

    reads_parameters = False

    def accepts(self, call: Call) -> bool:
        """The repeated tensor is the parameter."""
        return call.wants(call.args[0])

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Every dimension splits into tiles and what is in a tile."""
        grad, layout = watched[0]
        parameter = saved.args[0]
        shape = [1] * (grad.ndim - parameter.ndim) + list(parameter.shape)
        del shape[layout.dim]
        rows = layout.rows_first(grad)
        sizes = zip(rows.shape[1:], shape, strict=True)
        tiled = [number for size, tile in sizes for number in (size // tile, tile)]
        tiles = rows.reshape(rows.shape[0], *tiled)
        summed = tiles.sum(tuple(range(1, tiles.ndim, 2))) if tiled else tiles
        yield parameter, Dense(summed.reshape(rows.shape[0], *parameter.shape))


def unbroadcast(grads: Tensor, parameter: Tensor, layout: Layout) -> Dense:
    """Sum over what was broadcast, apart from the rows.

    Dimensions are aligned from the right, as broadcasting does; the dimension that counts rows must
    be one the parameter was broadcast along.
    """
    shape = [1] * (grads.ndim - parameter.ndim) + list(parameter.shape)
    own = [size for dim, size in enumerate(shape) if dim != layout.dim]
    rows = layout.rows_first(grads)
    spread = [dim for dim, size in enumerate(own, start=1) if size == 1 != rows.shape[dim]]
    summed = rows.sum(spread) if spread else rows
    return Dense(summed.reshape(rows.shape[0], *parameter.shape))


ADD = Elementwise(lambda g, left, right: g, lambda g, left, right: g)
SUBTRACT = Elementwise(lambda g, left, right: g, lambda g, left, right: -g)
MULTIPLY = Elementwise(lambda g, left, right: g * right, lambda g, left, right: g * left)
DIVIDE = Elementwise(
    lambda g, left, right: g / right,
    lambda g, left, right: -g * left / right.square(),
    reads_parameters=True,
)
RULES: RuleTable = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__radd__), ADD),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_), SUBTRACT),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__rmul__), MULTIPLY),
    **dict.fromkeys((torch.div, Tensor.div, torch.true_divide, Tensor.true_divide), DIVIDE),
    Tensor.repeat: Repeat(),
    **dict.fromkeys(
        (Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to), Spread()
    ),
}
