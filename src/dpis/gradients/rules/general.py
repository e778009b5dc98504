"""Any function at all: its own vector-Jacobian product, one record at a time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpis.gradients.factors import Dense
from dpis.gradients.rules.rule import Call, Factors, Ran, Rule, Watched, differentiable


@dataclass(frozen=True)
class General(Rule):
    """``G_i`` from ``torch.func.vjp`` of the function on a batch that holds record ``i`` alone.

    Attributes:
        rows_of: for each tensor among the arguments, flattened, the dimension that counts rows, or
            None where it does not depend on the batch.
    """

    rows_of: tuple[int | None, ...] = ()

    def run(self, call: Call) -> Ran:
        """Run the function; watch whatever of its result has a gradient."""
        result = call.result()
        held = tuple(t for t in arguments(call) if not call.wants(t))
        return Ran(result, differentiable(result), saved=call, held=held)

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Explicit gradients, by ``vmap`` over the records."""
        grad, layout = watched[0]
        leaves, spec = tree_flatten((saved.args, saved.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wanted = list({id(tensor): tensor for tensor in saved.parameters}.values())
        out_dim = layout.dim

        def gradients_of_one(g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            def function(*parameters: Tensor) -> Any:
                known = {id(old): new for old, new in zip(wanted, parameters, strict=True)}
                batches = (
                    new if dim is None else new.unsqueeze(dim)
                    for new, dim in zip(inputs, self.rows_of, strict=True)
                )
                given = (known.get(id(old), new) for old, new in zip(tensors, batches, strict=True))
                filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(filled, spec)
                return saved.function(*args, **kwargs)

            _, pull_back, *_ = torch.func.vjp(function, *wanted)
            return pull_back(g.unsqueeze(out_dim))  # type: ignore[no-any-return]

        every_record = torch.func.vmap(gradients_of_one, in_dims=(out_dim, *self.rows_of))
        detached = [tensor.detach() for tensor in tensors]
        with warnings.catch_warnings():  # we say ourselves, once, that this way is slow
            warnings.filterwarnings("ignore", message="There is a performance drop")
            explicit = every_record(grad.to(wanted[0].dtype), *detached)
        yield from ((p, Dense(gradients)) for p, gradients in zip(wanted, explicit, strict=True))


def arguments(call: Call) -> list[Tensor]:
    """All tensors among the arguments, in the order of ``General.rows_of``."""
    leaves, _ = tree_flatten((call.args, call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
