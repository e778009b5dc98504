"""Matrix products with a weight: ``linear``, ``matmul``, ``addmm``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dpis.gradients import aligned
from dpis.gradients.factors import Dense, Outer
from dpis.gradients.layout import Layout
from dpis.gradients.rules.rule import Call, Factors, Rule, RuleTable, Watched


class Linear(Rule):
    """``y = x Wᵀ + b`` over any leading dimensions: ``dW = Σ_l g_l ⊗ x_l``, ``db = Σ_l g_l``."""

    reads_parameters = False

    def accepts(self, call: Call) -> bool:
        """A matrix for a weight, and an input that is not itself a parameter."""
        return call.argument(1, "weight").ndim == 2 and not call.wants(call.argument(0, "input"))

    def compute(self, call: Call) -> Tensor:
        """On aligned rows."""
        return aligned.linear(*call.args, **call.kwargs)

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """An outer product for the weight, a sum over positions for the bias."""
        grad, layout = watched[0]
        x, weight = saved.argument(0, "input"), saved.argument(1, "weight")
        bias = saved.argument(2, "bias")
        g = positions_in_the_middle(grad, layout)
        if saved.wants(weight):
            yield weight, Outer(positions_in_the_middle(x, layout), g)
        if saved.wants(bias):
            yield bias, Dense(sum_of_positions(g))


class Product(Rule):
    """``y = x W`` or ``y = W x`` with a matrix ``W``: ``dW = Σ_l x_l ⊗ g_l``, or transposed."""

    reads_parameters = False

    def accepts(self, call: Call) -> bool:
        """Two operands, of which one is a weight matrix and the other a batch of matrices."""
        left, right = call.argument(0, "input"), call.argument(1, "other")
        if call.wants(left) == call.wants(right):
            return False
        weight, batch = (left, right) if call.wants(left) else (right, left)
        return bool(weight.ndim == 2 and batch.ndim > 1)

    def compute(self, call: Call) -> Tensor:
        """On aligned rows."""
        return aligned.product(call.argument(0, "input"), call.argument(1, "other"))

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Outer products; with the weight on the left, the columns of ``x`` are the positions."""
        grad, layout = watched[0]
        left, right = saved.argument(0, "input"), saved.argument(1, "other")
        if saved.wants(right):
            g = positions_in_the_middle(grad, layout)
            yield right, Outer(g, positions_in_the_middle(left, layout))
        else:
            turned = _transposed(layout, grad.ndim)
            g = positions_in_the_middle(grad.mT, turned)
            yield left, Outer(positions_in_the_middle(right.mT, turned), g)


class AddedProduct(Rule):
    """``y = b + x W`` (``addmm``): the outer product of ``x W``, the bias of a linear layer."""

    reads_parameters = False

    def accepts(self, call: Call) -> bool:
        """A vector for a bias, an input that is no parameter, neither ``alpha`` nor ``beta``."""
        plain = len(call.args) == 3 and not call.kwargs and call.args[0].ndim == 1
        return plain and not call.wants(call.args[1])

    def compute(self, call: Call) -> Tensor:
        """On aligned rows."""
        bias, x, weight = call.args
        odd = any(aligned.missing(size) for size in weight.shape)
        return aligned.product(x, weight) + bias if odd else torch.addmm(bias, x, weight)

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """As for a linear layer with its weight transposed."""
        grad, layout = watched[0]
        bias, x, weight = saved.args
        g = positions_in_the_middle(grad, layout)
        if saved.wants(weight):
            yield weight, Outer(g, positions_in_the_middle(x, layout))
        if saved.wants(bias):
            yield bias, Dense(sum_of_positions(g))


def positions_in_the_middle(tensor: Tensor, layout: Layout) -> Tensor:
    """``[..., features] -> [rows, positions, features]``."""
    rows = layout.rows_first(tensor)
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def sum_of_positions(tensor: Tensor) -> Tensor:
    """``[rows, positions, features] -> [rows, features]``."""
    return tensor.squeeze(1) if tensor.shape[1] == 1 else tensor.sum(1)


def _transposed(layout: Layout, ndim: int) -> Layout:
    """The layout after the last two dimensions have changed places."""
    dim = {ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(layout.dim, layout.dim)
    return Layout(dim, layout.per_record, layout.record_major)


RULES: RuleTable = {
    functional.linear: Linear(),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm), Product()),
    **dict.fromkeys((torch.addmm, Tensor.addmm), AddedProduct()),
}
