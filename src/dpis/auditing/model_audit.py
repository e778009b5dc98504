"""A person's config, model and loss under attack: two worlds, run after run, through the real per-example gradients.

The attacker knows all other records, their coins and the weights. It does not know whether the canary is there, the
noise, or what the model draws at random. So it computes both sums that a step may have released, without the canary and
with it, and scores the release by the distance between them. If the model lets a record move the others, or its
gradient escapes the clip, the two sums lie further apart than one contribution, and the attack wins.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from dpis import batches
from dpis.auditing.findings import Findings
from dpis.auditing.mechanism_audit import findings_of_scores
from dpis.auditing.scores import Scored, log_ratio
from dpis.batches import Batch
from dpis.errors import InputError
from dpis.generators import seeded_torch
from dpis.gradients import RecordGradients
from dpis.gradients.losses import Loss
from dpis.mechanism import Config, EventCounter, Mechanism, RunPlan, make_plan
from dpis.mechanism.gradient_sum import GradientSum
from dpis.randomness import Key
from dpis.sampling import Draw


@dataclass(eq=False)
class WorstCase:
    """What is tried: a few records, the first of which is the canary, and a model.

    Attributes:
        model: as it is before training.
        batch: the records, ``(inputs, ..., targets)``.
        loss: as for `dpis.train`.
        lr: of plain gradient descent, which is the optimizer here.
    """

    model: nn.Module
    batch: Batch
    loss: Loss
    lr: float = 0.1

    @property
    def records(self) -> int:
        """How many, the canary among them."""
        return batches.records(self.batch, 1)


def audit_model(
    config: Config,
    case: WorstCase,
    *,
    runs: int = 300,
    delta: float | None = None,
    key: Key | None = None,
) -> Findings:
    """Attack a config with a model of one's own: what is released is computed by the code that trains.

    Args:
        config: what is tried, with its claim. A tiny one shows most: few steps, few records, a large delta.
        case: model, records and loss.
        runs: of whole trainings, in either world.
        delta: of the bound; by default the claimed one.
        key: for tests; by default fresh.
    """
    plan = make_plan(config)
    if plan.claim is None or plan.privacy.adapts:
        raise InputError(
            f"a model is audited under a plan that is fixed beforehand, and {config.method} has none: give another "
            "method"
        )
    if case.records < 2:
        raise InputError("two records are required at least: the first of them is the canary")
    key = Key.fresh() if key is None else key
    model = copy.deepcopy(case.model)
    gradients = RecordGradients(model, case.loss)
    attacks = {
        canary: [
            _Attack(
                plan,
                case,
                gradients,
                Key(key.stream(f"world-{canary}", n).bytes(32), key.seed),
                canary,
            )
            for n in range(runs)
        ]
        for canary in (True, False)
    }
    scores = {
        canary: np.array([attack.run() for attack in attacks[canary]]) for canary in (True, False)
    }
    seen = Scored(scores[True], scores[False])
    found = findings_of_scores("model", plan, seen, delta or plan.claim.delta)
    return replace(found, notes=_moved([*attacks[True], *attacks[False]]))


def _moved(attacks: Sequence[_Attack]) -> tuple[str, ...]:
    """How far the canary moved a sum, where that can be told without chance."""
    if not all(attack.foreseen for attack in attacks):
        return ()
    most = max(attack.furthest for attack in attacks)
    if most <= ROUNDED_CONTRIBUTION:
        return (f"The canary moved a sum by {most:.3g} at most, where 1 is allowed.",)
    return (
        f"The canary moved a sum by {most:.3g}, where 1 is allowed: by this alone the claim is false.",
    )


class _CanaryFirst(Mechanism):
    """A mechanism whose record 0 is a canary: its coin is tossed, and the attack decides what follows from it."""

    heads = False

    def draw_ahead(self) -> Draw:
        """The candidates but the canary, whose coin is noted."""
        whole = super().draw_ahead()
        others = whole.indices != 0
        self.heads = not bool(others.all())
        draw = Draw(whole.indices[others], whole.importance[others])
        self._outstanding[-1] = draw, self._outstanding[-1][1]
        return draw

    def with_canary(self, draw: Draw) -> Draw:
        """The same, as if the canary's coin had fallen heads: seldom less important than it may be."""
        indices = torch.cat([torch.zeros(1, dtype=torch.int64), draw.indices])
        most = torch.tensor([self.clip_norm], dtype=torch.float64)
        return Draw(indices, torch.cat([most, draw.importance]))

    def expect(self, draw: Draw) -> Draw:
        """This is the draw of the next release."""
        self._outstanding[0] = draw, self._outstanding[0][1]
        return draw


class _Attack:
    """One training in one world.

    Attributes:
        furthest: that the canary moved a sum.
        foreseen: the attacker's sum was the one that was released: the model draws no random numbers, or public ones.
    """

    def __init__(
        self, plan: RunPlan, case: WorstCase, gradients: RecordGradients, key: Key, canary: bool
    ) -> None:
        self._case, self._gradients, self._key, self._canary = case, gradients, key, canary
        self._mechanism = _CanaryFirst(plan, case.records, key, EventCounter(plan.privacy.guard()))
        self.furthest, self.foreseen = 0.0, True

    def run(self) -> float:
        """Its score. The model stands again where it stood, afterwards."""
        before = {name: p.detach().clone() for name, p in self._gradients.parameters.items()}
        try:
            return self._train()
        finally:
            self._set(before)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._gradients.parameters.items():
            parameter.copy_(values[name])

    def _train(self) -> float:
        mechanism, score = self._mechanism, 0.0
        for _ in range(mechanism.plan.workload.epochs):
            terms = mechanism.begin_epoch()
            unit = mechanism.update_scale * terms.clip_norm / terms.equivalent_batch
            while mechanism.steps_left:
                others = mechanism.draw()
                both = mechanism.with_canary(others)
                without, with_it = (
                    _flat(self._sum_over(draw, public=True).take()) for draw in (others, both)
                )
                actual = both if self._canary and mechanism.heads else others
                total = self._sum_over(actual, public=False)
                released = total.take()
                expected = with_it if actual is both else without
                self.foreseen &= torch.allclose(_flat(released), expected, rtol=1e-3, atol=1e-4)
                total.add(torch.zeros(0, dtype=torch.float64), released.items())
                update = mechanism.release_sum(total)
                moved = with_it - without
                length = float(moved.norm())
                self.furthest = max(self.furthest, length)
                inner = float((_flat(update) / unit - without) @ moved)
                score += _ratio(inner, length, terms.sampling_rate, terms.noise_multiplier)
                lr, parameters = self._case.lr, self._gradients.parameters
                self._set({n: p - lr * update[n].to(p) for n, p in parameters.items()})
            mechanism.end_epoch()
        return score

    def _sum_over(self, draw: Draw, *, public: bool) -> GradientSum:
        """Of the drawn records, as training adds them up; in public: by whoever does not know the run's key."""
        mechanism, step = self._mechanism, self._mechanism.step
        key = ATTACKERS if public else self._key
        total = mechanism.start_sum(mechanism.expect(draw), self._gradients.parameters)
        if len(draw):
            with seeded_torch(key.stream("model:0", step)):
                for tape in self._gradients.tapes(batches.take(self._case.batch, draw.indices)):
                    mechanism.add(total, tape)
        return total


ATTACKERS = Key(bytes(32))
"""Guesses at what the model draws are the attacker's own."""

ROUNDED_CONTRIBUTION = 1.001


def _ratio(inner: float, length: float, rate: float, z: float) -> float:
    """`log_ratio` for a contribution of this length, which may be more than 1."""
    if length == 0:
        return 0.0
    return float(log_ratio(np.array([inner / length**2]), rate, z / length)[0])


def _flat(vectors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([vectors[name].double().reshape(-1) for name in sorted(vectors)])
