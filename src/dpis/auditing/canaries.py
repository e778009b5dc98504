"""A mechanism with canaries: records behind those of the dataset whose gradients are given directions.

The loop that drives it, ours or somebody else's, sees its own records alone. Canaries pass through the same sampler,
weights, sum and noise as they do; then the release is projected on every canary's direction, and scored. Directions
are random signs on blocks of entries that do not overlap. What all other records added is subtracted first: whoever
attacks differential privacy knows them (docs/soundness.md reveals their coins, too).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpis.accounting import Terms
from dpis.auditing.findings import FILE, Findings
from dpis.auditing.one_run import Strategy, findings_of_canaries
from dpis.auditing.scores import Scored, log_ratio
from dpis.errors import InputError
from dpis.group import Group
from dpis.mechanism import Journal, Mechanism, RunPlan
from dpis.mechanism.gradient_sum import GradientSum
from dpis.noise import layout
from dpis.options import Contribution
from dpis.randomness import Key
from dpis.sampling import Draw
from dpis.training import Task

Array = NDArray[np.float64]

CANARY_NORM = 2.0
"""In units of the clip norm: importance keeps such a record at ``g_hat = C``, however it estimates."""


class Canaries:
    """So many canaries, to be planted in one run; afterwards what the attack saw of them.

    Args:
        count: ``m``. About half of them take part, each by a fair coin of its own.

    Attributes:
        mechanism: of the run they were planted in.
    """

    attack = "white-box"

    def __init__(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"canaries must be a whole number from 1 on, found {count!r}")
        self.count = count
        self.mechanism: Mechanism | None = None
        self._strategy: Strategy | None = None

    def prepare(self, task: Task) -> None:
        """Before the run is opened. These canaries are no rows of the dataset: nothing is to be done."""

    def fix_strategy(self, plan: RunPlan) -> None:
        """What will be guessed, before anything is drawn."""
        if plan.claim is not None:
            self._strategy = Strategy.of(plan, self.count)

    def __call__(
        self,
        plan: RunPlan,
        population: int,
        key: Key,
        journal: Journal,
        *,
        ahead: bool = True,
        group: Group | None = None,
    ) -> Mechanism:
        """A mechanism with these canaries, made as any other."""
        if group is not None and group.size > 1:
            raise InputError(
                "an audit runs in one process: canaries are planted behind all records"
            )
        self.fix_strategy(plan)
        self.mechanism = CanaryMechanism(self.count, plan, population, key, journal, ahead=ahead)
        return self.mechanism

    @property
    def scored(self) -> Scored:
        """Of the run, as far as it went."""
        if not isinstance(self.mechanism, CanaryMechanism):
            raise InputError("the canaries were planted in no run")
        return self.mechanism.scored

    def findings(self, accuracy: tuple[float, float] | None = None) -> Findings:
        """What the attack shows.

        Args:
            accuracy: of the model that was audited, and of one without canaries.
        """
        mechanism, strategy, scored = self.mechanism, self._strategy, self.scored
        if mechanism is None or mechanism.steps_left or strategy is None:
            raise InputError("an audit looks at a whole run that claims something: finish it first")
        return findings_of_canaries(self.attack, mechanism.plan, scored, strategy, accuracy)

    def written(self, folder: Path, accuracy: tuple[float, float] | None = None) -> Findings:
        """The same, left in the folder of the run."""
        note = f"Files in {folder}; see it as a page: dpis report {folder}"
        found = replace(self.findings(accuracy), notes=(note,))
        found.write(folder / FILE)
        return found


@dataclass(frozen=True, eq=False)
class _Directions:
    """Orthogonal unit vectors in the space of all trainable entries: random signs on a block for each.

    Attributes:
        signs: of every entry that is in a block, a block one row.
        shapes: of the parameters by name, in the order of `layout`.
    """

    signs: Tensor
    shapes: Mapping[str, torch.Size]

    @classmethod
    def made(cls, count: int, parameters: Mapping[str, Tensor], key: Key) -> _Directions:
        shapes = {name: parameters[name].shape for name in layout_order(parameters)}
        entries = sum(shape.numel() for shape in shapes.values())
        width = entries // count
        if width == 0:
            raise InputError(
                f"{count:,} canaries need directions of their own and the model has {entries:,} trainable entries: "
                "plant fewer"
            )
        bits = np.frombuffer(key.stream("audit-signs", 0).bytes(count * width), np.uint8) & 1
        signs = torch.from_numpy(bits.astype(np.float32) * 2 - 1).view(count, width)
        return cls(signs, shapes)

    @property
    def length(self) -> float:
        """Of a block's signs, as a vector."""
        return float(self.signs.shape[1] ** 0.5)

    def project(self, vectors: Mapping[str, Tensor]) -> Array:
        """A sum, or a release, on every direction."""
        flat = torch.cat([vectors[name].reshape(-1).cpu() for name in self.shapes])
        blocks = flat[: self.signs.numel()].view_as(self.signs)
        found: Array = ((blocks.double() * self.signs).sum(1) / self.length).numpy()
        return found

    def combine(self, amounts: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``Σ amounts_j · direction_j``, parameter by parameter."""
        shapes = self.shapes.values()
        flat = torch.zeros(sum(shape.numel() for shape in shapes))
        flat[: self.signs.numel()] = (
            self.signs * (amounts / self.length).to(self.signs)[:, None]
        ).view(-1)
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            yield name, part.view(shape).clone()


def layout_order(parameters: Mapping[str, Tensor]) -> list[str]:
    """As noise is laid out."""
    return list(layout({name: p.numel() for name, p in parameters.items()}))


@dataclass(frozen=True, eq=False)
class _CanaryTape:
    """The gradients of some canaries: what a tape of the real engine is asked for."""

    directions: _Directions
    which: Tensor
    length: float
    devices: Mapping[str, torch.device]

    def norms(self) -> Tensor:
        """All of one length."""
        return torch.full((len(self.which),), self.length, dtype=torch.float64)

    def weighted_sums(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `dpis.gradients.Tape` gives them."""
        amounts = torch.zeros(len(self.directions.signs), dtype=torch.float64)
        amounts[self.which] = weights * self.length
        for name, total in self.directions.combine(amounts):
            yield name, total.to(self.devices[name])


class CanaryMechanism(Mechanism):
    """A mechanism that plants canaries behind the records its loop knows of, and scores every release.

    Args:
        count: how many canaries there are, in or out.
        plan: as for `Mechanism`.
        population: of the dataset, without canaries.
        key: as for `Mechanism`.
        journal: as for `Mechanism`.
        ahead: as for `Mechanism`.
    """

    def __init__(
        self,
        count: int,
        plan: RunPlan,
        population: int,
        key: Key,
        journal: Journal,
        *,
        ahead: bool = True,
    ) -> None:
        self._inside = key.stream("audit-canaries", 0).uniforms(count) < 0.5
        self._places = torch.from_numpy(self._inside.nonzero()[0])
        self._records = population
        self._planted: deque[Draw] = deque()  # of the draws that wait
        self._scores = np.zeros(count)
        self._directions: _Directions | None = None
        super().__init__(plan, population + len(self._places), key, journal, ahead=ahead)

    @property
    def scored(self) -> Scored:
        """What the attack saw so far."""
        return Scored(self._scores[self._inside], self._scores[~self._inside])

    @property
    def own_records(self) -> range:
        """Those of the dataset."""
        return range(self._records)

    @property
    def _length(self) -> float:
        config = self.plan.config
        return CANARY_NORM * max(
            config.clip_norm, config.clipping.ceiling if config.clipping else 0.0
        )

    def begin_epoch(self, all_norms: Tensor | None = None) -> Terms:
        """As for any mechanism; where all norms are asked for, those of canaries belong to them."""
        if all_norms is None:
            return super().begin_epoch()
        own = torch.full((len(self._places),), self._length, dtype=all_norms.dtype)
        return super().begin_epoch(torch.cat([all_norms, own]))

    def load_state_dict(
        self, state: dict[str, Any], own: Mapping[str, Tensor], *, by_place: bool = False
    ) -> None:
        """Refused: what the attack has seen is in no checkpoint."""
        raise InputError("an audit is not resumed: start it anew, in another folder")

    def draw_ahead(self) -> Draw:
        """The candidates among the records of the dataset; canaries that were drawn wait for the sum."""
        whole = super().draw_ahead()
        own = whole.indices < self._records
        draw = Draw(whole.indices[own], whole.importance[own])
        self._outstanding[-1] = draw, self._outstanding[-1][1]
        while len(self._planted) >= len(self._outstanding):
            self._planted.pop()  # of draws that were given up
        self._planted.append(Draw(whole.indices[~own], whole.importance[~own]))
        return draw

    def release_sum(self, total: GradientSum) -> dict[str, Tensor]:
        """As any release, with the canaries that were drawn, and scored."""
        terms, planted = self._require_oldest(total.draw), self._planted[0]
        if total.records != len(total.draw):
            return super().release_sum(total)  # which refuses it
        if self._directions is None:
            self._directions = _Directions.made(len(self._scores), total.parameters, self._key)
        others = total.take()
        known = self._directions.project(others)
        total.add(torch.zeros(0, dtype=torch.float64), others.items())
        self._add_planted(total, planted, terms)
        update = super().release_sum(total)
        self._planted.popleft()
        unit = self.update_scale * terms.clip_norm / terms.equivalent_batch
        seen = self._directions.project(update) / unit - known
        self._scores += log_ratio(seen, terms.sampling_rate, terms.noise_multiplier)
        return update

    def _add_planted(self, total: GradientSum, planted: Draw, terms: Terms) -> None:
        """The draw becomes whole again, and its canaries are weighed and added like any record."""
        own = total.draw
        total.draw = Draw(
            torch.cat([own.indices, planted.indices]),
            torch.cat([own.importance, planted.importance]),
        )
        self._outstanding[0] = total.draw, terms
        if self.plan.config.contribution is Contribution.REJECT:
            assert total.acceptance_coins is not None
            coins = torch.full((len(planted),), 0.5, dtype=torch.float64)  # norm >= C: kept by any
            total.acceptance_coins = torch.cat([total.acceptance_coins, coins])
        if not len(planted):
            return
        assert self._directions is not None
        devices = {name: parameter.device for name, parameter in total.parameters.items()}
        which = self._places[planted.indices - self._records]
        self.add(total, _CanaryTape(self._directions, which, self._length, devices))
