"""Bare parameters that are broadcast against a batch: biases, scales, class tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dpis.gradients.factors import Dense
from dpis.gradients.layout import Layout
from dpis.gradients.rules.base import Call, ParameterFactor, Rule, RuleTable


class Elementwise(Rule):
    """``y = f(left, right)``, element by element after broadcasting, one side a parameter.

    The gradient of the parameter is ``Σ g ⊙ ∂f``, summed over what was broadcast within a record.
    """

    def accepts(self, call: Call) -> bool:
        """Two operands, of which exactly one is a parameter."""
        left, right = self.operands(call)
        return call.wants(left) != call.wants(right) and "out" not in call.kwargs

    def factors(
        self, saved: Call, grads: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> Iterator[ParameterFactor]:
        """The slope times the output gradient, summed to the parameter's shape."""
        left, right = self.operands(saved)
        if saved.wants(left):
            yield left, unbroadcast(self.to_left(saved, grads[0]), left, layouts[0])
        else:
            yield right, unbroadcast(self.to_right(saved, grads[0]), right, layouts[0])

    def operands(self, call: Call) -> tuple[Tensor, Tensor]:
        """Left and right."""
        return call.argument(0, "input"), call.argument(1, "other")

    @abstractmethod
    def to_left(self, call: Call, g: Tensor) -> Tensor:
        """``g ⊙ ∂f/∂left``."""

    @abstractmethod
    def to_right(self, call: Call, g: Tensor) -> Tensor:
        """``g ⊙ ∂f/∂right``."""


class Add(Elementwise):
    """``left + alpha right``."""

    def to_left(self, call: Call, g: Tensor) -> Tensor:
        """As it is."""
        return g

    def to_right(self, call: Call, g: Tensor) -> Tensor:
        """Scaled by ``alpha``."""
        alpha = call.kwargs.get("alpha", 1)
        return g if alpha == 1 else g * alpha


class Subtract(Add):
    """``left - alpha right``."""

    def to_right(self, call: Call, g: Tensor) -> Tensor:
        """With the other sign."""
        return -super().to_right(call, g)


class Multiply(Elementwise):
    """``left * right``."""

    def to_left(self, call: Call, g: Tensor) -> Tensor:
        """Times the other operand."""
        return g * self.operands(call)[1]

    def to_right(self, call: Call, g: Tensor) -> Tensor:
        """Times the other operand."""
        return g * self.operands(call)[0]


class Divide(Elementwise):
    """``left / right``."""

    def accepts(self, call: Call) -> bool:
        """True division alone: rounding has no gradient."""
        return super().accepts(call) and call.kwargs.get("rounding_mode") is None

    def to_left(self, call: Call, g: Tensor) -> Tensor:
        """``g / right``."""
        return g / self.operands(call)[1]

    def to_right(self, call: Call, g: Tensor) -> Tensor:
        """``-g left / right²``."""
        left, right = self.operands(call)
        return -g * left / right.square()


class Spread(Rule):
    """A parameter repeated along new or single dimensions (``expand``): ``dp = Σ g``."""

    def accepts(self, call: Call) -> bool:
        """The spread tensor is the parameter."""
        return call.wants(call.argument(0, "input"))

    def factors(
        self, saved: Call, grads: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> Iterator[ParameterFactor]:
        """Copies within a record add up."""
        parameter = saved.argument(0, "input")
        yield parameter, unbroadcast(grads[0], parameter, layouts[0])


class Repeat(Rule):
    """A parameter tiled (``repeat``): ``dp = Σ g`` over the tiles of a record."""

    def accepts(self, call: Call) -> bool:
        """The repeated tensor is the parameter."""
        return call.wants(call.args[0])

    def factors(
        self, saved: Call, grads: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> Iterator[ParameterFactor]:
        """Every dimension splits into tiles and what is in a tile."""
        parameter = saved.args[0]
        shape = [1] * (grads[0].ndim - parameter.ndim) + list(parameter.shape)
        del shape[layouts[0].dim]
        rows = layouts[0].rows_first(grads[0])
        tiled = [n for size in zip(rows.shape[1:], shape, strict=True) for n in _tiles(*size)]
        tiles = rows.reshape(rows.shape[0], *tiled)
        summed = tiles.sum(tuple(range(1, tiles.ndim, 2))) if tiled else tiles
        yield parameter, Dense(summed.reshape(rows.shape[0], *parameter.shape))


def _tiles(size: int, tile: int) -> tuple[int, int]:
    return size // tile, tile


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


RULES: RuleTable = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__radd__), Add()),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_), Subtract()),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__rmul__), Multiply()),
    **dict.fromkeys((torch.div, Tensor.div, torch.true_divide, Tensor.true_divide), Divide()),
    Tensor.repeat: Repeat(),
    **dict.fromkeys(
        (Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to), Spread()
    ),
}
