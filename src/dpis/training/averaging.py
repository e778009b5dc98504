"""An exponential moving average of the weights: free, since it is computed from released values alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpis.errors import InputError


class WeightAverage:
    """``average <- d·average + (1-d)·weights`` after every step, ``d = min(decay, (1+t)/(10+t))``.

    The warm-up forgets the untrained weights soon.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(f"ema must lie strictly between 0 and 1, found {decay!r}")
        self.decay = decay
        self.steps = 0
        self.average = {name: p.detach().clone() for name, p in _trained(module)}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take in the weights as they are now."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, parameter in _trained(module):
            self.average[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """The module with averaged weights; with its own again, afterwards."""
        own = {name: p.detach().clone() for name, p in _trained(module)}
        _copy(self.average, module)
        try:
            yield
        finally:
            _copy(own, module)

    def put_into(self, module: nn.Module) -> None:
        """The module with averaged weights, for good."""
        _copy(self.average, module)

    def state_dict(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"steps": self.steps, "average": self.average}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """From a checkpoint."""
        steps, average = state["steps"], state["average"]
        assert isinstance(steps, int)
        assert isinstance(average, dict)
        self.steps = steps
        for name, own in self.average.items():
            own.copy_(average[name])  # stays on its device


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], module: nn.Module) -> None:
    for name, parameter in _trained(module):
        parameter.copy_(values[name])
