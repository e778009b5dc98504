"""Audits that are tried on right code and on broken code: what each plants, and how much it takes to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dpis.accounting import Accountant
from dpis.auditing import Findings, audit_mechanism
from dpis.mechanism import Config, noisy_update
from dpis.mechanism import mechanism as module
from dpis.noise import add_noise
from dpis.randomness import Key
from dpis.sampling import Draw, ImportanceSampler


def config(**changes: Any) -> Config:
    """Ten steps at π = 1/10."""
    usual = {"epsilon": 2.0, "delta": 1e-3, "n_public": 100, "batch_size": 10, "epochs": 1}
    return Config(**({**usual, "accountant": Accountant.PLD} | changes))


SURE = config(batch_size=50, equivalent_batch=100)
"""Two steps at π = 1."""
OFTEN = config(batch_size=4, epochs=4, epsilon=4.0)
"""A hundred steps at π = 1/25."""


def less_noise(factor: float) -> Callable[..., Any]:
    """So many times the noise that was asked for."""

    def planted(sums: Any, std: float, normals: Any, begins: Any = None) -> Any:
        return add_noise(sums, factor * std, normals, begins)

    return planted


def union_over_the_epoch(
    self: Any, rate: float, coins: Any, _draw: Any = ImportanceSampler.draw
) -> Draw:
    """Algorithm 1: who was drawn once stays a candidate."""
    fresh = _draw(self, rate, coins)
    self.kept = torch.cat([getattr(self, "kept", fresh.indices), fresh.indices]).unique()
    return Draw(self.kept, torch.full((len(self.kept),), self.clip_norm, dtype=torch.float64))


def unclipped(
    norms: Any, importance: Any, *, clip_norm: float, how: str = "weight", uniforms: Any = None
) -> Any:
    """Importance divided out, and no clip."""
    return 1.0 / importance.double()


def importance_above_the_clip(
    self: Any, rate: float, coins: Any, _draw: Any = ImportanceSampler.draw
) -> Draw:
    """``g_hat = 2C`` for a record that was not seen: it is drawn twice as often as was charged."""
    return _draw(self, min(1.0, 2 * rate), coins)


def counted_twice(
    norms: Any, importance: Any, *, clip_norm: float, how: str = "weight", uniforms: Any = None
) -> Any:
    """One record, two rows: each is clipped by itself."""
    return 2.0 / torch.maximum(norms.double(), importance.double())


@dataclass(frozen=True)
class Bug:
    """A bug, where it is planted, and the audit that sees it.

    Attributes:
        name: what is wrong.
        target: whose attribute is replaced.
        attribute: its name.
        planted: by what.
        config: that is audited.
        runs: so many are enough.
    """

    name: str
    target: Any
    attribute: str
    planted: Any
    config: Config
    runs: int

    def bound(self, runs: int | None = None, seed: int = 1) -> Findings:
        """What the audit finds with the bug in place."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.target, self.attribute, self.planted)
            return audit_mechanism(self.config, runs=runs or self.runs, key=Key.from_seed(seed))


BUGS = [
    Bug("noise x 2/3", noisy_update, "add_noise", less_noise(2 / 3), SURE, 10_000),
    Bug("noise x .9", noisy_update, "add_noise", less_noise(0.9), SURE, 100_000),
    Bug("sticky coins", ImportanceSampler, "draw", union_over_the_epoch, OFTEN, 4_000),
    Bug("a missing clip", module, "contribution_weights", unclipped, SURE, 1_000),
    Bug("g_hat above C", ImportanceSampler, "draw", importance_above_the_clip, OFTEN, 30_000),
    Bug("one record counted twice", module, "contribution_weights", counted_twice, SURE, 1_000),
]
