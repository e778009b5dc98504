"""For what a private loop promises: plant the bug, and a law must fail.

The laws hold for the real code, which is tried first. One that still passed with the bug would be a check that cannot
fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dpis.accounting import CountSource
from dpis.dropin import privacy_engine, request
from dpis.dropin.session import Session
from dpis.dropin.trainer_settings import TrainerSettings
from dpis.errors import DpisError, InputError
from dpis.gradients.deferred import DeferredGradients
from dpis.mechanism import config, noisy_update
from dpis.noise import add_noise
from dpis.options import Privacy
from dpis.randomness import Key

from . import laws_of_loops as loops

LAWS = {name: law for name, law in vars(loops).items() if name.startswith("law_")}


@pytest.mark.parametrize("name", LAWS)
def test_law(name: str) -> None:
    LAWS[name]()


# ── the bugs ─────────────────────────────────────────────────────────────────────────────────────────

RELEASE, FOLD, OF, TAPE = (
    Session.release,
    Session.fold,
    request.Request.of.__func__,
    DeferredGradients.tape,
)


def noise_for_the_first_parameter(sums: Any, std: float, normals: Any) -> Any:
    first = min(sums)
    return sums | add_noise({first: sums[first]}, std, normals, begins={first: 0})


def same_noise_for_all(sums: Any, std: float, normals: Any) -> Any:
    """Every parameter begins the noise anew."""
    for name, value in sums.items():
        add_noise({name: value}, std, normals, begins={name: 0})
    return sums


def releases_one_parameter(self: Session) -> Any:
    update = RELEASE(self)
    if update is None:
        return None
    first = next(iter(update))
    return {name: value if name == first else 0 * value for name, value in update.items()}


def scaled_by_the_draw(self: Session) -> None:
    """A mean over a part of the rows is undone as if it were over all of them."""
    with pytest.MonkeyPatch.context() as patch:
        whole = float(self._step.expected)  # of a backward pass that began with the rows of a part
        patch.setattr(self.gradients, "tape", lambda p, _: TAPE(self.gradients, p, whole / p.rows))
        FOLD(self)


def by_the_rows_that_came(self: Session, update: Any) -> Any:
    drawn_last = int(self.mechanism.sampler.last_norms.isfinite().sum())
    return {name: max(1, drawn_last) * value for name, value in update.items()}


def asks_only_what_is_missing(optimizer: Any, module: Any) -> Any:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in stepped for p in module.parameters()):
        raise InputError("missing")
    return optimizer


def asked_otherwise(**changes: Any) -> Any:
    """What was asked for, but for these."""
    return classmethod(
        lambda cls, privacy, options, **given: OF(cls, privacy, {**options, **changes}, **given)
    )


def forgets(*names: str) -> Callable[..., Any]:
    """An integration that leaves some of the guarantee to defaults."""

    def make(self: TrainerSettings, engine: Any, *given: Any) -> Any:
        def left_to_defaults(method: Callable[..., Any]) -> Callable[..., Any]:
            def made(privacy: Privacy, **asked: Any) -> Any:
                said = {name: getattr(privacy, name) for name in privacy.said - set(names)}
                kept = {name: value for name, value in asked.items() if name not in names}
                return method(privacy=Privacy(**said), **kept)

            return made

        fewer = SimpleNamespace(
            make_private=left_to_defaults(engine.make_private),
            make_private_with_epsilon=left_to_defaults(engine.make_private_with_epsilon),
        )
        return MAKE(self, fewer, *given)  # type: ignore[arg-type]

    return make


MAKE = TrainerSettings.make_private
GIVEN = SimpleNamespace(DATASET_LENGTH=CountSource.GIVEN, GIVEN=CountSource.GIVEN)


# ── and who notices ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plant:
    """A bug: what is replaced by what, and the law that has to notice."""

    rule: str
    target: Any
    name: str
    bug: Any
    law: Callable[..., None]

    def __str__(self) -> str:
        return self.rule


PLANTS = [
    Plant("noise: on the first parameter only", noisy_update, "add_noise", noise_for_the_first_parameter,
          loops.law_every_parameter_has_its_noise),
    Plant("noise: the same in every parameter", noisy_update, "add_noise", same_noise_for_all,
          loops.law_every_parameter_has_its_noise),
    Plant("noise: one parameter is stepped", Session, "release", releases_one_parameter,
          loops.law_every_parameter_has_its_noise),
    Plant("parts: a mean is undone by the rows of the draw", Session, "fold", scaled_by_the_draw,
          loops.law_parts_of_a_batch_add_up),
    Plant("15 a sum by the rows that came", Session, "_as_sum", by_the_rows_that_came,
          loops.law_parts_of_a_batch_add_up),
    Plant("an optimizer with a parameter of another model", privacy_engine, "checked_optimizer",
          asks_only_what_is_missing, loops.law_an_optimizer_steps_what_is_protected_and_nothing_else),
    Plant("18 a key that can be guessed, where none was asked for", Key, "fresh", lambda: Key.from_seed(0),
          loops.law_noise_without_a_seed_is_the_operating_systems),
    Plant("5 a count from the data passes for one that was given", config, "CountSource", GIVEN,
          loops.law_a_count_from_the_data_is_public),
    Plant("asked: the headroom is the usual one", request.Request, "of", asked_otherwise(headroom=5.0),
          loops.law_what_is_asked_for_is_what_is_planned),
    Plant("asked: kappa is one", request.Request, "of", asked_otherwise(kappa=1.0),
          loops.law_what_is_asked_for_is_what_is_planned),
    Plant("asked: uniform sampling is by importance", request.Request, "of", asked_otherwise(method="dpis"),
          loops.law_what_is_asked_for_is_what_is_planned),
    *(Plant(f"integration: {name} is left out", TrainerSettings, "make_private", forgets(name),
            loops.law_the_guarantee_of_an_integration_is_that_of_its_engine)
      for name in ("n_public", "headroom", "kappa", "method", "seed")),
]  # fmt: skip


QUICK = (
    "noise: on the first parameter only",
    "18 a key that can be guessed, where none was asked for",
    "5 a count from the data passes for one that was given",
    "parts: a mean is undone by the rows of the draw",
    "an optimizer with a parameter of another model",
)


@pytest.mark.filterwarnings("ignore:the number of records")
@pytest.mark.parametrize(
    "plant",
    [pytest.param(p, marks=() if p.rule in QUICK else pytest.mark.slow, id=p.rule) for p in PLANTS],
)
def test_a_planted_bug_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant.target, plant.name, plant.bug)
    with pytest.raises((AssertionError, DpisError)):
        plant.law()
