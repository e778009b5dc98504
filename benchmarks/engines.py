"""The ways to a private step that are compared, each as a step without an argument.

Two amounts of work (`WORK`). ``gradients`` is what an update needs before noise: forward, backward,
the norm of every record, clipping, the sum; the step returns its sum, so that a wrong engine does
not win (plain SGD does not clip, so its sum does not compare). ``step`` is the whole step of a loop
that was made private: drawing, collating, gradients, noise, optimizer. The data set is one batch
and the sampling rate 1, so that every draw has all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import Batch, Task

Step = Callable[[], list[Tensor] | None]
Engine = Callable[[Task, Batch], Step]

CLIP_NORM, LEARNING_RATE = 1.0, 0.01


class UnsupportedError(Exception):
    """The engine cannot run this model.

    Attributes:
        short: why, in two words.
    """

    def __init__(self, error: BaseException) -> None:
        lines = str(error).strip().splitlines() or [""]
        super().__init__(f"{type(error).__name__}: {lines[0]}"[:200])
        self.short = _in_two_words(error)


def prepared(engine: str, work: str, task: Task, batch: Batch) -> Step:
    """The engine's step on its own copy of the model; nothing was run.

    Raises:
        UnsupportedError: the engine refuses the model, or is not installed.
    """
    own = Task(copy.deepcopy(task.model), task.batch, copy.deepcopy(task.loss))
    return attempted(lambda: WORK[work][engine](own, batch))


def attempted(action: Callable[[], Any]) -> Any:
    """Whatever an engine raises, as one error that says why in short."""
    try:
        return action()
    except Exception as error:
        raise UnsupportedError(error) from error


def norm(gradients: Iterable[Tensor]) -> float:
    """The norm over all parameters; taken outside of what is timed."""
    return float(sum(gradient.double().square().sum() for gradient in gradients)) ** 0.5


# ── plain SGD, the unit ──────────────────────────────────────────────────────────────────────────


def sgd_gradients(task: Task, batch: Batch) -> Step:
    inputs, targets = batch

    def step() -> list[Tensor]:
        task.loss(task.model(inputs), targets).backward()
        gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
        task.model.zero_grad()
        return gradients

    return step


def sgd_step(task: Task, batch: Batch) -> Step:
    return loop(task.model, optimizer_of(task.model), loader_of(batch), task.loss)


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────


def dpis_gradients(task: Task, batch: Batch) -> Step:
    from dpis.gradients import RecordGradients

    gradients = RecordGradients(task.model, task.loss, chunk=len(batch[1]))

    def step() -> list[Tensor]:
        clipped = gradients(batch, lambda norms, _: (CLIP_NORM / norms).clamp(max=1.0))
        return list(clipped.sums.values())

    return step


def dpis_step(task: Task, batch: Batch) -> Step:
    from dpis import PrivacyEngine

    parts = PrivacyEngine().make_private(
        module=task.model,
        optimizer=optimizer_of(task.model),
        data_loader=loader_of(batch),
        noise_multiplier=1.0,
        max_grad_norm=CLIP_NORM,
        method="dp-sgd",
        n_public=len(batch[1]),
    )
    return loop(*parts, task.loss)


# ── Opacus ───────────────────────────────────────────────────────────────────────────────────────


def opacus_parts(task: Task, batch: Batch, mode: str) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and loss, private; layers that Opacus replaces are replaced."""
    from opacus import PrivacyEngine
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(task.model)
    wrapped = (
        GradSampleModuleFastGradientClipping(model, strict=False, max_grad_norm=CLIP_NORM)
        if mode == "ghost"
        else GradSampleModule(model, strict=False, force_functorch=mode == "functorch")
    )
    model, optimizer, *loss, loader = PrivacyEngine().make_private(
        module=wrapped,
        optimizer=optimizer_of(wrapped),
        data_loader=loader_of(batch),
        criterion=task.loss,
        noise_multiplier=1.0,
        max_grad_norm=CLIP_NORM,
        grad_sample_mode=mode,
    )
    return model, optimizer, loader, loss[0] if loss else task.loss


def opacus_gradients(mode: str) -> Engine:
    def made(task: Task, batch: Batch) -> Step:
        model, optimizer, _, loss = opacus_parts(task, batch, mode)
        inputs, targets = batch

        def step() -> list[Tensor]:
            loss(model(inputs), targets).backward()
            optimizer.accumulate() if mode == "ghost" else optimizer.clip_and_accumulate()
            sums = [p.summed_grad for p in optimizer.params]
            optimizer.zero_grad()
            return sums

        return step

    return made


def opacus_step(mode: str) -> Engine:
    return lambda task, batch: loop(*opacus_parts(task, batch, mode))


# ── Opake ────────────────────────────────────────────────────────────────────────────────────────


def opake_parts(task: Task) -> tuple[Any, Any, dict[str, Tensor]]:
    """The clipped sum of gradients as a function, its state, and the trainable parameters."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.functional import make_functional
    from opake.patches import apply_runtime_patches

    apply_runtime_patches()
    function, trainable, frozen = make_functional(
        task.model, disable_autograd_tracking=True, partition_trainable=True
    )

    def loss_of(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
        return task.loss(function({**frozen, **parameters}, inputs[None]), target[None])

    summed, state = clipped_grad(loss_of, clipping_norm=CLIP_NORM, batch_argnums=(1, 2))
    return summed, state, trainable


def opake_gradients(task: Task, batch: Batch) -> Step:
    summed, state, trainable = opake_parts(task)
    return lambda: list(summed(trainable, *batch, state=state)[0].pytree.values())


def opake_step(task: Task, batch: Batch) -> Step:
    from opake.dpsgd.noise import gaussian_noise
    from opake.optimizers import sgd
    from opake.random import key
    from torchopt import apply_updates

    summed, clip_state, parameters = opake_parts(task)
    add_noise, noise_state = gaussian_noise(noise_multiplier=1.0, key=key(0))
    optimizer = sgd(lr=LEARNING_RATE / len(batch[1]))
    optimizer_state = optimizer.init(parameters)
    loader = loader_of(batch)

    def step() -> None:
        nonlocal clip_state, noise_state, optimizer_state
        for inputs, targets in loader:
            sums, clip_state = summed(parameters, inputs, targets, state=clip_state)
            noisy, noise_state = add_noise(sums, noise_state)
            updates, optimizer_state = optimizer.update(noisy, optimizer_state)
            apply_updates(parameters, updates, inplace=True)

    return step


WORK: dict[str, dict[str, Engine]] = {
    "gradients": {
        "sgd": sgd_gradients,
        "dpis": dpis_gradients,
        "opacus hooks": opacus_gradients("hooks"),
        "opacus ghost": opacus_gradients("ghost"),
        "opacus functorch": opacus_gradients("functorch"),
        "opake": opake_gradients,
    },
    "step": {
        "sgd": sgd_step,
        "dpis": dpis_step,
        "opacus hooks": opacus_step("hooks"),
        "opacus ghost": opacus_step("ghost"),
        "opacus functorch": opacus_step("functorch"),
        "opake": opake_step,
    },
}
ENGINES = tuple(WORK["gradients"])


# ── what several engines need ────────────────────────────────────────────────────────────────────


def loop(model: nn.Module, optimizer: Any, loader: Any, loss_of: Any) -> Step:
    """One pass over the loader, which is one step. Between steps nobody holds gradients."""

    def step() -> None:
        for inputs, targets in loader:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def loader_of(batch: Batch) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch), batch_size=len(batch[1]))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)


def _in_two_words(error: BaseException) -> str:
    said = str(error).lower()
    for sign, words in (
        ("no module named", "not installed"),
        ("allocate", "no memory"),
        ("tying", "tied weights"),
        ("batching rule", "no vmap"),
        ("expected a proper tensor", "no vmap"),  # a recurrent kernel, asked by torch.func
    ):
        if sign in said:
            return words
    return f"raises {type(error).__name__}"
