"""Tables that are looked up: ``embedding`` and ``embedding_bag``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from dpis.errors import CouplingError
from dpis.gradients.factors import Lookup
from dpis.gradients.rules.rule import Call, Factors, ParameterFactor, Ran, Rule, RuleTable, Watched


class Table(Rule):
    """What both have in common: two options that look at the whole batch are refused."""

    reads_parameters = False

    def compute(self, call: Call) -> Tensor:
        """Look up."""
        if call.argument(3, "max_norm") is not None:
            raise _refusal("max_norm", "rescales rows for all records that look them up")
        if call.argument(5, "scale_grad_by_freq", False):
            raise _refusal("scale_grad_by_freq", "divides by counts over the batch")
        found: Tensor = call.result()
        return found


class Embedding(Table):
    """``y_l = W[index_l]``: the gradient of table row ``v`` is ``Σ_l [index_l = v] g_l``."""

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Indices and output gradients."""
        grad, layout = watched[0]
        indices = layout.rows_first(saved.argument(0, "input"))
        yield self._lookup(saved, indices, layout.rows_first(grad))

    def pull_back(self, call: Call, grads: Tensor) -> Factors:
        """All records look up the same indices (positions, say), each with its own gradients."""
        indices = call.argument(0, "input")
        yield self._lookup(call, indices.expand(len(grads), *indices.shape), grads)

    def _lookup(self, call: Call, indices: Tensor, g: Tensor) -> ParameterFactor:
        weight, padding = call.argument(1, "weight"), call.argument(2, "padding_idx")
        indices = indices.reshape(len(g), -1)
        g = g.reshape(*indices.shape, weight.shape[1])
        if padding is not None:  # its gradient counts nothing
            g = g.masked_fill((indices == padding % weight.shape[0])[:, :, None], 0.0)
        return weight, Lookup(indices, g, weight.shape[0])


class EmbeddingBag(Table):
    """Sum or mean of the rows of each bag; a bag's output gradient goes to all its entries."""

    def accepts(self, call: Call) -> bool:
        """Sums and means of a table; fixed weights of the entries."""
        summed = call.argument(6, "mode", "mean") in ("sum", "mean")
        return summed and not call.wants(call.argument(8, "per_sample_weights"))

    def run(self, call: Call) -> Ran:
        """Bags that begin at offsets are as long as the batch has them."""
        return replace(super().run(call), batch_shaped=call.argument(2, "offsets") is not None)

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Every entry of a bag has the bag's gradient times its share."""
        grad = watched[0].grad
        indices, weight = saved.argument(0, "input"), saved.argument(1, "weight")
        padding = saved.argument(10, "padding_idx")
        shares = saved.argument(8, "per_sample_weights")
        shares = torch.ones_like(indices, dtype=grad.dtype) if shares is None else shares
        if padding is not None:
            shares = shares * (indices != padding % weight.shape[0])
        offsets = saved.argument(2, "offsets")
        if offsets is not None:
            last_included = saved.argument(9, "include_last_offset", False)
            offsets = offsets[:-1] if last_included else offsets
            indices, shares = _padded_bags(indices, shares, offsets)
        if saved.argument(6, "mode", "mean") == "mean":
            shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
        entries = shares[:, :, None] * grad[:, None, :]
        yield weight, Lookup(indices, entries, weight.shape[0])


def _padded_bags(indices: Tensor, shares: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Bags of unequal length as the rows of a rectangle; what is padded has no share."""
    place = torch.arange(len(indices), device=indices.device)
    bag = torch.bucketize(place, offsets, right=True) - 1
    column = place - offsets[bag]
    width = int(column.max()) + 1 if len(indices) else 1
    rectangle = indices.new_zeros(len(offsets), width)
    rectangle_shares = shares.new_zeros(len(offsets), width)
    rectangle[bag, column] = indices
    rectangle_shares[bag, column] = shares
    return rectangle, rectangle_shares


def _refusal(option: str, what: str) -> CouplingError:
    return CouplingError(
        f"An embedding with {option} {what}: a record's gradient then depends on who shares its "
        f"batch, and the privacy guarantee does not hold. Build the layer without {option}."
    )


RULES: RuleTable = {functional.embedding: Embedding(), functional.embedding_bag: EmbeddingBag()}
