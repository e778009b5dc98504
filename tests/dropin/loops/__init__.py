"""Small private loops to try things on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpis import PrivacyEngine
from dpis.dropin.loader import PrivateLoader
from dpis.dropin.module import PrivateModule
from dpis.dropin.optimizer import PrivateOptimizer

RECORDS, BATCH, DELTA = 40, 8, 1e-3


def data(records: int = RECORDS, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(records, 4, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(3, (records,), generator=generator))


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


@dataclass
class Loop:
    """A private loop, not begun."""

    engine: PrivacyEngine
    model: PrivateModule
    optimizer: PrivateOptimizer
    loader: PrivateLoader
    plain_model: nn.Module
    plain_optimizer: torch.optim.Optimizer

    def train(self, epochs: int = 1, steps: int | None = None) -> Loop:
        for _ in range(epochs):
            for number, (inputs, targets) in enumerate(self.loader):
                if number == steps:
                    break
                self.step(inputs, targets)
        return self

    def step(self, inputs: Any, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.plain_model.parameters()])

    @property
    def gradient(self) -> Tensor:
        """What the last step left in ``p.grad``."""
        return torch.cat([p.grad.flatten() for p in self.plain_model.parameters()])

    @property
    def session(self) -> Any:
        return self.engine._runs[-1].session


def private(
    model: nn.Module | None = None,
    dataset: Any = None,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    loader: dict[str, Any] | None = None,
    **options: Any,
) -> Loop:
    """Open-ended, seeded, with little noise, unless options say otherwise."""
    model = mlp() if model is None else model
    plain = optimizer(model.parameters())
    settings = {"batch_size": BATCH, **(loader or {})}
    plain_loader = DataLoader(data() if dataset is None else dataset, **settings)
    options = {"max_grad_norm": 1.0, "n_public": RECORDS, "seed": 1, **options}
    engine = PrivacyEngine()
    if "target_epsilon" in options or "epochs" in options:
        options = {"target_epsilon": 2.0, "target_delta": DELTA, "epochs": 2, **options}
        make = engine.make_private_with_epsilon
    else:
        options = {"noise_multiplier": 1.0, **options}
        make = engine.make_private
    made = make(module=model, optimizer=plain, data_loader=plain_loader, **options)
    return Loop(engine, *made, plain_model=model, plain_optimizer=plain)


def first_batch(loop: Loop) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The iteration, and its first batch that has records."""
    batches = iter(loop.loader)
    for inputs, targets in batches:
        if len(inputs) > 1:
            return batches, inputs, targets
        loop.optimizer.step()
    raise AssertionError
