"""For each rule of the mechanism: plant the bug, and a law must fail.

The laws hold for the real code in `test_laws`. One that still passed here would be a check that cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dpis.accounting import NormSumBounds, adaptive
from dpis.errors import DpisError
from dpis.mechanism import AdaptiveClipping, Mechanism, noisy_update
from dpis.mechanism import mechanism as module
from dpis.mechanism.contribution import contribution_weights
from dpis.noise import add_noise
from dpis.randomness import Key
from dpis.sampling import Draw, ImportanceSampler
from dpis.sampling.estimate import Estimate

from . import laws_of_releases as releases
from . import laws_of_steps as steps

INIT, DRAW, OBSERVE, SUM = (
    ImportanceSampler.__init__,
    ImportanceSampler.draw,
    ImportanceSampler.observe,
    ImportanceSampler.sum_of_last_norms,
)
COINS, NORMALS, RELEASE, RELEASED, BEGIN, SPEND, DRAW_AHEAD, WEIGH = (
    Key.coins,
    Key.normals,
    Mechanism.release_sum,
    Mechanism._released,
    Mechanism.begin_epoch,
    Mechanism._spend,
    Mechanism.draw_ahead,
    Mechanism._weights,
)

ANY = np.zeros(1, dtype=np.int64)


# ── the bugs ─────────────────────────────────────────────────────────────────────────────────────────


def sticky(self, rate, coins):
    """A third of the draws repeats the one before: candidates kept over an epoch, as Algorithm 1 does."""
    last = getattr(self, "last", None)
    if last is None or coins.take(ANY, ANY + 1)[0] > 1 / 3:
        last = self.last = DRAW(self, rate, coins)
    return last


def capped_at_one(self, rate, coins):
    """The paper's min(., 1): a probability that passes π."""
    estimate = self._estimate
    norms = np.minimum(self._last_norms.astype(float), 1e12)
    wanted = estimate.headroom * np.maximum(norms, estimate.floor)
    uniforms = coins.take(self.shards.numbers, self.shards.sizes)
    chosen = np.flatnonzero(uniforms < np.minimum(1, rate * wanted / self.clip_norm))
    return Draw(
        torch.from_numpy(chosen), torch.from_numpy(np.minimum(wanted[chosen], self.clip_norm))
    )


def unclipped(norms, importance, **_):
    return torch.where(norms.isfinite() & (norms > 0), 1 / importance.double(), 0.0)


def clipped_at_c(norms, importance, *, clip_norm, **_):
    """Clipped at C, then divided by the estimate: longer than one where the estimate is smaller."""
    return unclipped(norms, importance) * (clip_norm / norms).clamp(max=1.0)


def accepts_all(norms, importance, **given):
    if given["how"] == "reject":
        given["uniforms"] = torch.zeros_like(importance)
    return contribution_weights(norms, importance, **given)


def coarse_norms(norms, importance, **given):
    return contribution_weights(norms.bfloat16(), importance, **given)


def scaled(factor: Callable[[Mechanism, Draw], float]) -> Callable[..., Any]:
    def release(self, total):
        return {name: factor(self, total.draw) * v for name, v in RELEASE(self, total).items()}

    return release


def skips_empty(self, total):
    return RELEASE(self, total) if len(total.draw) else total.take()


def silent_when_empty(self, total):
    update = RELEASE(self, total)
    return update if len(total.draw) else {name: 0 * value for name, value in update.items()}


def stores_clipped(self, indices, norms):
    known = self._estimate.importance(self._last_norms[indices.numpy()])
    OBSERVE(self, indices, torch.minimum(norms.double(), torch.from_numpy(known)))


def in_units_of_one(self, label, value, sensitivity, multiplier, occasion):
    return RELEASED(self, label, value, 1.0, multiplier, occasion)


def in_units_of_the_last_c(self, label, value, sensitivity, multiplier, occasion):
    if occasion.purpose == "norm-sum" and self.terms is not None:
        sensitivity = self.terms.clip_norm
    return RELEASED(self, label, value, sensitivity, multiplier, occasion)


def weighs_by_the_state_now(self, total, norms):
    """A draw was made before others were released; its records are weighed by what is known of them since."""
    if not isinstance(self.sampler, ImportanceSampler):
        return WEIGH(self, total, norms)
    now = self.sampler._estimate.importance(self.sampler.last_norms[total.draw.indices].numpy())
    draw = Draw(total.draw.indices, torch.from_numpy(now))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self, "_require_oldest", lambda _: self.terms)
        patch.setattr(total, "draw", draw)
        return WEIGH(self, total, norms)


def divided_by_a_share(self, label, value, sensitivity, multiplier, occasion):
    """The paper's 1/p_K: an estimate of the sum from a tenth of the records."""
    return RELEASED(self, label, value / 0.1, sensitivity, multiplier, occasion)


def uncharged(self, label, value, sensitivity, multiplier, occasion):
    normals = self._key.normals(f"release:{occasion.purpose}", occasion.epoch, value.numel())
    return noisy_update.add_noise({label: value}, 1.001 * multiplier * sensitivity, normals)[label]


def charges_afterwards(self, entries):
    """The events of an epoch are written when it has ended."""
    waiting, self.waiting = getattr(self, "waiting", []), list(entries)
    SPEND(self, waiting)


def norm_sum_every_step(self):
    if self.steps_left and self.plan.privacy.releases:
        event = self.plan.privacy.releases[-1]
        self._spend([module.Entry(event.label, event.event)])
    return DRAW_AHEAD(self)


def steps_by_the_population(self, all_norms):
    terms = BEGIN(self, all_norms)
    self.steps_left = self.sampler.population // self.plan.config.batch_size
    return terms


def reserves_nothing(plan, *, epoch, _real=adaptive.next_grad_noise, **given):
    """Every epoch spends as if it were the last."""
    return _real(plan, epoch=plan.workload.epochs, **given)


def c_star_unclipped(self, noisy_norm_sum, n_public):
    proposed = abs(self.scale * noisy_norm_sum / n_public)
    return proposed if 1e-9 < proposed < 1e25 else self.ceiling


def floor_in_absolute_units(self, shards, clip_norm, *, headroom, floor):
    INIT(self, shards, clip_norm, headroom=headroom, floor=floor / clip_norm)


# ── and who notices ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plant:
    """A bug: what is replaced by what, and the law that has to notice."""

    rule: str
    target: Any
    name: str
    bug: Any
    law: Callable[[], None]

    def __str__(self) -> str:
        return self.rule


def noise_times(factor: float) -> Callable[..., Any]:
    return lambda sums, std, normals: add_noise(sums, factor * std, normals)


def by_population(mechanism: Mechanism, draw: Draw) -> float:
    return mechanism.plan.workload.n_public / mechanism.sampler.population


def by_realised_batch(mechanism: Mechanism, draw: Draw) -> float:
    return mechanism.terms.equivalent_batch / max(1, len(draw))


PLANTS = [
    Plant("1 sticky coins", ImportanceSampler, "draw", sticky,
          steps.law_coins_are_fresh_and_as_probable_as_they_say),
    Plant("1 the same coins in all steps", Key, "coins", lambda self, purpose, step: COINS(self, purpose, 0),
          steps.law_coins_are_fresh_and_as_probable_as_they_say),
    Plant("2 no clip", module, "contribution_weights", unclipped,
          steps.law_one_record_moves_a_sum_by_at_most_one),
    Plant("2 clipped at C, not at the estimate", module, "contribution_weights", clipped_at_c,
          steps.law_one_record_moves_a_sum_by_at_most_one),
    Plant("3 probabilities capped at one, not at π", ImportanceSampler, "draw", capped_at_one,
          steps.law_coins_are_fresh_and_as_probable_as_they_say),
    Plant("3 the floor is taken for a norm, not for a share of C", ImportanceSampler, "__init__",
          floor_in_absolute_units, steps.law_coins_are_fresh_and_as_probable_as_they_say),
    Plant("4 K_tilde is not clipped", NormSumBounds, "clip", lambda self, raw: raw,
          releases.law_released_norm_sums_stay_in_their_bounds),
    Plant("4 NaN passes for the lower bound", NormSumBounds, "clip",
          lambda self, raw: min(max(self.lowest, raw), self.highest),
          releases.law_released_norm_sums_stay_in_their_bounds),
    Plant("5 the number of records decides the steps", Mechanism, "begin_epoch", steps_by_the_population,
          releases.law_the_number_of_records_decides_nothing),
    Plant("5 the number of records decides the scale", Mechanism, "release_sum", scaled(by_population),
          releases.law_the_number_of_records_decides_nothing),
    Plant("6 7 noise without the bound of the norms", Mechanism, "_released", in_units_of_one,
          releases.law_noise_over_sensitivity_is_what_is_charged),
    Plant("6 8 K' is noised with the last epoch's C", Mechanism, "_released", in_units_of_the_last_c,
          releases.law_norm_sums_follow_the_clip_norm),
    Plant("6 7 K over p_K", Mechanism, "_released", divided_by_a_share,
          releases.law_noise_over_sensitivity_is_what_is_charged),
    Plant("6 7 norms are summed unclipped", ImportanceSampler, "sum_of_last_norms",
          lambda self, bound, unseen: [np.minimum(self._last_norms, 1e9).sum()],
          releases.law_noise_over_sensitivity_is_what_is_charged),
    Plant("6 7 norm sums are not charged", Mechanism, "_released", uncharged,
          releases.law_every_event_is_charged_in_its_order),
    Plant("8 C leaves its bounds", AdaptiveClipping, "next_clip_norm", c_star_unclipped,
          releases.law_the_clip_norm_stays_in_its_bounds),
    Plant("8 the sampler keeps the old C", ImportanceSampler, "set_clip_norm", lambda self, C: None,
          releases.law_the_clip_norm_stays_in_its_bounds),
    Plant("8 unseen records count the bound", ImportanceSampler, "sum_of_last_norms",
          lambda self, bound, unseen: SUM(self, bound, bound), releases.law_unseen_records_count_the_clip_norm),
    Plant("8 unseen records count nothing", ImportanceSampler, "sum_of_last_norms",
          lambda self, bound, unseen: SUM(self, bound, 0.0), releases.law_unseen_records_count_the_clip_norm),
    Plant("8 K at every step", Mechanism, "draw_ahead", norm_sum_every_step,
          releases.law_every_event_is_charged_in_its_order),
    Plant("12 off by a factor b", Mechanism, "release_sum", scaled(lambda m, d: m.plan.config.batch_size),
          steps.law_the_mean_of_an_update),
    Plant("12 every candidate is accepted", module, "contribution_weights", accepts_all,
          steps.law_the_mean_of_an_update),
    Plant("12 15 divided by the realised batch", Mechanism, "release_sum", scaled(by_realised_batch),
          steps.law_the_mean_of_an_update),
    Plant("12 clipped at C and weighted by the estimate", module, "contribution_weights", clipped_at_c,
          steps.law_the_mean_of_an_update),
    Plant("12 a draw made ahead is weighed by what is known later", Mechanism, "_weights", weighs_by_the_state_now,
          steps.law_a_draw_made_ahead_is_weighed_as_it_was_drawn),
    Plant("15 divided by the realised batch", Mechanism, "release_sum", scaled(by_realised_batch),
          steps.law_an_empty_batch_is_a_normal_step),
    Plant("15 an empty step is skipped", Mechanism, "release_sum", skips_empty,
          steps.law_an_empty_batch_is_a_normal_step),
    Plant("15 an empty step has no noise", Mechanism, "release_sum", silent_when_empty,
          steps.law_an_empty_batch_is_a_normal_step),
    Plant("16 norms are stored clipped", ImportanceSampler, "observe", stores_clipped,
          steps.law_a_record_that_grew_is_held_back_once),
    Plant("16 norms are not stored", ImportanceSampler, "observe",
          lambda self, i, n: None if len(i) == 1 and n.dtype == torch.float64 else OBSERVE(self, i, n),
          steps.law_a_record_that_grew_is_held_back_once),
    Plant("18 one stream for all steps", Key, "coins", lambda self, purpose, step: COINS(self, purpose, 0),
          steps.law_no_stream_serves_twice),
    Plant("18 the same noise in all steps", Key, "normals", lambda self, purpose, _, n: NORMALS(self, purpose, 0, n),
          steps.law_no_stream_serves_twice),
    Plant("18 one stream for coins and second coins", Key, "coins", lambda self, _, step: COINS(self, "all", step),
          steps.law_no_stream_serves_twice),
    Plant("19 coarse norms", module, "contribution_weights", coarse_norms,
          steps.law_the_rounding_of_a_contribution),
    Plant("19 nothing is added for rounding", module, "APPLIED_NOISE", 1.0, steps.law_the_applied_noise),
    Plant("21 events are charged afterwards", Mechanism, "_spend", charges_afterwards,
          releases.law_events_come_before_their_outputs),
    Plant("filter: later epochs are not reserved for", adaptive, "next_grad_noise", reserves_nothing,
          releases.law_released_norm_sums_stay_in_their_bounds),
    Plant("noise: two thirds", noisy_update, "add_noise", noise_times(2 / 3), steps.law_the_scale_of_noise),
    Plant("noise: three halves", noisy_update, "add_noise", noise_times(3 / 2), steps.law_the_scale_of_noise),
    Plant("noise: in units of C", noisy_update, "add_noise", noise_times(0.25), steps.law_the_applied_noise),
    Plant("variance: every candidate adds a unit vector", module, "contribution_weights",
          lambda n, g, *, how, **given: 1 / n if how == "weight" else contribution_weights(n, g, how=how, **given),
          steps.law_sampling_variance),
    Plant("weights: by the clip norm", module, "contribution_weights",
          lambda n, g, *, clip_norm, **_: unclipped(n, torch.full_like(g, clip_norm)),
          steps.law_updates_weigh_by_inverse_probability),
    Plant("uniform sampling in the place of importance", Estimate, "importance",
          lambda self, norms: np.full(len(norms), self.clip_norm), steps.law_updates_weigh_by_inverse_probability),
    Plant("infinite headroom keeps estimates", Estimate, "importance",
          lambda self, norms: np.minimum(2 * np.maximum(norms.astype(float), self.floor), self.clip_norm),
          steps.law_infinite_headroom_is_dp_sgd),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_bug_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant.target, plant.name, plant.bug)
    with pytest.raises((AssertionError, DpisError)):
        plant.law()
