"""Schedules of noise and clip norm, set on a private optimizer once an epoch; the names are those of Opacus.

    scheduler = ExponentialNoise(optimizer, gamma=0.99)
    for epoch in range(10):
        ...                     # train
        scheduler.step()        # as with a learning rate

A schedule is public: it must follow from the number of the epoch alone, not from losses. Every step is charged with the
noise it has, so ``get_epsilon`` is right. Where an epsilon was promised (``make_private_with_epsilon``) noise may grow,
not shrink: a fall must be planned (``method="dp-sgd-decay"``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Scheduler(ABC):
    """Sets one number of a private optimizer: when it is made, and at every `step`.

    Args:
        optimizer: the private optimizer.
        last_epoch: the number of the last epoch, to go on from; -1: none.
    """

    attribute: str
    """Of the optimizer."""

    def __init__(self, optimizer: Any, *, last_epoch: int = -1) -> None:
        self.optimizer, self.last_epoch = optimizer, last_epoch
        self.base = self.value  # of an optimizer that is not private: an AttributeError
        self.step()

    @property
    def value(self) -> float:
        """The number as it is."""
        return float(getattr(self.optimizer, self.attribute))

    @abstractmethod
    def next_value(self) -> float:
        """The number for the epoch ``last_epoch``."""

    def step(self) -> None:
        """An epoch has ended."""
        self.last_epoch += 1
        setattr(self.optimizer, self.attribute, self.next_value())

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on, without optimizer and functions."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "optimizer" and not callable(value)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where that state was taken. The optimizer's own number comes with the engine's checkpoint."""
        self.__dict__.update(state_dict)


class _Exponential(Scheduler):
    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self) -> float:
        return self.value * (self.gamma if self.last_epoch else 1.0)


class _Stepwise(Scheduler):
    def __init__(
        self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self) -> float:
        due = self.last_epoch and self.last_epoch % self.step_size == 0
        return self.value * (self.gamma if due else 1.0)


class _Lambda(Scheduler):
    def __init__(
        self, optimizer: Any, factor: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.factor = factor
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self) -> float:
        return self.base * self.factor(self.last_epoch)


class ExponentialNoise(_Exponential):
    """The noise times ``gamma`` at every step."""

    attribute = "noise_multiplier"


class StepNoise(_Stepwise):
    """The noise times ``gamma`` at every ``step_size``-th step."""

    attribute = "noise_multiplier"


class LambdaNoise(_Lambda):
    """The first noise times ``noise_lambda(epoch)``."""

    attribute = "noise_multiplier"

    def __init__(
        self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, noise_lambda, last_epoch)


class ExponentialGradClip(_Exponential):
    """The clip norm times ``gamma`` at every step."""

    attribute = "max_grad_norm"


class StepGradClip(_Stepwise):
    """The clip norm times ``gamma`` at every ``step_size``-th step."""

    attribute = "max_grad_norm"


class LambdaGradClip(_Lambda):
    """The first clip norm times ``scheduler_function(epoch)``."""

    attribute = "max_grad_norm"

    def __init__(
        self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, scheduler_function, last_epoch)
