"""The ways to a clipped, summed gradient that are compared: each a step without an argument.

A step does what a private update needs before noise: forward, backward, the norm of every record,
clipping, the sum. No engine adds noise or updates the model. A step returns its sum, so that a
wrong engine does not win; plain SGD sums without clipping and the norms-only step sums nothing, so
theirs do not compare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], list[Tensor]]
Batch = tuple[Tensor, Tensor]

CLIP_NORM = 1.0


class UnsupportedError(Exception):
    """The engine cannot run this model; the message says why."""


def sgd(model: nn.Module, batch: Batch) -> Step:
    """The yardstick: an ordinary mean loss and its gradient."""
    loss_of = nn.CrossEntropyLoss()
    inputs, targets = batch

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        loss_of(model(inputs), targets).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return step


def ours(model: nn.Module, batch: Batch, kept: int | None) -> Step:
    """``dpis.gradients``; ``kept`` is 1 for all weights, 5 for one in five, None for norms alone."""
    from dpis.gradients import RecordGradients

    gradients = RecordGradients(model, nn.CrossEntropyLoss(), chunk=len(batch[1]))

    def weigh(norms: Tensor, records: Tensor) -> Tensor:
        if kept is None:
            return torch.zeros_like(norms)
        weights = (CLIP_NORM / norms).clamp(max=1.0)
        return torch.where(records % kept == 0, weights, 0.0)

    def step() -> list[Tensor]:
        return list(gradients(batch, weigh).sums.values())

    return step


def opacus_explicit(model: nn.Module, batch: Batch, mode: str) -> Step:
    """Opacus with every record's gradient held: mode ``hooks`` or ``functorch``."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    inputs, targets = batch
    wrapped = GradSampleModule(fixed(model), strict=False, force_functorch=mode == "functorch")
    optimizer = DPOptimizer(
        torch.optim.SGD(trainable(wrapped), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(targets),
    )
    loss_of = nn.CrossEntropyLoss()

    def step() -> list[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss_of(wrapped(inputs), targets).backward()
        optimizer.clip_and_accumulate()
        return [p.summed_grad for p in optimizer.params]

    return step


def opacus_ghost(model: nn.Module, batch: Batch) -> Step:
    """Opacus with norms from the first of two backward passes, and the sum from the second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    inputs, targets = batch
    wrapped = GradSampleModuleFastGradientClipping(
        fixed(model), strict=False, max_grad_norm=CLIP_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(trainable(wrapped), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(targets),
    )
    loss_of = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> list[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss_of(wrapped(inputs), targets).backward()
        optimizer.accumulate()
        return [p.summed_grad for p in optimizer.params]

    return step


def fixed(model: nn.Module) -> nn.Module:
    """The model with the layers that Opacus replaces (LSTM, multi-head attention) replaced."""
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(model)


def trainable(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def norm(gradients: Iterable[Tensor]) -> float:
    """The norm over all parameters; taken outside of what is timed."""
    return float(sum(gradient.double().square().sum() for gradient in gradients)) ** 0.5


ENGINES: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "sgd": sgd,
    "dpis norms": lambda model, batch: ours(model, batch, None),
    "dpis norms+sum": lambda model, batch: ours(model, batch, 1),
    "dpis norms+sum 1/5": lambda model, batch: ours(model, batch, 5),
    "opacus hooks": lambda model, batch: opacus_explicit(model, batch, "hooks"),
    "opacus ghost": opacus_ghost,
    "opacus functorch": lambda model, batch: opacus_explicit(model, batch, "functorch"),
}


def prepared(engine: str, model: nn.Module, batch: Batch) -> Step:
    """The engine's step on its own copy of the model, run once.

    Raises:
        UnsupportedError: The engine does not know a layer of the model, or is not installed.
    """
    try:
        step = ENGINES[engine](copy.deepcopy(model), batch)
        step()
    except ModuleNotFoundError as error:
        extra = "pip install 'dpis[bench]'" if error.name == "opacus" else error.name
        raise UnsupportedError(f"not installed: {extra}") from error
    except Exception as error:
        raise UnsupportedError(first_line(error)) from error
    return step


def first_line(error: Any) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]
