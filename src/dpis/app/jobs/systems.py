"""Systems by name: a method, and the models that the name stands for."""

from __future__ import annotations

from dataclasses import dataclass

from dpis.errors import InputError
from dpis.options import Method


@dataclass(frozen=True, slots=True)
class System:
    """A way to train as people call it.

    Attributes:
        name: as on the command line.
        method: what the mechanism does.
        models: those that the name stands for, the first that fits the data by default; none: any.
    """

    name: str
    method: Method
    models: tuple[str, ...] = ()

    def require_model(self, name: str) -> None:
        """A name that promises a model must not run with another."""
        if self.models and name not in self.models:
            raise InputError(
                f"{self.name} is {self.method} on one of {', '.join(self.models)}, found --model {name}: "
                f"use --method {self.method}"
            )


SYSTEMS = {
    system.name: system
    for system in (
        *(System(method.value, method) for method in Method),
        System("dp-sgd-ts", Method.DP_SGD, ("cnn", "rnn-tanh")),  # tempered sigmoids: tanh
        System("dp-sgd-hf", Method.DP_SGD, ("scatter-cnn", "scatter-linear")),  # hand-made features
    )
}


def system(name: str) -> System:
    """The system of that name."""
    try:
        return SYSTEMS[name]
    except KeyError:
        raise InputError(f"--method must be one of {', '.join(SYSTEMS)}, found {name!r}") from None
