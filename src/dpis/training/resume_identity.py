"""What must not change between a run and its continuation, beside the data, as texts that can be compared."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpis.batches import flattened
from dpis.training.code_identity import class_code, function_code, name_of
from dpis.training.task import Task

Plain = str | bool | int | float | complex | None


def described(value: Any, met: dict[int, Any] | None = None) -> str:
    """A setting, a function or an object as text: its name, its code, its plain attributes. The same in every process.

    Code of installed packages shows by name alone.

    Args:
        value: anything.
        met: functions and classes that were described on the way here: once is enough.
    """
    met = {} if met is None else met

    def also(part: Any) -> str:
        return described(part, met)

    if isinstance(value, Plain):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_contents(value)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {also(v)}' for k, v in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(also, value))}]"
    if isinstance(value, functools.partial):
        return f"partial {also([value.func, value.args, value.keywords])}"
    if isinstance(value, MethodType):
        return f"{name_of(value)} {also([value.__func__, value.__self__])}"
    if isinstance(value, FunctionType | type):
        return f"{name_of(value)}{_code(value, met)}"
    if hasattr(value, "__qualname__"):
        return name_of(value)
    own = _plain_attributes(value)
    if isinstance(value, nn.Module):
        frozen = {n: p for n, p in value._parameters.items() if p is None or not p.requires_grad}
        tensors = value._buffers | frozen
        own |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
        own |= value._modules
    return f"{also(type(value))} {also(own)}"


def _contents(tensor: Tensor) -> str:
    return hashlib.sha256(flattened(tensor.cpu()).view(torch.uint8).numpy().data).hexdigest()


def _code(value: FunctionType | type, met: dict[int, Any]) -> str:
    if id(value) in met:
        return ""
    met[id(value)] = value

    def held(part: Any) -> str:
        """Of what a function holds or names only what does not change as it runs."""
        fixed = isinstance(part, Tensor) and not part.requires_grad
        shown = (FunctionType, MethodType, type, functools.partial, nn.Module, np.ndarray, dict)
        if fixed or _is_plain(part) or isinstance(part, shown):
            return described(part, met)
        return name_of(type(part))

    if isinstance(value, type):
        return class_code(value, held)
    return function_code(value, held)


def described_model(module: nn.Module) -> str:
    """Its layers with their settings, and which parameters are trained; not the values of weights and buffers."""
    layers = {name: _settings(layer) for name, layer in module.named_modules()}
    tensors = {name: f"{v.dtype} {tuple(v.shape)}" for name, v in module.state_dict().items()}
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    return described([layers, tensors, trained])


def described_optimizer(optimizer: Optimizer) -> str:
    """Its settings, group by group; of a learning rate that a schedule moves, the one it began with."""
    groups = []
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        settings["lr"] = group.get("initial_lr", group.get("lr"))
        groups.append({**settings, "params": len(group["params"])})
    hooks = _hooks(optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return f"{_kind(optimizer)} {described([groups, hooks])}"


def described_scheduler(scheduler: LRScheduler | ReduceLROnPlateau | None) -> str:
    """Its kind, its state, and the functions that it and its parts hold: these are not in its state."""
    if scheduler is None:
        return described(None)
    state = {name: v for name, v in scheduler.state_dict().items() if not _calls(v)}
    held = {name: _within(value) for name, value in vars(scheduler).items() if _calls(value)}
    return described([type(scheduler), state, held])


def _within(value: Any) -> Any:
    """A function, a scheduler as a text, or several."""
    if isinstance(value, list | tuple):
        return [_within(part) for part in value]
    return described_scheduler(value) if isinstance(value, LRScheduler) else value


def _calls(value: Any) -> bool:
    """Whether a scheduler asks it, or one of several: not the optimizer that all of them step."""
    if isinstance(value, list | tuple):
        return any(map(_calls, value))
    return isinstance(value, LRScheduler) or callable(value)


def _settings(layer: nn.Module) -> dict[str, Any]:
    own = _plain_attributes(layer)
    if "forward" in vars(layer):
        own["forward"] = described(vars(layer)["forward"])
    kinds = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
    if hooks := _hooks(layer, *kinds):
        own["hooks"] = described(hooks)
    return {"": _kind(layer), **own}


def _kind(value: object) -> str:
    """The name of its class, and what that does."""
    return f"{type(value).__qualname__}{_code(type(value), {})}"


def _hooks(owner: nn.Module | Optimizer, *kinds: str) -> list[Any]:
    """What is called around a layer or a step of an optimizer."""
    return [hook for kind in kinds for hook in getattr(owner, kind).values()]


def _plain_attributes(value: object) -> dict[str, Any]:
    """Numbers, texts and lists of these; not whether a layer is in training mode at the moment."""
    own = getattr(value, "__dict__", {})
    return {name: v for name, v in own.items() if _is_plain(v) and name != "training"}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, Plain)


def evaluation_layers(model: nn.Module) -> set[nn.Module]:
    """Layers that stay in evaluation mode: put there one by one, or normalising by fixed statistics."""
    return {
        layer
        for layer in model.modules()
        if not layer.training and (model.training or isinstance(layer, _BatchNorm))
    }


def identity_of(task: Task, in_evaluation: set[nn.Module]) -> dict[str, str]:
    """What must not change between a run and its continuation, beside the data."""
    records = task.records
    names = [name for name, layer in task.model.named_modules() if layer in in_evaluation]
    held_out = task.held_out
    return {
        "the model": described_model(task.model),
        "its layers in evaluation mode": described(names),
        "the loss": described(task.loss if task.objective is None else task.objective),
        "the optimizer": described_optimizer(task.optimizer),
        "the scheduler": f"{task.scheduler_interval} {described_scheduler(task.scheduler)}",
        "the moving average": described(task.average and task.average.decay),
        "the rows of a record": described(
            [records.max_rows_per_user, records.views, records.augmentations]
        ),
        "the augmentation": described(records.augment),
        "the collate function": described(records.collate_fn),
        "the physical batch": described(task.physical_batch),
        "the early stop": repr(task.early_stop),
        "the held-out metrics": described(held_out and held_out.metrics),
        "the collate function of held-out data": described(held_out and held_out.collate_fn),
    }
