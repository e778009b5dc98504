"""The released model: weights with the architecture and the preprocessing beside them, usable without this package."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dpis.batches import flattened
from dpis.errors import InputError
from dpis.mechanism.sharded_state import is_sharded

METADATA_KEY = "dpis"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a reader of the weights needs.

    Attributes:
        architecture: a Python expression over ``torch`` and ``nn`` that builds the module; None where it is the
            user's own code.
        class_name: the module's class, for whoever has that code.
        preprocessing: what happens to an input before the module sees it, as JSON.
        preprocessing_source: the same as Python source that defines ``preprocess(inputs)``, or empty.
        classes: their names in the order of the outputs.
        task: "classification" or "regression".
    """

    architecture: str | None
    class_name: str
    preprocessing: dict[str, Any] = field(default_factory=dict)
    preprocessing_source: str = ""
    classes: tuple[str, ...] | None = None
    task: str = "classification"


def card_of(module: nn.Module, **more: Any) -> ModelCard:
    """The card of a module; ``more`` are the other fields of the card."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return ModelCard(architecture=architecture_of(module), class_name=name, **more)


def architecture_of(module: nn.Module) -> str | None:
    """An expression that builds the module anew, if it is made of torch's own layers alone.

    Layers of ``torch.nn`` print as the call that makes them. Whether that is so is tried out, never assumed.

    Example:
        >>> architecture_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        'nn.Sequential(nn.Flatten(start_dim=1, end_dim=-1), nn.Linear(in_features=4, out_features=2, bias=True))'
    """
    expression = _expression(module)
    if expression is None:
        return None
    try:
        with torch.random.fork_rng(devices=()):
            again = build(expression)
    except (TypeError, ValueError, NameError, SyntaxError, AttributeError, RuntimeError):
        return None
    return expression if _alike(again, module) else None


def _alike(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules compute the same from the same weights: not all that decides is printed."""
    same = repr(a) == repr(b) and _tensors(a) == _tensors(b)
    layers = (dict(module.named_modules(remove_duplicate=False)).values() for module in (a, b))
    return same and all(
        _settings(one) == _settings(other) for one, other in zip(*layers, strict=True)
    )


def _settings(layer: nn.Module) -> dict[str, str]:
    own = {name: repr(value) for name, value in vars(layer).items() if not name.startswith("_")}
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    return {**own, "training": "", "hooks": repr(hooks)}


def _tensors(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in module.state_dict().items()}


def _expression(module: nn.Module) -> str | None:
    if type(module) is nn.Sequential:
        if list(module._modules) != [str(place) for place in range(len(module))]:
            return None
        parts = [_expression(child) for child in module]
        return None if None in parts else f"nn.Sequential({', '.join(map(str, parts))})"
    kind = type(module)
    is_torchs = kind.__module__.startswith("torch.nn.") and getattr(nn, kind.__name__, None) is kind
    if not is_torchs or any(True for _ in module.children()):
        return None
    return f"nn.{kind.__name__}({module.extra_repr()})"


def build(expression: str) -> nn.Module:
    """The module that an architecture's expression describes."""
    return _built(ast.parse(expression, mode="eval").body)


def _built(node: ast.expr) -> nn.Module:
    """A call of a layer of ``torch.nn`` with layers and plain values; nothing else is run, whoever wrote the file."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("nn"), name), arguments, keywords):
            kind = getattr(nn, name, None)
        case _:
            kind, arguments, keywords = None, [], []
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(f"not an architecture of torch's own layers: {ast.unparse(node)[:60]!r}")
    args = [_built(a) if isinstance(a, ast.Call) else ast.literal_eval(a) for a in arguments]
    settings = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    module: nn.Module = kind(*args, **settings)
    return module


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers on the CPU; of a sharded model gathered one by one, by all ranks together."""
    state = module.state_dict()
    whole = {n: v.full_tensor() if is_sharded(v) else v for n, v in state.items()}
    return {name: value.detach().cpu().contiguous().clone() for name, value in whole.items()}


def model_bytes(weights: dict[str, Tensor], card: ModelCard) -> bytes:
    """The file of weights and card; the same weights and card give the same bytes."""
    text = json.dumps(card.__dict__, sort_keys=True)
    return bytes(save(weights, metadata={METADATA_KEY: text}))


def weights_digest(module: nn.Module) -> str:
    """The sha256 of all parameters and buffers: the same for the same bits."""
    seen = hashlib.sha256()
    for name, value in module.state_dict().items():
        seen.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        seen.update(flattened(value.detach().cpu()).view(torch.uint8).numpy().data)
    return seen.hexdigest()


def load_card(path: Path) -> ModelCard:
    """The card of a released model."""
    try:
        with safe_open(path, "pt") as file:
            fields = json.loads((file.metadata() or {})[METADATA_KEY])
    except (OSError, SafetensorError, KeyError, ValueError):
        raise InputError(f"{path} is not a model that dpis released") from None
    fields["classes"] = None if fields["classes"] is None else tuple(fields["classes"])
    return ModelCard(**fields)


def load_weights(path: Path, module: nn.Module) -> nn.Module:
    """The module with released weights, ready to predict."""
    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(
            f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}"
        ) from None
    return module.eval()


LOADER = '''"""Use model.safetensors with plain PyTorch: `from model import load, preprocess`."""

import torch
from safetensors.torch import load_file
from torch import nn
{preprocessing}

def build():
    """The untrained network."""
    return {architecture}


def load(path="model.safetensors"):
    """The trained network, ready to predict."""
    model = build()
    model.load_state_dict(load_file(path))
    return model.eval()
'''

IDENTITY = '''

def preprocess(inputs):
    """Inputs are used as they are."""
    return inputs
'''


def loader_source(card: ModelCard) -> str | None:
    """A file of Python that builds and loads the model without dpis; None if the architecture is not known."""
    if card.architecture is None:
        return None
    preprocessing = card.preprocessing_source or IDENTITY
    return LOADER.format(
        architecture=card.architecture, preprocessing=preprocessing.rstrip("\n") + "\n"
    )
