"""Losses as people write them: each runs as it is, or is refused with the harm and the edit.

For each that runs, the law: one record more adds its own contribution to the sum, and moves nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from dpis.coupling import loss_watch
from dpis.coupling.own_means import OwnMeans, OwnMeanWarning
from dpis.dropin import session as session_module
from dpis.errors import CouplingError, MisuseError

from . import Loop, data, first_batch, mlp, private
from .one_more import MOST, assert_adds_its_own, moved_by_one_more

Loss = Callable[[Any, Tensor], Tensor]
Make = Callable[[], nn.Module]

TOKENS, WORDS = 5, 7


def said(expected: bool) -> AbstractContextManager[Any]:
    """What is replaced is said, once."""
    return (
        pytest.warns(OwnMeanWarning, match="averaged by themselves") if expected else nullcontext()
    )


def by(loss: Loss) -> Callable[..., None]:
    """One step with a loss of outputs and targets."""

    def step(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
        loop.optimizer.zero_grad()
        loss(loop.model(inputs), targets).backward()
        loop.optimizer.step()

    return step


# ── one target for every record ──────────────────────────────────────────────────────────────────────

WEIGHT = torch.tensor([1.0, 5.0, 0.5]).double()


def with_ignored() -> TensorDataset:
    """A third of the targets do not count; the last one does."""
    inputs, targets = data(MOST)[:]
    targets[: MOST - 1 : 3] = -100
    return TensorDataset(inputs, targets)


def one_hot(targets: Tensor) -> Tensor:
    return functional.one_hot(targets, 3).double()


def loss_class_weights_and_smoothing_reduction_none(out: Tensor, y: Tensor) -> Tensor:
    criterion = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, reduction="none")
    return criterion(out, y).mean()


def nll_with_weights(out: Tensor, y: Tensor) -> Tensor:
    return functional.nll_loss(functional.log_softmax(out / 2, dim=1), y, WEIGHT)


def loss_bce_multilabel_pos_weight(out: Tensor, y: Tensor) -> Tensor:
    return nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(out, one_hot(y))


def loss_sum_reduction(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out, y, WEIGHT, reduction="sum")


def picked_by_a_mask(out: Tensor, y: Tensor) -> Tensor:
    """A mean over those rows whose target is of a kind: how many there are is nobody's business."""
    return functional.cross_entropy(out[y != 1], y[y != 1])


def vae(out: Tensor, y: Tensor) -> Tensor:
    mean, log_var = out[:, :1], out[:, 1:2]
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
    return functional.mse_loss(out[:, 2], y.double()) + kl.mean()


LOSSES: list[tuple[Loss, bool]] = [
    (nn.CrossEntropyLoss(weight=WEIGHT), True),
    (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), True),
    (nn.CrossEntropyLoss(label_smoothing=0.1), False),
    (lambda out, y: functional.cross_entropy(out, one_hot(y), WEIGHT), True),
    (loss_class_weights_and_smoothing_reduction_none, False),
    (nll_with_weights, True),
    (loss_bce_multilabel_pos_weight, False),
    (lambda out, y: functional.mse_loss(out, one_hot(y)), False),
    (lambda out, y: functional.huber_loss(out, one_hot(y)), False),
    (lambda out, y: functional.binary_cross_entropy(out.sigmoid(), one_hot(y)), False),
    (picked_by_a_mask, False),
    (vae, False),
]
NAMES = ["loss_class_weights", "class_weights_and_smoothing", "loss_label_smoothing", "probabilities_and_weights",
         "loss_class_weights_and_smoothing_reduction_none", "nll_with_weights", "loss_bce_multilabel_pos_weight",
         "loss_mse", "huber", "bce", "picked_by_a_mask", "vae"]  # fmt: skip


@pytest.mark.parametrize(("loss", "replaced"), LOSSES, ids=NAMES)
def test_losses_of_records(loss: Loss, replaced: bool) -> None:
    with said(replaced):
        assert_adds_its_own(by(loss), mlp, data(MOST))


def test_loss_sum_reduction() -> None:
    assert_adds_its_own(by(loss_sum_reduction), mlp, data(MOST), loss_reduction="sum")


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["alone", "with weights"])
def test_loss_ignore_index(weight: Tensor | None) -> None:
    with said(True):
        assert_adds_its_own(by(nn.CrossEntropyLoss(weight)), mlp, with_ignored())


def test_a_record_whose_target_is_ignored_adds_nothing() -> None:
    inputs, targets = data(MOST)[:]
    targets[-1] = -100
    with said(True):
        moved, alone = moved_by_one_more(
            by(nn.CrossEntropyLoss()), mlp, TensorDataset(inputs, targets)
        )
    assert not moved.any()
    assert not alone.any()


def test_what_stands_for_a_mean_with_class_weights() -> None:
    """``w_y * l / mean(w)``, and their mean: where classes are balanced, what torch computes."""
    loop = private(loader={"batch_size": 32})
    _, inputs, targets = first_batch(loop)
    with said(True):
        ours = functional.cross_entropy(loop.model(inputs), targets, WEIGHT)
    losses = functional.cross_entropy(loop.plain_model(inputs), targets, WEIGHT, reduction="none")
    torch.testing.assert_close(ours.detach(), losses.detach().mean() / WEIGHT.mean())


@pytest.mark.parametrize("probabilities", [False, True])
def test_class_weights_made_of_the_batch_are_refused(probabilities: bool) -> None:
    def by_the_batch(out: Tensor, y: Tensor) -> Tensor:
        weight = 1.0 / (1 + torch.bincount(y, minlength=3)).double()
        target = functional.one_hot(y, 3).double() if probabilities else y
        return functional.cross_entropy(out, target, weight)

    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 32})
    batches = iter(loop.loader)
    with said(True):
        by(by_the_batch)(loop, *next(batches))
    with pytest.raises(CouplingError, match=r"same in every step.*guarantee would not hold"):
        by(by_the_batch)(loop, *next(batches))


@pytest.mark.parametrize("function", [functional.mse_loss, functional.huber_loss])
def test_weights_of_rows_with_a_mean_are_refused(function: Any) -> None:
    loop = private()
    _, inputs, targets = first_batch(loop)
    outputs = loop.model(inputs)
    weight = torch.rand(outputs.shape).double()
    with pytest.raises(
        CouplingError, match=r"sum of the weights in the whole batch.*reduction='none'"
    ):
        function(outputs, one_hot(targets), weight=weight)


def test_with_torchs_own_mean_others_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnMeans, "take", lambda self, *given, **named: None)
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    moved, alone = moved_by_one_more(by(loss), mlp, data(MOST), max_grad_norm=5.0)
    assert (moved - alone).norm() > 0.01


# ── rows that are picked, or turned about ────────────────────────────────────────────────────────────


def of_rows(out: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(out, one_hot(y), reduction="none").mean(1)


HARMLESS: dict[str, Loss] = {
    "mse of a mask": lambda out, y: functional.mse_loss(out[y != 1], one_hot(y[y != 1])),
    "l1 of numbers": lambda out, y: functional.l1_loss(
        out[(y != 1).nonzero()[:, 0]], one_hot(y[y != 1])
    ),
    "huber of index_select": lambda out, y: functional.huber_loss(
        out.index_select(0, (y != 1).nonzero()[:, 0]), one_hot(y[y != 1])
    ),
    "mse of one column": lambda out, y: functional.mse_loss(
        out[y != 1][:, 0], y[y != 1].double() + 3
    ),
    "a sum over all": lambda out, y: of_rows(out, y)[y != 1].sum() / len(out),
    "masked_select": lambda out, y: out.square().masked_select(one_hot(y).bool()).sum() / len(y),
    "zeros elsewhere": lambda out, y: (of_rows(out, y) * (y != 1)).mean(),
    "its own class": lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "gathered": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(),
    "classes turned about": lambda out, y: functional.cross_entropy(out.flip(1).roll(1, -1), y),
    "by a public number": lambda out, y: of_rows(out, y).mean() / torch.tensor(7.0).double(),
    "brought back": lambda out, y: torch.zeros(len(y)).double().index_add(
        0, (y != 1).nonzero()[:, 0], of_rows(out, y)[y != 1]
    ).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_rows_picked_by_their_own_target(name: str) -> None:
    inputs, targets = data(MOST)[:]
    targets[-1] = 2
    assert_adds_its_own(by(HARMLESS[name]), mlp, TensorDataset(inputs, targets))


DIVIDED_BY_THE_PICKED: dict[str, Loss] = {
    "a mean": lambda out, y: of_rows(out, y)[y != 1].mean(),
    "a mean, rows last": lambda out, y: out[y != 1].square().mean(0).sum(),
    "half precision and back": lambda out, y: torch.mean((out * 2)[y != 1].abs()),
    "logits": lambda out, y: functional.binary_cross_entropy_with_logits(
        out[y != 1], one_hot(y[y != 1])
    ),
    "masked_select": lambda out, y: out.masked_select(one_hot(y).bool() & (y != 1)[:, None]).mean(),
    "two picks": lambda out, y: functional.soft_margin_loss(
        torch.cat([out[y == 0], out[y == 2]]), torch.ones(int((y != 1).sum()), 3).double()
    ),
}


@pytest.mark.parametrize("name", DIVIDED_BY_THE_PICKED)
def test_a_mean_over_picked_rows_is_refused(name: str) -> None:
    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 32})
    with pytest.raises(
        CouplingError, match=r"how many were picked.*guarantee would not hold.*len\(outputs\)"
    ):
        by(DIVIDED_BY_THE_PICKED[name])(loop, *next(iter(loop.loader)))


TURNED_ABOUT: dict[str, Loss] = {
    "roll": lambda out, y: functional.cross_entropy(out.roll(1, 0), y),
    "roll of all": lambda out, y: functional.cross_entropy(torch.roll(out, 3), y),
    "flip": lambda out, y: functional.cross_entropy(out.flip(0), y),
    "flips": lambda out, y: functional.cross_entropy(torch.flip(out, dims=(0, 1)), y),
    "numbers": lambda out, y: functional.mse_loss(
        out[torch.arange(1, len(y) + 1) % len(y)], one_hot(y)
    ),
    "index_select": lambda out, y: functional.mse_loss(
        out.index_select(0, y.argsort(descending=True, stable=True).flip(0)), one_hot(y)
    ),
    "losses": lambda out, y: (of_rows(out, y).roll(1) * y).mean(),
    "flattened": lambda out, y: functional.mse_loss(out.flatten().roll(3), one_hot(y).flatten()),
}


@pytest.mark.parametrize("name", TURNED_ABOUT)
def test_rows_that_change_places_are_refused(name: str) -> None:
    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 32})
    with pytest.raises(CouplingError, match=r"changed places.*guarantee would not hold.*mask"):
        by(TURNED_ABOUT[name])(loop, *next(iter(loop.loader)))


BY_PLACE: dict[str, tuple[Loss, str]] = {
    "without the first": (lambda out, y: functional.mse_loss(out[1:], one_hot(y[:-1])), "place in"),
    "losses": (lambda out, y: of_rows(out, y)[: len(y) // 2].sum() / len(y), "place in"),
    "parts": (lambda out, y: sum(
        functional.mse_loss(a, one_hot(b)) for a, b in zip(out.split(5), y.split(5), strict=True)
    ) / len(y.split(5)), "some records alone"),
    "means of parts": (lambda out, y: sum(a.square().mean() for a in out.chunk(3)) / 3, "picked"),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_PLACE)
def test_rows_picked_by_their_place_are_refused(name: str) -> None:
    loss, match = BY_PLACE[name]
    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 32})
    with pytest.raises(CouplingError, match=match):
        by(loss)(loop, *next(iter(loop.loader)))


def test_sums_of_parts_are_a_sum() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        parts = zip(out.split(5), y.split(5), strict=True)
        return sum(functional.cross_entropy(a, b, reduction="sum") for a, b in parts) / len(y)

    assert_adds_its_own(by(loss), mlp, data(MOST))


def test_pos_weight_made_of_the_batch_is_refused() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        weight = len(y) / (1 + one_hot(y).sum(0))
        return functional.binary_cross_entropy_with_logits(out, one_hot(y), pos_weight=weight)

    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 32})
    batches = iter(loop.loader)
    by(loss)(loop, *next(batches))
    with pytest.raises(CouplingError, match=r"same in every step.*guarantee would not hold"):
        by(loss)(loop, *next(batches))


DIVIDED: dict[str, Loss] = {
    "a count of the batch": lambda out, y: of_rows(out, y)[y != 1].sum() / (y != 1).sum(),
    "masked": lambda out, y: (of_rows(out, y) * (y != 1)).sum() / (y != 1).sum().clamp(min=1),
    "a whole number": lambda out, y: (of_rows(out, y) * (y != 1)).sum() / int((y != 1).sum()),
    "inside": lambda out, y: (of_rows(out, y) * (y != 1) / (y != 1).sum()).sum(),
    "a product": lambda out, y: of_rows(out, y).sum() * (1 / (y != 1).sum()).double(),
    "a product, turned": lambda out, y: (1 / (y != 1).sum()).double() * of_rows(out, y).sum(),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_divisor_that_is_made_of_the_batch_is_refused(name: str) -> None:
    """At the second step, or soon: by one number nobody can tell whether it is public."""
    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 32})

    def train() -> None:
        for inputs, targets in loop.loader:
            by(DIVIDED[name])(loop, inputs, targets)

    with pytest.raises(CouplingError, match=r"made of the batch.*guarantee would not hold.*float"):
        train()


def test_schedules_and_counts_of_records_are_no_divisors_of_the_batch() -> None:
    step = 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        warm = min(1.0, step / 3)
        losses = of_rows(out, y)
        return (
            warm * losses.sum() / len(y)
            + losses.sum() / torch.tensor(2 * len(y))
            + losses.mean() / 4
        )

    loop = private(dataset=data(200), n_public=200, loader={"batch_size": 16})
    for step, (inputs, targets) in enumerate(loop.loader, start=1):  # noqa: B007
        by(loss)(loop, inputs, targets)
    assert step > 5


# ── several targets for every record ─────────────────────────────────────────────────────────────────


class Words(nn.Module):
    """Scores for every word of a text; or words first, texts second."""

    def __init__(self, texts_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(WORDS, 4).double()
        self.scores = nn.Linear(4, WORDS).double()
        self.texts_first = texts_first

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.table(words).cumsum(1))
        return scores if self.texts_first else scores.transpose(0, 1)


def texts() -> TensorDataset:
    """Of which more and more words do not count; the one before the last has none that does."""
    drawn = torch.randint(WORDS, (MOST, TOKENS), generator=torch.Generator().manual_seed(2))
    targets = drawn.clone()
    for text in range(MOST - 1):
        targets[text, : text % (TOKENS + 1)] = -100
    targets[-2] = -100
    return TensorDataset(drawn, targets)


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1))


TOKEN_LOSSES: dict[str, Loss] = {
    "flattened": lambda out, y: functional.cross_entropy(out.view(-1, WORDS), y.view(-1)),
    "shifted": shifted,
    "classes second": lambda out, y: functional.cross_entropy(out.transpose(1, 2), y),
    "half a temperature": lambda out, y: functional.cross_entropy(
        out.flatten(0, 1) / 0.5, y.flatten()
    ),
    "log_softmax first": lambda out, y: functional.nll_loss(
        out.log_softmax(2).view(-1, WORDS), y.view(-1)
    ),
    "picked by a mask": lambda out, y: functional.cross_entropy(out[y != -100], y[y != -100]),
    "with weights": lambda out, y: functional.cross_entropy(
        out.view(-1, WORDS), y.view(-1), torch.arange(1.0, WORDS + 1).double()
    ),
}


@pytest.mark.parametrize("loss", TOKEN_LOSSES.values(), ids=TOKEN_LOSSES)
def test_loss_token_ignore_index(loss: Loss) -> None:
    with said(loss is not TOKEN_LOSSES["picked by a mask"]):
        assert_adds_its_own(by(loss), Words, texts())


def test_words_first_and_as_many_words_as_texts() -> None:
    """Rows are told by what they are made of: their number says nothing."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out.reshape(-1, WORDS), y.T.reshape(-1))

    square = TensorDataset(*(t[:TOKENS] for t in texts().tensors))
    with said(True):
        assert_adds_its_own(by(loss), lambda: Words(texts_first=False), square)


def test_with_the_batchs_own_count_other_texts_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnMeans, "take", lambda self, *given, **named: None)
    moved, alone = moved_by_one_more(
        by(TOKEN_LOSSES["flattened"]), Words, texts(), max_grad_norm=5.0
    )
    assert (moved - alone).norm() > 0.01


def test_with_owners_by_place_other_texts_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a guess from shapes would take for a record, where words come first."""

    def by_place(rows: Tensor, outputs: Any) -> Tensor:
        return torch.arange(len(rows)) // (len(rows) // outputs[0][0].shape[outputs[0][1]])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out.reshape(-1, WORDS), y.T.reshape(-1))

    monkeypatch.setattr(loss_watch, "owners_of", by_place)
    with said(True):
        moved, alone = moved_by_one_more(
            by(loss), lambda: Words(texts_first=False), texts(), max_grad_norm=5.0
        )
    assert (moved - alone).norm() > 0.01


@pytest.mark.parametrize(
    "mixed",
    [lambda out: out + out.roll(1, 0), lambda out: out @ out.T, lambda out: out - out.mean(0)],
    ids=["neighbours", "loss_contrastive_in_batch", "centred"],
)
def test_rows_made_of_several_records_are_refused(mixed: Callable[[Tensor], Tensor]) -> None:
    loop = private()
    _, inputs, targets = first_batch(loop)
    with pytest.raises(CouplingError, match=r"couples records.*guarantee would not hold"):
        functional.cross_entropy(mixed(loop.model(inputs)), targets)


# ── outputs of one number a record ───────────────────────────────────────────────────────────────────


class OneNumber(nn.Module):
    def __init__(self, squeezed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.squeezed = squeezed

    def forward(self, x: Tensor) -> Tensor:
        return self.squeezed(self.body(x))


SQUEEZED: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze": Tensor.squeeze,
    "squeeze(-1)": lambda t: t.squeeze(-1),
    "view(-1)": lambda t: t.view(-1),
    "flatten": Tensor.flatten,
}


@pytest.mark.parametrize("squeezed", SQUEEZED.values(), ids=SQUEEZED)
@pytest.mark.parametrize(
    "loss",
    [functional.binary_cross_entropy_with_logits, functional.mse_loss],
    ids=["loss_bce_logits_squeeze_inside_model", "loss_mse_1d_model"],
)
def test_models_that_squeeze(loss: Loss, squeezed: Callable[[Tensor], Tensor]) -> None:
    """The law includes a batch of one record, of which ``squeeze()`` leaves a single number."""
    wanted = TensorDataset(data(MOST)[:][0], (data(MOST)[:][1] > 0).double())
    assert_adds_its_own(by(loss), lambda: OneNumber(squeezed), wanted)


def test_loss_bce_logits_squeeze() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(out.squeeze(1), (y > 0).double())

    assert_adds_its_own(by(loss), lambda: OneNumber(lambda t: t), data(MOST))


# ── penalties on weights ─────────────────────────────────────────────────────────────────────────────

DECAY = 0.02


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


PENALTIES: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "added": lambda loss, model: loss + DECAY / 2 * squares(model),
    "in place": lambda loss, model: loss.add_(DECAY / 2 * squares(model)),
    "one by one": lambda loss, model: sum(
        (DECAY / 2 * p.norm() ** 2 for p in model.parameters()), loss
    ),
    "before": lambda loss, model: DECAY / 2 * squares(model) + loss,
    "scaled together": lambda loss, model: 2 * (0.5 * loss + DECAY / 4 * squares(model)),
}


@pytest.mark.parametrize("penalised", PENALTIES.values(), ids=PENALTIES)
def test_loss_l2_penalty_in_loss(penalised: Any) -> None:
    """Its coefficient may be made of data: refused, with the weight decay that equals it."""
    loop = private()
    _, inputs, targets = first_batch(loop)
    loss = functional.cross_entropy(loop.model(inputs), targets)
    with pytest.raises(MisuseError, match=r"without noise.*weight_decay=0\.0[12] equals this one"):
        penalised(loss, loop.plain_model)


def test_a_penalty_made_of_a_count_is_refused_in_the_first_step() -> None:
    """As round as one that somebody chose: it moved what was released by five clips."""
    loop = private()
    _, inputs, targets = first_batch(loop)
    loss = functional.cross_entropy(loop.model(inputs), targets)
    with pytest.raises(MisuseError, match="weight_decay"):
        loss + 0.001 * (targets == 1).sum() * squares(loop.plain_model)


NO_PENALTIES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "of records": lambda model, x: functional.linear(x, model.get_parameter("0.weight")).sum(),
    "of lengths": lambda model, x: sum(p.norm() for p in model.parameters()),  # type: ignore[misc]
    "of sizes": lambda model, x: sum(p.abs().sum() for p in model.parameters()),  # type: ignore[misc]
    "unlike": lambda model, x: sum(  # type: ignore[misc]
        (1 + i) * p.square().sum() for i, p in enumerate(model.parameters())
    ),
}


@pytest.mark.parametrize("other", NO_PENALTIES.values(), ids=NO_PENALTIES)
def test_what_is_no_plain_penalty_is_refused(other: Any) -> None:
    loop = private()
    _, inputs, targets = first_batch(loop)
    loss = functional.cross_entropy(loop.model(inputs), targets)
    with pytest.raises(MisuseError, match=r"neither clipped nor noised.*weight_decay=2\*lambda"):
        loss + other(loop.plain_model, inputs)


# ── means of some records alone ──────────────────────────────────────────────────────────────────────


def test_means_of_one_record_after_the_other_are_refused() -> None:
    """Each would be divided by the number of drawn records, and their mean once more."""
    loop = private()
    _, inputs, targets = first_batch(loop)
    outputs = loop.model(inputs)
    with pytest.raises(CouplingError, match="take one mean over records"):
        torch.stack(
            [functional.cross_entropy(outputs[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
        ).mean()


@pytest.mark.parametrize(
    "halved",
    [
        lambda rows: rows.bfloat16().square().mean(0),
        lambda rows: rows.bfloat16() / len(rows),
        lambda rows: rows.half().square().mean(),
    ],
)
def test_means_in_half_precision_are_refused_in_any_shape(halved: Any) -> None:
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(MisuseError, match="must be computed in float32"):
        halved(loop.model(inputs))


# ── several forward passes for one step ──────────────────────────────────────────────────────────────


def pairs() -> TensorDataset:
    inputs, targets = data(MOST)[:]
    others = torch.randn(MOST, 4, generator=torch.Generator().manual_seed(8)).double()
    return TensorDataset(inputs, others, targets)


def two_forward_per_step_siamese(loop: Loop, one: Tensor, other: Tensor, same: Tensor) -> None:
    loop.optimizer.zero_grad()
    apart = (loop.model(one) - loop.model(other)).square().sum(1)
    alike = (same > 0).double()
    (alike * apart + (1 - alike) * functional.relu(2 - apart)).mean().backward()
    loop.optimizer.step()


def contrastive_with_own_views(loop: Loop, one: Tensor, other: Tensor, same: Tensor) -> None:
    """A record's own two views, and a public vector for all others."""
    loop.optimizer.zero_grad()
    near = functional.cosine_similarity(loop.model(one), loop.model(other))
    far = functional.cosine_similarity(loop.model(one), torch.ones(1, 3).double())
    (far - near).exp().mean().backward()
    loop.optimizer.step()


def two_losses_one_after_the_other(loop: Loop, one: Tensor, other: Tensor, y: Tensor) -> None:
    loop.optimizer.zero_grad()
    for inputs in (one, other):
        functional.cross_entropy(loop.model(inputs), y).backward()
    loop.optimizer.step()


SEVERAL = [two_forward_per_step_siamese, contrastive_with_own_views, two_losses_one_after_the_other]
several = pytest.mark.parametrize("step", SEVERAL, ids=lambda step: step.__name__)


@several
def test_two_forward_per_step_siamese(step: Any) -> None:
    assert_adds_its_own(step, mlp, pairs())
    assert_adds_its_own(step, mlp, pairs(), max_grad_norm=1e-3)  # clipped is what both add up to


def test_two_views_give_the_gradient_of_one_model_of_both() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(one), self.body(other)

    def at_once(loop: Loop, one: Tensor, other: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        sum(functional.cross_entropy(out, y) for out in loop.model(one, other)).backward()  # type: ignore[union-attr]
        loop.optimizer.step()

    def weights(step: Any, model: nn.Module) -> Tensor:
        loop = private(model, pairs(), n_public=MOST, max_grad_norm=0.5)
        for batch in loop.loader:
            step(loop, *batch)
        return loop.weights

    torch.testing.assert_close(
        weights(two_losses_one_after_the_other, mlp()), weights(at_once, Both())
    )


def test_views_clipped_one_by_one_would_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unjoined(tapes: Any) -> Any:
        first, second = tapes
        real = type(first).weighted_sums

        class Twice(type(first)):  # type: ignore[misc]
            def weighted_sums(self, weights: Tensor) -> Any:
                theirs = dict(real(second, 1 / second.norms()))
                return ((name, value + theirs[name]) for name, value in real(first, weights))

        return Twice(first.parameters, first.parts, first.records)

    monkeypatch.setattr(session_module, "joined", unjoined)
    _, alone = moved_by_one_more(two_losses_one_after_the_other, mlp, pairs(), max_grad_norm=1e-3)
    assert alone.norm() > 1.5


def test_a_contrast_with_other_records_is_refused() -> None:
    """Also where the second view is looked at from the other side."""
    loop = private(mlp(), pairs(), n_public=MOST)
    for one, other, _ in loop.loader:
        if len(one) > 1:
            a, b = loop.model(one), loop.model(other)
            with pytest.raises(CouplingError, match="couples records"):
                functional.relu(1 - (a * b.roll(1, 0)).sum(1)).mean().backward()
            return
        loop.optimizer.step()
    raise AssertionError


# ── a model with several outputs ─────────────────────────────────────────────────────────────────────


def test_output_dict_and_aux_heads() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.body(x)
            return {"logits": out, "aux": out[:, 0].tanh()}

    def loss(out: dict[str, Tensor], y: Tensor) -> Tensor:
        return functional.cross_entropy(out["logits"], y) + 0.3 * functional.mse_loss(
            out["aux"], y.double()
        )

    assert_adds_its_own(by(loss), Heads, data(MOST))
