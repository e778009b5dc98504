"""The layers, parameters and buffers of a model: walked once, and again only where something was exchanged.

Every step asks for them several times, and a walk as torch does it takes a millisecond for a few hundred layers. What
a layer holds stands in three tables of its own. As long as all of these hold the same objects under the same names, a
walk would find what the last one found.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

Kinds = tuple[type[nn.Module], ...]


@dataclass(frozen=True, eq=False)
class ModelParts:
    """What a walk found.

    Attributes:
        layers: by name, without the model itself.
        parameters: by name.
        buffers: by name.
    """

    layers: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    _contents: list[Any]
    _of_kinds: dict[Kinds, list[tuple[str, nn.Module]]] = field(default_factory=dict)

    @classmethod
    def found_in(cls, module: nn.Module) -> ModelParts:
        """Walk."""
        layers = {name: layer for name, layer in module.named_modules() if layer is not module}
        return cls(
            MappingProxyType(layers),
            MappingProxyType(dict(module.named_parameters())),
            MappingProxyType(dict(module.named_buffers())),
            _contents_of(module, layers),
        )

    def still_in(self, module: nn.Module) -> bool:
        """Whether a walk would find the same."""
        now = _contents_of(module, self.layers)
        return len(now) == len(self._contents) and all(map(is_, now, self._contents))

    def of_kinds(self, kinds: Kinds) -> list[tuple[str, nn.Module]]:
        """The layers that are of one of these classes, by name."""
        if kinds not in self._of_kinds:
            self._of_kinds[kinds] = [
                each for each in self.layers.items() if isinstance(each[1], kinds)
            ]
        return self._of_kinds[kinds]


_LAST: MutableMapping[nn.Module, ModelParts] = WeakKeyDictionary()
"""What was found last. Nothing in there holds the model itself."""

_TABLES = attrgetter("_parameters", "_buffers", "_modules")
_NAMES, _OBJECTS = methodcaller("keys"), methodcaller("values")


def parts_of(module: nn.Module) -> ModelParts:
    """What a model is made of, now.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False))
        >>> list(parts_of(model).parameters)
        ['0.weight']
        >>> model.append(nn.Linear(2, 1, bias=False)) and list(parts_of(model).parameters)
        ['0.weight', '1.weight']
    """
    known = _LAST.get(module)
    if known is None or not known.still_in(module):
        known = _LAST[module] = ModelParts.found_in(module)
    return known


def _contents_of(module: nn.Module, layers: Mapping[str, nn.Module]) -> list[Any]:
    """Sizes, names and objects of every table of every layer."""
    tables = [*chain.from_iterable(map(_TABLES, (module, *layers.values())))]
    filled = [*filter(len, tables)]
    return [*map(len, tables), *chain(*map(_NAMES, filled)), *chain(*map(_OBJECTS, filled))]
