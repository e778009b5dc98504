"""What a trainer must be told to make its run private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.dropin import PrivacyEngine
from dpis.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The guarantee of a run: an epsilon to keep, or a noise multiplier to train with.

    Attributes:
        max_grad_norm: the clip norm of a record's gradient.
        target_epsilon: what the whole run may spend; or leave it out and give ``noise_multiplier``.
        target_delta: of the guarantee.
        noise_multiplier: noise over the largest contribution of a record; epsilon then grows with every step.
        n_public: a public number of records; default ``len(dataset)``, which is then treated as public.
        sampling: "importance", or "uniform" (DP-SGD).
        mode: "predeclared" or "adaptive", with ``target_epsilon``.
        k: headroom of importance sampling.
        kappa: norm utilisation.
        seed: repeatable randomness, for tests and research: nothing of it may be released.

    Example:
        >>> Privacy(max_grad_norm=1.0, target_epsilon=3.0).target_delta
        1e-05
        >>> Privacy(max_grad_norm=1.0)
        Traceback (most recent call last):
        ...
        dpis.errors.InputError: give either target_epsilon or noise_multiplier, found neither
    """

    max_grad_norm: float
    target_epsilon: float | None = None
    target_delta: float = 1e-5
    noise_multiplier: float | None = None
    n_public: int | None = None
    sampling: str = "importance"
    mode: str = "predeclared"
    k: float = 5.0
    kappa: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            found = "neither" if self.target_epsilon is None else "both"
            raise InputError(f"give either target_epsilon or noise_multiplier, found {found}")
        if self.noise_multiplier is not None and self.mode != "predeclared":
            raise InputError("mode='adaptive' solves the noise itself: give target_epsilon")

    def make_private(
        self,
        engine: PrivacyEngine,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        epochs: int,
    ) -> tuple[Any, ...]:
        """``engine.make_private_with_epsilon``, or ``make_private`` where the noise is given."""
        common: dict[str, Any] = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": data_loader,
            "max_grad_norm": self.max_grad_norm,
            "sampling": self.sampling,
            "k": self.k,
            "kappa": self.kappa,
            "n_public": self.n_public,
            "seed": self.seed,
        }
        if self.noise_multiplier is not None:
            return engine.make_private(noise_multiplier=self.noise_multiplier, **common)
        assert self.target_epsilon is not None
        return engine.make_private_with_epsilon(
            target_epsilon=self.target_epsilon,
            target_delta=self.target_delta,
            epochs=epochs,
            mode=self.mode,
            **common,
        )


def refuse(problems: dict[str, str]) -> None:
    """Raise for the first setting that a private run cannot have.

    Args:
        problems: a setting as it was found, and why it cannot be and what to do.
    """
    for found, why in problems.items():
        raise InputError(f"{found} is not supported in a private run: {why}")
