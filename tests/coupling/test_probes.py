"""Probes by themselves: what each must refuse, what it must let pass, and when it looks."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.coupling import owners
from dpis.coupling.agreement import PlainGradients, norms_fit, same_gradient, without_dropout
from dpis.coupling.divisors import Divisors
from dpis.coupling.items import AugmentProbe, CollateProbe, FetchProbe
from dpis.coupling.looks import Looks
from dpis.coupling.loss import LossProbe
from dpis.coupling.loss_tape import LossTape
from dpis.coupling.loss_watch import LossRules, LossWatch
from dpis.coupling.neighbours import (
    half_of,
    refuse_coupled_losses,
    refuse_gradient_of_others,
    with_one_changed,
)
from dpis.coupling.outputs import WatchedOutput, unwatch, watched_outputs
from dpis.coupling.own_means import OwnMeans
from dpis.coupling.owners import UNKNOWN, owners_of
from dpis.errors import CouplingError

ROWS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def test_a_look_that_showed_nothing_is_owed() -> None:
    looks = Looks()
    assert looks.now
    assert [looks.due() for _ in range(3)] == [True, True, False]
    looks.showed(False)
    assert looks.due()
    looks.showed(True)
    assert [looks.due() for _ in range(4)] == [False, False, False, True]


# ── items ────────────────────────────────────────────────────────────────────────────────────────────


def alone(rows: Tensor) -> Tensor:
    return 2 * rows


def centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(0)


def probes(made: Callable[[Tensor], Tensor]) -> list[Callable[[], None]]:
    """The same function behind each door."""

    def fetch(places: Any) -> list[Tensor]:
        return list(made(ROWS[places]))

    def collate(items: list[Tensor]) -> Tensor:
        return made(torch.stack(items))

    places, collating = list(range(6)), CollateProbe(collate)
    return [
        lambda: FetchProbe(fetch).look(places, fetch(places), nullcontext),
        lambda: collating.look(made(ROWS), collating.keep(list(ROWS)), nullcontext),
        lambda: AugmentProbe(1, batch_shaped=False).look(ROWS, made(ROWS), made),
    ]


@pytest.mark.parametrize("door", range(3), ids=["fetch", "collate", "augment"])
def test_items_that_are_made_of_others(door: int) -> None:
    probes(alone)[door]()
    with pytest.raises(CouplingError, match=r"mixes.*guarantee would not hold"):
        probes(centred)[door]()


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────


def differentiate(loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What a loop does after a forward pass; returns what it kept."""
    leaf = ROWS.clone().requires_grad_()
    probe, tape = LossProbe(), LossTape()
    rules = LossRules(
        mean=True,
        means=OwnMeans(),
        divisors=Divisors(mean=True),
        look=lambda watch, *given: probe.refuse_coupled(*given, [watch.leaves], tape),
    )
    watch = LossWatch(len(ROWS), rules, tape=tape)
    watch.open([(leaf, 0)])
    outputs = watched_outputs(leaf, watch)
    kept = [outputs.detach(), outputs.argmax(1), outputs]
    loss(outputs).backward()
    unwatch(watch)
    return kept


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: (out[:, None] - out[None]).abs().mean(),
        lambda out: out.square().mean().sqrt(),
        lambda out: functional.cross_entropy(out, out.argmax(1), reduction="none").topk(1)[0].sum(),
    ],
    ids=["pairs", "root", "hardest"],
)
def test_losses_that_couple_rows(loss: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CouplingError, match="The loss couples records"):
        differentiate(loss)


def test_what_has_no_gradient_is_plain_after_the_step_and_nothing_hangs_on_tensors() -> None:
    *plain, outputs = differentiate(lambda out: functional.mse_loss(out, torch.ones(6, 3)))
    assert [type(tensor) for tensor in plain] == [Tensor, Tensor]
    assert isinstance(outputs, WatchedOutput)
    assert not any(vars(tensor) for tensor in (*plain, outputs))


@pytest.mark.parametrize(
    ("turned", "owners"),
    [
        (lambda out: out.flip(0), [5, 4, 3, 2, 1, 0]),
        (lambda out: out[[4, 1, 1]][:, None] * 3, [4, 1, 1]),
        (lambda out: out.log_softmax(1)[2:].reshape(-1, 3), [2, 3, 4, 5]),
        (lambda out: out.T.reshape(-1, 1), [*range(6)] * 3),
        (lambda out: torch.cat([out[:1].detach(), out[1:]]), [UNKNOWN, 1, 2, 3, 4, 5]),
    ],
    ids=["turned round", "picked, one twice", "softmax", "classes first", "a constant"],
)
def test_rows_are_known_by_what_they_are_made_of(
    turned: Callable[[Tensor], Tensor], owners: list[int]
) -> None:
    leaf = ROWS.clone().requires_grad_()
    assert owners_of(turned(leaf), [(leaf, 0)]).tolist() == owners


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda out: out,
    "shifted tokens": lambda out: out[..., :-1, :].contiguous().view(-1, 5),
    "positions first": lambda out: out.transpose(0, 1).reshape(-1, 5),
    "every second": lambda out: out[::2, 1:].flatten(0, 1),
    "the last ones": lambda out: out[-2:].reshape(-1, 5),
    "in half precision": lambda out: out.bfloat16().float().view(-1, 5)[:, :5],
    "twice reshaped": lambda out: out.view(3, 2, 2, 5).transpose(1, 2).reshape(-1, 5),
    "reshaped, then transposed": lambda out: out.reshape(4, 3, 5).transpose(0, 1).reshape(-1, 5),
    "fewer features": lambda out: out[..., :3].reshape(-1, 3),
    "features among rows": lambda out: out.reshape(-1, 1),
    "features first": lambda out: out.permute(0, 2, 1),
}


@pytest.mark.parametrize("name", MOVES)
def test_rows_that_were_only_moved_are_known_without_asking(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = torch.randn(3, 4, 5, requires_grad=True)
    rows = MOVES[name](leaf.clone())
    quick = owners._moved_alone(rows, [(leaf, 0)])
    assert (quick is None) == ("features" in name)
    monkeypatch.setattr(owners, "_moved_alone", lambda *_: None)
    assert quick is None or torch.equal(quick, owners_of(rows, [(leaf, 0)]))


@pytest.mark.parametrize("seed", range(40))
def test_chains_of_moves_are_followed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chain: the numbers that are moved agree with what derivatives answer, or nothing is said."""
    chance, leaf = random.Random(seed), torch.randn(4, 3, 6, 5, requires_grad=True)
    dim, rows = chance.randrange(3), leaf.clone()
    for _ in range(chance.randrange(1, 6)):
        kinds = [
            lambda x: x.transpose(*(chance.randrange(x.ndim - 1) for _ in range(2))),
            lambda x: x[chance.choice([slice(1, None), slice(None, None, 2), slice(-2, None)])],
            lambda x: x.flatten(0, -2) if x.ndim > 2 else x.unflatten(0, (1, -1)),
            lambda x: x.contiguous().clone(),
        ]
        rows = chance.choice(kinds)(rows)
    quick = owners._moved_alone(rows, [(leaf, dim)])
    monkeypatch.setattr(owners, "_moved_alone", lambda *_: None)
    try:
        asked = owners_of(rows, [(leaf, dim)])
    except CouplingError:
        assert quick is None
    else:
        assert quick is None or torch.equal(quick, asked)


def test_more_rows_than_one_digit_tells() -> None:
    leaf = torch.randn(3, 1000, 2, requires_grad=True)
    rows = leaf.transpose(0, 1).reshape(-1, 2).log_softmax(1)
    assert torch.equal(owners_of(rows, [(leaf, 0)]), torch.arange(3000) % 3)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────


def test_one_of_three_records_is_changed_and_no_other_may_move() -> None:
    for record in range(3):
        changed = with_one_changed(ROWS, record, 2)
        moved = (changed != ROWS).any(1).reshape(3, 2).any(1)
        assert moved.tolist() == [number == record for number in range(3)]
        refuse_coupled_losses(ROWS.sum(1), changed.sum(1), record, 2)
        with pytest.raises(CouplingError, match="the loss of another record changed"):
            refuse_coupled_losses(
                centred(ROWS).norm(dim=1), centred(changed).norm(dim=1), record, 2
            )


def test_half_of_the_records_are_asked_and_the_others_have_no_gradient() -> None:
    assert [int(half_of(records).sum()) for records in (1, 2, 5)] == [1, 1, 3]
    refuse_gradient_of_others(torch.tensor([0.0, torch.nan]), "linear")
    with pytest.raises(CouplingError, match=r"in linear with weight the losses.*guarantee"):
        refuse_gradient_of_others(torch.tensor([0.0, 1e-30]), "linear with weight")


@dataclass(frozen=True)
class Recorded:
    """Gradients of one parameter, with the norms that they are said to have."""

    gradients: Tensor
    of: float = 1.0

    @property
    def records(self) -> int:
        return len(self.gradients)

    def norms(self) -> Tensor:
        return self.of * self.gradients.double().norm(dim=1)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {"weight": weights.to(self.gradients) @ self.gradients}


def test_gradients_and_norms_are_compared_record_by_record() -> None:
    plain = PlainGradients.of({"weight": row} for row in ROWS)
    assert plain.disagreements(Recorded(ROWS), half=False) == []
    assert plain.disagreements(Recorded(1.01 * ROWS), half=False) == ["weight"]
    assert plain.disagreements(Recorded(ROWS, of=0.9), half=False) == ["weight"]
    assert norms_fit(Recorded(ROWS), half=False)
    assert not norms_fit(Recorded(ROWS, of=0.9), half=False)


@pytest.mark.parametrize("record", range(len(ROWS)))
def test_one_wrong_record_shows_beside_large_ones(record: int) -> None:
    """Each is in the sum with length one: what is off by a hundredth of a small gradient is not lost."""
    sizes = 10.0 ** torch.arange(0, 2 * len(ROWS), 2)
    rows = ROWS * sizes[:, None].flip(0)
    plain = PlainGradients.of({"weight": row} for row in rows)
    wrong = rows.clone()
    wrong[record] = rows[record].roll(1)  # of the right length
    assert plain.disagreements(Recorded(rows), half=False) == []
    assert plain.disagreements(Recorded(wrong), half=False) == ["weight"]


def test_gradients_that_agree_one_way() -> None:
    assert same_gradient(ROWS[0], 1.01 * ROWS[0], half=True)
    assert not same_gradient(ROWS[0], 1.01 * ROWS[0], half=False)


def test_a_model_without_its_dropout_for_a_while() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    with without_dropout(model):
        assert torch.equal(model(ROWS), model(ROWS))
    assert model.training
    assert not torch.equal(model(ROWS), model(ROWS))
