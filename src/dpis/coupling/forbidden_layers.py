"""What couples records, or hides them, is refused; ``fix`` replaces what can be replaced."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpis.coupling.model_parts import parts_of
from dpis.errors import CouplingError, InputError
from dpis.group import warn


class FrozenNormWarning(UserWarning):
    """Frozen batch normalisation was put in evaluation mode."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"batch normalisation that is frozen ('{name}' is the first) was put in evaluation mode, and stays there: "
            "in training mode it normalises by the batch, and would keep statistics of private records without noise"
        )


_TOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fix_frozen_statistics(module: nn.Module) -> None:
    """Batch normalisation whose parameters are all frozen goes by the statistics it has: nobody is coupled by these."""
    _fix_frozen(module, _layers(module))


def _fix_frozen(module: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
    frozen = {
        name: layer
        for name, layer in layers
        if isinstance(layer, _BatchNorm)
        and layer.training
        and layer.running_mean is not None
        and layer.affine
        and not any(parameter.requires_grad for parameter in layer.parameters())
    }
    for layer in frozen.values():
        layer.eval()
    if frozen and module not in _TOLD:
        _TOLD.add(module)
        warn(FrozenNormWarning(next(iter(frozen))), stacklevel=2)


def checked_model(module: nn.Module) -> nn.Module:
    """The module that will be run, once nothing in it couples records by design.

    Frozen batch normalisation is put in evaluation mode. A module made by ``torch.compile`` is replaced by its
    original: the compiled graph cannot be looked into. Its parameters are the same.

    Raises:
        CouplingError: for batch normalisation in training mode, running statistics, and tables with a ``max_norm``.
        InputError: for TorchScript.
    """
    module = getattr(module, "_orig_mod", module)
    layers = _layers(module)
    _fix_frozen(module, layers)
    for name, layer in layers:
        if isinstance(layer, torch.jit.ScriptModule):
            raise InputError(
                f"A module of torch.nn was required, '{name or type(layer).__name__}' is a "
                "TorchScript module: what it calls cannot be seen, so gradients of single records "
                "cannot be computed and nothing could be clipped. Give the module it was made from."
            )
        problem = _coupling(layer)
        if problem is not None:
            raise CouplingError(
                f"Layer '{name or 'module'}' ({type(layer).__name__}) {problem}. Records then "
                "influence one another and the privacy guarantee does not hold. Call "
                "dpis.fix(module), or put the layer in evaluation mode."
            )
    return module


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that must be looked at before every pass, since a mode or a setting may have changed."""
    own = [("", module)] if isinstance(module, _LOOKED_AT) else []
    return own + parts_of(module).of_kinds(_LOOKED_AT)


_LOOKED_AT = (_BatchNorm, _InstanceNorm, nn.Embedding, nn.EmbeddingBag, torch.jit.ScriptModule)


def _coupling(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return "normalises by statistics of the whole batch"
    if isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats:
        return "keeps running statistics of the records it sees"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return "writes to its table which rows were looked up (max_norm), in any mode"
    return None


@dataclass(frozen=True)
class Change:
    """One thing that ``fix`` did.

    Attributes:
        layer: the name of the layer.
        what: what was done to it.
    """

    layer: str
    what: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}"


def fix(
    module: nn.Module, *, num_groups: int | None = None, replace_bn_with_in: bool = False
) -> tuple[nn.Module, tuple[Change, ...]]:
    """A copy of the module without what couples records, and the list of what was changed.

    - ``BatchNorm`` becomes ``GroupNorm`` with the same scale and shift;
    - ``InstanceNorm`` no longer keeps running statistics;
    - tables no longer shorten the rows that are looked up (``max_norm``);
    - activations no longer work in place.

    Args:
        module: the model; stays as it is.
        num_groups: of every ``GroupNorm``. None: 32, or the largest part of it that divides the channels.
        replace_bn_with_in: ``BatchNorm`` becomes ``InstanceNorm`` instead.

    Returns:
        The new module and the changes. Where nothing was to be done the module is equal to the old.

    Example:
        >>> fixed, changes = fix(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True)))
        >>> for change in changes: print(change)
        1: BatchNorm2d(8) -> GroupNorm(8, 8)
        2: ReLU no longer in place
    """
    if replace_bn_with_in and num_groups is not None:
        raise InputError("num_groups has no effect with replace_bn_with_in=True: give one of them")
    root = nn.ModuleDict({"module": copy.deepcopy(getattr(module, "_orig_mod", module))})
    by_record = _to_instance_norm if replace_bn_with_in else partial(_to_group_norm, num_groups)
    changes = tuple(_fix_children(root, "", ((_is_batch_norm, by_record), *_REPAIRS)))
    return root["module"], changes


def _fix_children(parent: nn.Module, path: str, repairs: Sequence[_Repair]) -> Iterator[Change]:
    for key, child in list(parent.named_children()):
        name = f"{path}.{key}" if path else key
        shown = name.removeprefix("module").removeprefix(".") or type(child).__name__
        for applies, repair in repairs:
            if applies(child):
                repaired, what = repair(child)
                parent._modules[key] = repaired
                yield Change(shown, what)
        yield from _fix_children(child, name, repairs)


def _is_batch_norm(layer: Any) -> bool:
    return isinstance(layer, _BatchNorm)


def _to_group_norm(num_groups: int | None, layer: Any) -> tuple[nn.Module, str]:
    channels = layer.num_features
    groups = gcd(channels, 32) if num_groups is None else num_groups
    if channels % groups:
        raise InputError(
            f"num_groups={groups} does not divide the {channels} channels of a {type(layer).__name__}: leave it out, "
            "or give a number that divides the channels of all of them"
        )
    while (
        num_groups is None
        and isinstance(layer, nn.BatchNorm1d)
        and groups > 1
        and channels // groups < 8
    ):
        groups //= 2  # without positions, a group of one channel would be normalised to nothing
    new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    return _in_place_of(layer, new), f"{_shown(layer)} -> GroupNorm({groups}, {channels})"


def _to_instance_norm(layer: Any) -> tuple[nn.Module, str]:
    kinds: dict[type[nn.Module], type[_InstanceNorm]] = {
        nn.BatchNorm1d: nn.InstanceNorm1d,
        nn.BatchNorm2d: nn.InstanceNorm2d,
        nn.BatchNorm3d: nn.InstanceNorm3d,
    }
    if type(layer) not in kinds:
        raise InputError(
            f"{type(layer).__name__} has no InstanceNorm of its own: leave replace_bn_with_in out"
        )
    new = kinds[type(layer)](layer.num_features, eps=layer.eps, affine=layer.affine)
    return _in_place_of(layer, new), f"{_shown(layer)} -> {_shown(new)}"


def _in_place_of(layer: Any, new: nn.Module) -> nn.Module:
    """The new layer, with scale, shift and mode of the old."""
    if layer.affine:
        new = new.to(layer.weight.device, layer.weight.dtype)
        new.weight, new.bias = layer.weight, layer.bias
    return new.train(layer.training)


def _shown(layer: Any) -> str:
    return f"{type(layer).__name__}({layer.num_features})"


def _without_statistics(layer: Any) -> tuple[nn.Module, str]:
    layer.track_running_stats = False
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return layer, f"{type(layer).__name__} no longer keeps running statistics"


def _without_longest_row(layer: Any) -> tuple[nn.Module, str]:
    layer.max_norm = None
    return layer, f"{type(layer).__name__} no longer shortens the rows it looks up"


def _out_of_place(layer: Any) -> tuple[nn.Module, str]:
    layer.inplace = False
    return layer, f"{type(layer).__name__} no longer in place"


_Repair = tuple[Callable[[Any], bool], Callable[[Any], tuple[nn.Module, str]]]
_REPAIRS: tuple[_Repair, ...] = (
    (
        lambda layer: isinstance(layer, _InstanceNorm) and layer.track_running_stats,
        _without_statistics,
    ),
    (
        lambda layer: getattr(layer, "max_norm", None) is not None,
        _without_longest_row,
    ),
    (lambda layer: getattr(layer, "inplace", False) is True, _out_of_place),
)
