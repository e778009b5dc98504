"""The one place where sampling, gradients, noise and accounting meet.

A run is a sequence of epochs; an epoch begins with its terms and its events, then takes steps:
draw > norms > weights > sum > noise. Nothing here knows of files, optimizers or progress bars.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.accounting import Cadence, Entry, Event, Gaussian, Terms
from dpis.accounting.events import event_from_json, event_to_json
from dpis.accounting.workload import COUNT, NORM_SUM
from dpis.errors import BudgetExceededError, InputError
from dpis.group import Alone, Group
from dpis.mechanism.contribution import contribution_weights
from dpis.mechanism.gradient_sum import GradientSum, Weighable
from dpis.mechanism.journal import Journal
from dpis.mechanism.noisy_update import Noise, noisy_slices, noisy_statistic, noisy_update
from dpis.mechanism.run_plan import RunPlan, bounded_count
from dpis.options import Contribution, NormSum
from dpis.randomness import Key, Normals, Stream
from dpis.sampling import Draw, ImportanceSampler, Sampler, Shards, UniformSampler
from dpis.sampling.classes import slices

if TYPE_CHECKING:
    from dpis.gradients.sharded_sums import ShardedSums

APPLIED_NOISE = 1.001
"""The applied standard deviation over the accounted one: covers the rounding of norms (rule 19)."""


EPOCH = 1 << 32
"""From one epoch to the next, in the places where ranks stand: there are fewer steps."""

SHARD_PARTS = ("last_norms", "order", "sizes")
"""What a sampler keeps of a shard."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """What tells one noisy release from every other: its randomness is derived from it."""

    purpose: str
    epoch: int


class Mechanism:
    """The hidden state of a run, and the only ways in which anything of it is released.

    Args:
        plan: what was fixed beforehand.
        population: how many records there are. It decides who can be drawn, nothing that is released.
        key: the run's secret.
        journal: where every event goes before its output is used.
        ahead: spend all steps of an epoch when it begins, with one wait for the disk; else each before its release.
        group: the processes that take every step together, each with records of its own.
    """

    def __init__(
        self,
        plan: RunPlan,
        population: int,
        key: Key,
        journal: Journal,
        *,
        ahead: bool = True,
        group: Group | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.group: Group = Alone() if group is None else group
        self.clip_norm = config.clip_norm
        self.step = 0
        self.steps_left = 0
        self.terms: Terms | None = None
        self.update_scale = 1.0
        self._key = key
        self._journal = journal
        self._spent: Counter[Event] = Counter()
        self._used: set[Occasion] = set()
        self._ahead = ahead
        self._moves: tuple[str, ...] = ()
        self._draws = 0
        self._outstanding: deque[tuple[Draw, Terms]] = (
            deque()
        )  # a draw keeps the terms it was made under
        self._noise_multiplier: float | None = None  # set by hand
        shards = Shards.of_rank(population, config.shards, self.group.rank, self.group.size)
        self.sampler: Sampler = (
            ImportanceSampler(
                shards,
                config.clip_norm,
                headroom=config.headroom,
                floor=config.floor * config.clip_norm,
            )
            if config.method.by_importance
            else UniformSampler(shards, config.clip_norm)
        )

    # ── noisy statistics beside the gradients ────────────────────────────────────────────────────────

    def release(self, label: str, value: Tensor, sensitivity: float) -> Tensor:
        """A planned statistic over all records, with its noise: once, before training.

        Args:
            label: its name in the plan and the ledger.
            value: the statistic.
            sensitivity: how far one record can move it at most, in Euclidean norm.
        """
        multiplier = self.plan.privacy.release(label).noise_multiplier
        return self._released(label, value, sensitivity, multiplier, Occasion(label, 0))

    def release_count(self) -> float:
        """A noisy number of records; predeclared, it sets the scale of updates and nothing else."""
        population = torch.tensor([float(self.sampler.population)], dtype=torch.float64)
        noisy = float(self.release(COUNT, population, sensitivity=1.0))
        if not self.plan.privacy.adapts:
            declared = self.plan.workload.n_public
            self.update_scale = declared / bounded_count(noisy, declared)
        return noisy

    def _released(
        self, label: str, value: Tensor, sensitivity: float, multiplier: float, occasion: Occasion
    ) -> Tensor:
        if occasion in self._used:
            raise InputError(
                f"{label!r} was released already: its noise would be the same again and cancel in the difference. "
                "Nothing was released"
            )
        self._spend([Entry(label, Gaussian(noise_multiplier=multiplier))])
        self._used.add(occasion)
        std = APPLIED_NOISE * multiplier * sensitivity
        purpose = f"release:{occasion.purpose}"
        normals = self._normals(purpose, occasion.epoch, value.numel())
        return noisy_statistic(label, value, Noise(std, normals), self.group)

    # ── epochs ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def wants_all_norms(self) -> bool:
        """Whether the next epoch begins with a full pass over all records."""
        adapts = self.plan.privacy.adapts
        return adapts and self.plan.config.norm_sum is NormSum.FULL_PASS

    def begin_epoch(self, all_norms: Tensor | None = None) -> Terms:
        """Fix the terms of the next epoch and spend all of its steps.

        Args:
            all_norms: the gradient norms of all `own_records` at the current parameters, float64, in their order;
                where `wants_all_norms` says so.
        """
        if self.steps_left:
            raise InputError(
                f"epoch {self.epoch} has {self.steps_left} steps to go: take them first"
            )
        self.group.hear(self.place + EPOCH)  # not where others take the next step of this one
        privacy, epoch = self.plan.privacy, self.epoch + 1
        privacy.require_epoch(epoch)
        K_noisy = self._release_norm_sum(epoch, all_norms) if privacy.adapts else None
        terms = privacy.terms(epoch, self.clip_norm, K_noisy, self._spent)
        if self._noise_multiplier is not None:
            terms = replace(terms, noise_multiplier=self._noise_multiplier)
        steps = self.plan.workload.steps_per_epoch
        if self._ahead:
            self._spend(privacy.charge(terms, steps))
        self.terms, self.steps_left = terms, steps
        return terms

    @property
    def epoch(self) -> int:
        """The epoch that is under way or was last, from 1; 0 before the first."""
        return 0 if self.terms is None else self.terms.epoch

    @property
    def noise_multiplier(self) -> float:
        """``z`` of the draws to come; before the first epoch of a plan that adapts there is none."""
        if self.terms is not None:
            return self.terms.noise_multiplier
        if self.plan.privacy.adapts:
            raise InputError("the noise of an epoch is solved when it begins: ask again then")
        planned = self.plan.privacy.planned_noise[0]
        return planned if self._noise_multiplier is None else self._noise_multiplier

    def set_noise_multiplier(self, noise_multiplier: float) -> None:
        """Set ``z`` of the draws to come, by a public schedule: where the plan covers it, each step is charged with it.

        Draws that were made keep theirs: nobody looks at a batch and then chooses what it costs.
        """
        if self._ahead:
            raise InputError(
                "the steps of an epoch are paid for when it begins: their noise cannot be set"
            )
        if not self.plan.privacy.adapts and noise_multiplier == self.noise_multiplier:
            return
        self.plan.privacy.require_noise(noise_multiplier)
        self._noise_multiplier = float(noise_multiplier)
        if self.terms is not None:
            self.terms = replace(self.terms, noise_multiplier=self._noise_multiplier)

    def set_clip_norm(self, clip_norm: float) -> None:
        """Set ``C`` of the draws to come, by a public schedule. Events stay: noise is measured in units of ``C``."""
        if self.plan.privacy.adapts or self.plan.config.clipping is not None:
            raise InputError(
                "the clip norm of an adaptive run cannot be set: noise and clip norm follow from released norms. Use "
                "another method"
            )
        self.sampler.set_clip_norm(clip_norm)
        self.clip_norm = self.sampler.clip_norm
        if self.terms is not None:
            self.terms = replace(self.terms, clip_norm=self.clip_norm)

    def abandon_epoch(self) -> None:
        """Give up the steps that are left. Draws that wait for their release wait on: nobody draws twice for one step.

        Where the terms of epochs differ, the steps are spent all the same, so that the plan is followed in its order;
        then the draws are paid for, and their coins are never used again.
        """
        privacy = self.plan.privacy
        in_order = self._ahead or privacy.same_terms_throughout
        if self.terms is not None and not in_order:
            self._spend(privacy.charge(self.terms, self.steps_left))
            self._outstanding.clear()
        self.steps_left = 0

    @property
    def place(self) -> int:
        """Where the run stands: the same on every rank that takes the same steps of the same epochs."""
        return self.epoch * EPOCH + self.step

    def require_same_terms(self, total: GradientSum) -> None:
        """The ranks stand at the same step, under the same noise and clip norm: each noises a slice, and charges it.

        They train the same parameters, too: entries are added up by their places among these.
        """
        terms = self._require_oldest(total.draw), sorted(total.parameters)
        self.group.hear(self.place, zlib.crc32(repr(terms).encode()))

    @property
    def own_records(self) -> range:
        """Those of this process; of one alone: all there are."""
        return self.sampler.shards.records

    def chance(self, purpose: str, step: int) -> Stream:
        """What is random about the records of a step beside coins and noise: masks, transforms (rule 23).

        It goes by place in the batch, so every rank has its own.
        """
        return self._key.stream(f"chance:{purpose}:{self.group.rank}", step)

    def end_epoch(self) -> None:
        """Adapt the clip norm for the next epoch, where that was asked for."""
        config, workload = self.plan.config, self.plan.workload
        if self.steps_left:
            raise InputError(
                f"epoch {self.epoch} has {self.steps_left} steps to go: take them first"
            )
        if config.clipping is None or self.epoch == self.plan.privacy.last_epoch:
            return
        noisy = self._release_sum_of_norms(
            Occasion("clip-sum", self.epoch),
            bound=config.clipping.ceiling,
            cadence=Cadence.BETWEEN_EPOCHS,
        )
        self.clip_norm = config.clipping.next_clip_norm(noisy, workload.n_public)
        self.sampler.set_clip_norm(self.clip_norm)

    def _release_norm_sum(self, epoch: int, all_norms: Tensor | None) -> float:
        """``K'``, from all norms computed anew or as last seen."""
        if self.wants_all_norms:
            own, found = self.sampler.shards.records, 0 if all_norms is None else len(all_norms)
            if all_norms is None or found != len(own):
                raise InputError(
                    "the norms of all records are required before an epoch whose noise is solved from their sum, found "
                    f"{'none' if all_norms is None else 'another number of them'}: take a full pass first. Nothing was "
                    "released"
                )
            for part in slices(found):  # what is sorted at once takes memory of its own
                records = torch.arange(own.start, own.stop)[part]
                self.sampler.observe(records, all_norms[part])
        return self._release_sum_of_norms(
            Occasion("norm-sum", epoch),
            bound=self.clip_norm,
            cadence=Cadence.EACH_EPOCH,
        )

    def _release_sum_of_norms(self, occasion: Occasion, bound: float, cadence: Cadence) -> float:
        """``Σ min(norm_i, bound)`` with noise; a record that was never seen counts the clip norm (rule 8)."""
        assert isinstance(self.sampler, ImportanceSampler)
        own = self.sampler.sum_of_last_norms(bound, unseen=self.clip_norm)
        total = math.fsum(chain.from_iterable(self.group.gathered(list(own))))
        value = torch.tensor([total], dtype=torch.float64)
        multiplier = self.plan.privacy.release(NORM_SUM, cadence).noise_multiplier
        return float(self._released(NORM_SUM, value, bound, multiplier, occasion))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────

    def draw(self) -> Draw:
        """The candidates of the next step: every record by its own coin. Asked again, the same."""
        self._draws -= len(self._outstanding)
        self._outstanding.clear()
        return self.draw_ahead()

    def draw_of(self, step: int) -> Draw:
        """The candidates of a step that is to come: drawn now, or those that were drawn and not released (rule 26)."""
        while len(self._outstanding) <= step - self.step:
            self.draw_ahead()
        return self._outstanding[step - self.step][0]

    def draw_ahead(self) -> Draw:
        """The candidates of the step after those that are drawn already, with the importance they have now."""
        if self.terms is None or len(self._outstanding) >= self.steps_left:
            raise BudgetExceededError(
                "no step is accounted for here: begin the next epoch first. Nothing was released"
            )
        coins = self._key.coins("draw", self._draws)
        self._draws += 1
        draw = self.sampler.draw(self.terms.sampling_rate, coins)
        self._outstanding.append((draw, self.terms))
        return draw

    def start_sum(
        self, draw: Draw, parameters: Mapping[str, Tensor], sharded: ShardedSums | None = None
    ) -> GradientSum:
        """To be filled with the gradients of the drawn records, tape by tape.

        Args:
            draw: the oldest that waits for its release.
            parameters: the trainable parameters by name.
            sharded: how they lie on the ranks, where they are sharded.
        """
        self._require_oldest(draw)
        coins = None
        if self.plan.config.contribution is Contribution.REJECT:
            coins = torch.from_numpy(self._acceptance_coins(draw))
        return GradientSum(draw, parameters, coins, sharded)

    def _acceptance_coins(self, draw: Draw) -> npt.NDArray[np.float64]:
        """By shard, and within a shard in the order of its drawn records: whoever has the shard tosses the same."""
        shards = self.sampler.shards
        coins = self._key.coins("accept", self.step)
        return coins.take(shards.numbers, shards.counts(draw.indices.numpy()))

    def add(self, total: GradientSum, tape: Weighable) -> None:
        """Norms, weights, weighted sum: the next records of the draw, by their per-example gradients."""
        norms = tape.norms()
        total.add(norms, tape.weighted_sums(self._weights(total, norms)))

    def _weights(self, total: GradientSum, norms: Tensor) -> Tensor:
        """Of the next records of a draw: the clip, and the inverse of the probability they were drawn with."""
        terms, own = (
            self._require_oldest(total.draw),
            slice(total.records, total.records + len(norms)),
        )
        if own.stop > len(total.draw):
            raise InputError(
                f"the rows of the drawn records alone are required: {len(total.draw)} drawn, {own.stop} given. "
                "Nothing was released"
            )
        if not self.plan.config.method.private:
            return norms.isfinite().to(norms)
        coins = total.acceptance_coins
        return contribution_weights(
            norms,
            total.draw.importance[own],
            clip_norm=terms.clip_norm,
            how=self.plan.config.contribution,
            uniforms=None if coins is None else coins[own],
        )

    def release_sum(self, total: GradientSum) -> dict[str, Tensor]:
        """The noisy mean gradient over the drawn records: ``(C/B)·(Σ v_i + z·Normal(0, I))``.

        Noise is added in place, and what the sum held is given away: there is one copy of the gradients, and where
        several parts were added up one more in float64 until it is cast, parameter by parameter.

        Returns:
            By parameter name, in the parameter's type, or float32 where that has fewer digits.
        """
        step, draw = self.step, total.draw
        terms = self._require_oldest(draw)
        if total.records != len(draw):
            raise InputError(
                f"the rows of every drawn record are required: {len(draw)} drawn, {total.records} given. "
                "Nothing was released"
            )
        self._key.require_home()
        if not self._ahead:
            self._spend(self.plan.privacy.charge(terms, 1))
        self._outstanding.popleft()
        self.sampler.observe(draw.indices, total.norms)
        self.step += 1
        self.steps_left -= 1
        noise, scale = None, 1.0 / terms.equivalent_batch
        if self.plan.config.method.private:
            std = APPLIED_NOISE * terms.noise_multiplier
            noise = Noise(std, self._normals("noise", step, total.entries))
            scale = self.update_scale * terms.clip_norm / terms.equivalent_batch
        if total.sharded is not None:
            return noisy_slices(total.take(), total.sharded, noise, scale)
        return noisy_update(
            total.take(),
            total.parameters,
            noise,
            scale,
            self.group,
            expected_records=self.plan.most_expected_candidates,
        )

    def _normals(self, purpose: str, step: int, count: int) -> Normals:
        """The noise of one release: another where the run has moved to other ranks, and with it to other sums."""
        return self._key.normals(":".join((purpose, *self._moves)), step, count)

    def _require_oldest(self, draw: Draw) -> Terms:
        """Draws are released once each, in their order, under the terms they were made under."""
        if not self._outstanding or draw is not self._outstanding[0][0]:
            raise BudgetExceededError(
                "a gradient is released once for every draw, in the order of the draws: the coins of a step are "
                "fresh, and this draw was released already or is not the oldest. Draw again; nothing was released"
            )
        return self._outstanding[0][1]

    # ── accounting ───────────────────────────────────────────────────────────────────────────────────

    def _spend(self, entries: list[Entry]) -> None:
        self._key.require_home()  # before a ledger of the parent is written
        self._journal.spend(entries)
        self._spent.update(entry.event for entry in entries)

    @property
    def fraction_spent(self) -> float:
        """Of the budget, counting the steps of this epoch as they are taken. Public."""
        return self._journal.fraction_spent

    @property
    def spent(self) -> Counter[Event]:
        """Every event so far, and how often."""
        return Counter(self._spent)

    def take_up(self, key: Key, state: dict[str, Any], own: Mapping[str, Tensor]) -> None:
        """Go on where others stood, with their key."""
        self._key = key
        self.load_state_dict(state, own)

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have in common of the hidden state. A secret."""
        return {
            "step": self.step,
            "draws": self._draws,
            "waiting": [asdict(terms) for _, terms in self._outstanding],
            "ranks": self.group.size,
            "moves": list(self._moves),
            "noise_multiplier": self._noise_multiplier,
            "steps_left": self.steps_left,
            "clip_norm": self.clip_norm,
            "update_scale": self.update_scale,
            "terms": None if self.terms is None else asdict(self.terms),
            "position": self._journal.position,
            "spent": [(event_to_json(event), n) for event, n in self._spent.items()],
            "used": [(occasion.purpose, occasion.epoch) for occasion in self._used],
            "sampler": {k: v for k, v in self.sampler.state_dict().items() if k != "shards"},
        }

    def own_state(self) -> dict[str, Tensor]:
        """What this rank has of its own: the norms of its records, and its draws that wait. All ranks call this.

        Ranks draw ahead as far as their loaders ask; here they come level, so that a draw is whole or not made.
        """
        for _ in range(max(self.group.gathered(len(self._outstanding))) - len(self._outstanding)):
            self.draw_ahead()
        shards = self.sampler.state_dict().get("shards", {})
        state = {f"shard.{n}.{k}": v for n, one in shards.items() for k, v in one.items()}
        for number, (draw, _) in enumerate(self._outstanding):
            place = f"waiting.{number}.{self.group.rank}"
            state |= {f"{place}.indices": draw.indices, f"{place}.importance": draw.importance}
        return state

    def load_state_dict(
        self, state: dict[str, Any], own: Mapping[str, Tensor], *, by_place: bool = False
    ) -> None:
        """Stand where that state stood; the journal must stand there too.

        Args:
            state: what its ranks had in common.
            own: what each of them had of its own, by name; there may have been more of them, or fewer.
            by_place: gradients depend on chance that goes by place in a rank's batch. Then on another number of ranks
                the steps that are done again have other sums, and must have other noise: the same would cancel in the
                difference.
        """
        self._moves = tuple(state["moves"])
        if by_place and state["ranks"] != self.group.size:
            self._moves += (f"{self.group.size}@{state['step']}",)
        self._journal.go_to(state["position"])
        self.step, self.steps_left = state["step"], state["steps_left"]
        self.clip_norm, self.update_scale = state["clip_norm"], state["update_scale"]
        self.terms = None if state["terms"] is None else Terms(**state["terms"])
        self._spent = Counter({event_from_json(event): n for event, n in state["spent"]})
        self._used = {Occasion(purpose, epoch) for purpose, epoch in state["used"]}
        self._draws = state["draws"]
        self._noise_multiplier = state["noise_multiplier"]
        self._outstanding = deque(
            (self._own_part(number, state["ranks"], own), Terms(**terms))
            for number, terms in enumerate(state["waiting"])
        )
        shards = {
            shard: {part: own[f"shard.{shard}.{part}"] for part in SHARD_PARTS}
            for shard in self.sampler.shards.numbers.tolist()
            if f"shard.{shard}.sizes" in own
        }
        self.sampler.load_state_dict({**state["sampler"], "shards": shards})

    def _own_part(self, number: int, ranks: int, own: Mapping[str, Tensor]) -> Draw:
        """Of a draw that waits, made by so many ranks: the records that are this rank's now."""
        places = [f"waiting.{number}.{rank}" for rank in range(ranks)]
        indices = torch.cat([own[f"{place}.indices"] for place in places])
        importance = torch.cat([own[f"{place}.importance"] for place in places])
        records = self.own_records
        here = (indices >= records.start) & (indices < records.stop)
        return Draw(indices[here], importance[here])
