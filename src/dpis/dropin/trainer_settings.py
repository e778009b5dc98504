"""What a trainer must be told to make its run private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.dropin import PrivacyEngine
from dpis.errors import InputError
from dpis.options import Privacy


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The guarantee of a run: an epsilon to keep, or a noise multiplier to train with.

    Attributes:
        privacy: as everywhere; its ``clip_norm`` clips the gradient of every record.
        noise_multiplier: noise over the largest contribution of a record, instead of an epsilon: that then grows with
            every step.
        seed: repeatable randomness, for tests and research: nothing of it may be released.

    Example:
        >>> TrainerSettings(privacy=Privacy(epsilon=3.0), noise_multiplier=1.0)
        Traceback (most recent call last):
        ...
        dpis.errors.InputError: give either epsilon or noise_multiplier, found both
    """

    privacy: Privacy
    noise_multiplier: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None and "epsilon" in self.privacy.said:
            raise InputError("give either epsilon or noise_multiplier, found both")
        if self.noise_multiplier is None and "epsilon" not in self.privacy.said:
            raise InputError("give either epsilon or noise_multiplier, found neither")
        if self.privacy.clip_norm == "auto":
            raise InputError(
                "clip_norm='auto' is not supported in a loop of your own. Use dpis.train"
            )

    def make_private(
        self,
        engine: PrivacyEngine,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        epochs: int,
    ) -> tuple[Any, ...]:
        """``engine.make_private_with_epsilon``, or ``make_private`` where the noise is given."""
        privacy = self.privacy
        common: dict[str, Any] = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": data_loader,
            "max_grad_norm": 1.0 if privacy.clip_norm is None else privacy.clip_norm,
            "privacy": privacy,
            "seed": self.seed,
            "per_process": True,  # a trainer's batch size is that of a device
        }
        if self.noise_multiplier is not None:
            return engine.make_private(noise_multiplier=self.noise_multiplier, **common)
        return engine.make_private_with_epsilon(
            target_epsilon=privacy.epsilon, target_delta=privacy.delta, epochs=epochs, **common
        )


def refuse(problems: dict[str, str]) -> None:
    """Raise for the first setting that a private run cannot have.

    Args:
        problems: a setting as it was found, and why it cannot be and what to do.
    """
    for found, why in problems.items():
        raise InputError(f"{found} is not supported in a private run: {why}")
