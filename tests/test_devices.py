"""A step on another device mixes no devices, and does not wait for the device but where the list says so.

The list can only shrink: what is not in it fails, and so does what is in it and no longer happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpis import PrivacyEngine, batches
from dpis.gradients import RecordGradients
from dpis.mechanism import Contribution, EventCounter, Mechanism
from dpis.randomness import Key
from tests.elsewhere import (
    DEVICE,
    SOURCE,
    Elsewhere,
    Event,
    MixedDevicesError,
    Traffic,
    elsewhere,
    moved,
)
from tests.gradients.problems import PROBLEMS, RECORDS, Problem, mlp
from tests.mechanism.systems import config, plan_of

STEPS = 3
"""At the first and the second the engine looks around; the third is like most."""


@dataclass(frozen=True)
class Known:
    """Something that a step should not do on an accelerator, and does.

    Attributes:
        place: the function.
        what: it does there.
        case: in which it happens.
        reason: why it is there.
    """

    place: str
    what: str
    case: str
    reason: str


READS, EQUAL, SIZE = "reads a number", "reads whether all are equal", "a size follows values"
FROM_HOST, TO_HOST = "is copied from the host", "is copied to the host"
KNOWN = (
    Known(
        "gradients/factors/factor.py::squared_norms_and_doubts",
        READS,
        "mlp",
        "decides whether squares are made anew in float64 (rule 25)",
    ),
    Known(
        "gradients/factors/factor.py::squared_norms_and_doubts",
        SIZE,
        "embedding-bag-ragged",
        "only the doubtful are made anew; rare, but a record without gradient is one",
    ),
    Known(
        "gradients/factors/factor.py::finite_sum",
        READS,
        "mlp",
        "decides whether a sum is made anew in float64 (rule 25); once for each parameter",
    ),
    Known(
        "gradients/factors/factor.py::kept_by",
        READS,
        "mlp",
        "asks whether all weights are ordinary numbers",
    ),
    Known(
        "gradients/factors/factor.py::kept_by",
        SIZE,
        "embedding-bag-ragged",
        "leaves out who has weight zero",
    ),
    Known(
        "gradients/factors/lookup.py::Lookup._squares_of_distinct_rows",
        SIZE,
        "embedding-long",
        "counts every word of a record once",
    ),
    Known(
        "gradients/factors/lookup.py::Lookup.block_sum",
        SIZE,
        "embedding-long",
        "adds up every word of a chunk in float64, and no table of float64 is made",
    ),
    Known(
        "gradients/rules/embedding.py::_padded_bags",
        READS,
        "embedding-bag-ragged",
        "fills bags up to the longest of the batch",
    ),
    Known(
        "gradients/rules/recurrent/steps.py::Timetable._rows",
        FROM_HOST,
        "lstm-packed",
        "packed sequences are counted on the host",
    ),
    Known(
        "mechanism/contribution.py::contribution_weights",
        FROM_HOST,
        "mlp",
        "importances are kept on the host: one number a record",
    ),
    Known(
        "mechanism/gradient_sum.py::GradientSum.add",
        TO_HOST,
        "mlp",
        "norms are kept on the host: one number a record",
    ),
    Known(
        "noise.py::add_noise", TO_HOST, "mlp", "noise is added on the host, by a secure generator"
    ),
    Known("noise.py::add_noise", FROM_HOST, "mlp", "and the sums go back"),
    Known(
        "dropin/delivered.py::Delivered._same",
        FROM_HOST,
        "drop-in",
        "compares inputs with what was delivered",
    ),
    Known(
        "dropin/delivered.py::Delivered._same",
        EQUAL,
        "drop-in",
        "compares inputs with what was delivered",
    ),
    Known("coupling/writes.py::_same", EQUAL, "drop-in", "layers must keep nothing of records"),
    Known("coupling/writes.py::digest", TO_HOST, "drop-in-large", "the same, for large tensors"),
)


def events_of_a_step(step: Callable[[], None], traffic: Traffic) -> set[Event]:
    """What the last of some steps did."""
    for _ in range(STEPS):
        traffic.forget()
        step()
    return set(traffic.events)


def mechanism_step(problem: Problem, **changes: Any) -> set[Event]:
    """Norms, weights, weighted sum, observation and noise, of all records."""
    torch.manual_seed(0)
    many = {"n_public": RECORDS, "batch_size": RECORDS, "epochs": STEPS, "headroom": 1e6}
    plan = plan_of(config(**(many | changes)))
    mechanism = Mechanism(plan, RECORDS, Key.from_seed(0), EventCounter())
    K = problem.rows_per_record
    with elsewhere() as traffic:
        rows = batches.apply(Elsewhere, problem.batch(RECORDS * K))
        gradients = RecordGradients(
            moved(problem.module()), objective=problem.objective, rows_per_record=K
        )

        def step() -> None:
            mechanism.begin_epoch()
            total = mechanism.start_sum(mechanism.draw(), gradients.parameters)
            for tape in gradients.tapes(rows):
                mechanism.add(total, tape)
            update = mechanism.release_sum(total)
            assert {value.device for value in update.values()} == {DEVICE}

        return events_of_a_step(step, traffic)


def dropin_step(width: int = 8) -> set[Event]:
    """A loop that brings its batches to the device."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(RECORDS, 6), torch.randint(0, 4, (RECORDS,)))
    with elsewhere() as traffic, pytest.MonkeyPatch.context() as patch:
        # A tensor has one class: outputs that are elsewhere cannot be watched too.
        patch.setattr("dpis.dropin.session.watched_outputs", lambda outputs, *_: outputs)
        model = moved(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4)))
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=RECORDS),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            n_public=RECORDS,
            headroom=1e6,
        )

        def step() -> None:
            for inputs, targets in loader:
                optimizer.zero_grad()
                outputs = model(inputs.to(DEVICE))
                nn.functional.cross_entropy(outputs, targets.to(DEVICE)).backward()
                optimizer.step()

        return events_of_a_step(step, traffic)


CASES: dict[str, Callable[[], set[Event]]] = {
    **{problem.id: functools.partial(mechanism_step, problem) for problem in PROBLEMS},
    "rejecting": functools.partial(
        mechanism_step,
        next(problem for problem in PROBLEMS if problem.id == "mlp"),
        contribution=Contribution.REJECT,
    ),
    "drop-in": dropin_step,
    "drop-in-large": functools.partial(dropin_step, width=5000),
}

pytestmark = pytest.mark.filterwarnings("ignore::dpis.gradients.SlowGradientsWarning")


def named(event: Event) -> tuple[str, str]:
    return event.place, event.what


WITNESSES = sorted({known.case for known in KNOWN})
every_case = [
    case if case in WITNESSES else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize("case", every_case)
def test_a_step_waits_for_the_device_only_where_it_is_known_to(case: str) -> None:
    found = CASES[case]()
    known = {(one.place, one.what) for one in KNOWN}
    new = sorted(f"{e.place}, line {e.line}: {e.what}" for e in found if named(e) not in known)
    assert not new, new
    happened = {named(event) for event in found}
    gone = [one for one in KNOWN if one.case == case and (one.place, one.what) not in happened]
    assert not gone, f"strike from KNOWN: {gone}"


class TestTheOtherDevice:
    """What is planted is seen."""

    @staticmethod
    def events(planted: str) -> set[tuple[str, str]]:
        """Of an expression of a tensor ``t``, planted in a function of `dpis.noise`."""
        text = f"def planted(t): return {planted}"
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(text, str(SOURCE / "noise.py"), "exec"), scope)
        with elsewhere() as traffic:
            scope["planted"](Elsewhere(torch.arange(4.0)))
        return {named(event) for event in traffic.events}

    @pytest.mark.parametrize(
        ("read", "what"),
        [
            ("t.sum().item()", READS),
            ("float(t.sum())", READS),
            ("bool(t.any())", READS),
            ("t.cpu()", TO_HOST),
            ("t[t > 0]", SIZE),
            ("t.nonzero()", SIZE),
            ("t.unique()", SIZE),
            ("torch.equal(t, t)", EQUAL),
            ("torch.ones(4).to(t.device)", FROM_HOST),
            ("t[torch.tensor([1, 2])]", FROM_HOST),
        ],
    )
    def test_waiting_is_noted(self, read: str, what: str) -> None:
        assert ("noise.py::planted", what) in self.events(read)

    @pytest.mark.parametrize(
        "harmless",
        [
            "t.sum() * 2",
            "torch.where(t > 0, t, 0.0)",
            "torch.zeros(4, device=t.device) + t",
            "t * torch.tensor(2.0)",
        ],
    )
    def test_what_stays_there_is_not(self, harmless: str) -> None:
        assert not self.events(harmless)

    def test_mixed_devices_raise(self) -> None:
        with pytest.raises(MixedDevicesError, match=r"noise\.py::planted"):
            self.events("t + torch.ones(4)")

    def test_values_are_those_of_the_host(self) -> None:
        torch.manual_seed(0)
        here = mlp()
        inputs = torch.randn(3, 6)
        expected = torch.autograd.grad(here(inputs).square().sum(), list(here.parameters()))
        with elsewhere():
            there = moved(here)
            loss = there(Elsewhere(inputs)).square().sum()
            found = torch.autograd.grad(loss, list(there.parameters()))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other)
