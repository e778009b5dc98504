"""Slow and simple: per-record gradients that are hard to get wrong."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dpis import batches


def mean_over_rows(problem: Any, module: nn.Module, rows: Any) -> Tensor:
    return problem.objective(module, rows).mean()


def by_loop(problem: Any, module: nn.Module, batch: Any) -> dict[str, Tensor]:
    """One record after the other, plain autograd."""
    K = problem.rows_per_record
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    records = batches.rows(batch) // K
    gradients = []
    for i in range(records):
        own = batches.apply(lambda t, i=i: t[i * K : (i + 1) * K], batch)
        loss = mean_over_rows(problem, module, own)
        gradients.append(torch.autograd.grad(loss, list(trainable.values())))
    return {n: torch.stack(g) for n, g in zip(trainable, zip(*gradients, strict=True), strict=True)}


def by_vmap(problem: Any, module: nn.Module, batch: Any) -> dict[str, Tensor]:
    """``torch.func.vmap(grad)``."""
    K = problem.rows_per_record
    trainable = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, rows: Any) -> Tensor:
            return mean_over_rows(problem, self.m, rows)

    whole = Loss()

    def loss(parameters: dict[str, Tensor], rows: Any) -> Tensor:
        named = {f"m.{n}": p for n, p in parameters.items()}
        return torch.func.functional_call(whole, named, (rows,))

    grouped = batches.apply(lambda t: t.reshape(-1, K, *t.shape[1:]), batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(trainable, grouped)


def norms(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], dim=1).norm(dim=1)


def weighted_sum(gradients: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    return {n: torch.tensordot(weights.to(g), g, dims=1) for n, g in gradients.items()}
