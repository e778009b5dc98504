"""Losses of a loop of one's own: those that couple records are refused, with or without curvature."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.coupling.divisors import Divisors
from dpis.coupling.loss import LossProbe, UntriedLossWarning
from dpis.coupling.loss_tape import LossTape
from dpis.coupling.loss_watch import LossRules, LossWatch
from dpis.coupling.outputs import watched_outputs
from dpis.coupling.own_means import OwnMeans
from dpis.errors import CouplingError

from .loops import Loop, data, mlp, private

Loss = Callable[[Any, Tensor], Tensor]


def run(loss: Loss, model: nn.Module | None = None, steps: int = 2, **options: Any) -> Loop:
    """As many steps with records in them."""
    loop = private(model, **options)
    taken = 0
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        if len(inputs) > 1:
            loss(loop.model(inputs), targets).backward()
            taken += 1
        elif len(inputs):
            functional.mse_loss(loop.model(inputs), torch.zeros(1, 3).double()).backward()
        loop.optimizer.step()
        if taken == steps:
            return loop
    raise AssertionError


# ── what couples records ─────────────────────────────────────────────────────────────────────────────


def margin_ranking(out: Tensor, y: Tensor) -> Tensor:
    score = out[:, 0]
    above = (y[:, None] > y[None]).to(score)
    return (above * functional.relu(1 - (score[:, None] - score[None]))).mean()


def ranking_of_neighbours(out: Tensor, y: Tensor) -> Tensor:
    score, other = out[:, 0], out[:, 0].roll(1)
    order = torch.where(y >= y.roll(1), 1.0, -1.0).double()
    return functional.margin_ranking_loss(score, other, order, margin=1.0)


def l1_triplet(out: Tensor, y: Tensor) -> Tensor:
    near = (out - out.roll(1, 0)).abs().sum(1)
    far = (out - out.flip(0)).abs().sum(1)
    return functional.relu(near - far + 1).mean()


def triplet_of_torch(out: Tensor, y: Tensor) -> Tensor:
    return functional.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0), p=1.0)


def pairwise_l1(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, None] - out[None]).abs().mean()


def hardest_negative(out: Tensor, y: Tensor) -> Tensor:
    far = (out[:, None] - out[None]).abs().sum(2)
    far = far.masked_fill(y[:, None] == y[None], float("inf"))
    return functional.relu(2 - far.amin(1)).mean()


def hardest_negative_by_number(out: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        far = (out[:, None] - out[None]).abs().sum(2)
        far.fill_diagonal_(float("inf"))
        negatives = far.argmin(1)
    return functional.relu(2 - (out - out[negatives]).abs().sum(1)).mean()


def hardest_rows_only(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out, y, reduction="none").topk(1).values.sum()


def largest_row(out: Tensor, y: Tensor) -> Tensor:
    return out.abs().amax()


def median_of_rows(out: Tensor, y: Tensor) -> Tensor:
    return out[:, 0].median()


def centred_by_the_batch(out: Tensor, y: Tensor) -> Tensor:
    return (out - out.detach().mean(0)).abs().mean()


def scaled_by_the_batch(out: Tensor, y: Tensor) -> Tensor:
    losses = functional.cross_entropy(out, y, reduction="none")
    return losses.mean() / losses.detach().mean()


def mean_of_those_that_count(out: Tensor, y: Tensor) -> Tensor:
    losses = functional.relu(out[:, 0])
    return losses.sum() / (losses > 0).sum().clamp(min=1)


COUPLED: list[Loss] = [
    margin_ranking,
    ranking_of_neighbours,
    l1_triplet,
    triplet_of_torch,
    pairwise_l1,
    hardest_negative,
    hardest_negative_by_number,
    hardest_rows_only,
    largest_row,
    median_of_rows,
    centred_by_the_batch,
    scaled_by_the_batch,
    mean_of_those_that_count,
]


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_losses_without_curvature_that_couple_records(loss: Loss, seed: int):
    with pytest.raises(CouplingError, match=r"couples records.*guarantee would not hold"):
        run(loss, seed=seed)


@pytest.mark.parametrize("size", [1e-3, 30.0])
@pytest.mark.parametrize(
    "loss", [margin_ranking, l1_triplet, pairwise_l1, hardest_negative], ids=lambda f: f.__name__
)
def test_outputs_far_from_any_kink(loss: Loss, size: float):
    """All pairs within the margin, or none."""
    model = mlp()
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(size)
    with pytest.raises(CouplingError, match="couples records"):
        run(loss, model)


def test_a_loss_that_couples_records_in_a_step_that_is_looked_at_later():
    def later(out: Tensor, y: Tensor) -> Tensor:
        later.calls += 1
        return functional.cross_entropy(out, y) if later.calls < 4 else pairwise_l1(out, y)

    later.calls = 0
    with pytest.raises(CouplingError, match="couples records"):
        run(later, steps=5, dataset=data(200), n_public=200)
    assert later.calls == 4


# ── what does not ────────────────────────────────────────────────────────────────────────────────────


def one_hot(y: Tensor) -> Tensor:
    return functional.one_hot(y, 3).double()


def masked_by_record(out: Tensor, y: Tensor) -> Tensor:
    mask = torch.arange(3)[None] <= y[:, None]
    return ((out - 1).abs() * mask).sum(1).div(mask.sum(1)).mean()


def variational(out: Tensor, y: Tensor) -> Tensor:
    mean, log_var = out[:, :1], out[:, 1:2]
    drawn = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
    return (functional.mse_loss(drawn[:, 0], y.double(), reduction="none") + kl).mean()


def dropped_out(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.dropout(out, 0.3), y)


def by_probability(out: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy(out.sigmoid(), one_hot(y))


def changed_in_place(out: Tensor, y: Tensor) -> Tensor:
    placed = torch.zeros(len(out), 3).double()
    placed[:] = out
    placed[:, 0].mul_(2)
    out -= out.detach().amax(1, keepdim=True)
    losses = functional.cross_entropy(out + placed, y, reduction="none")
    losses[y == 0] *= 0.5
    return losses.sum() / len(losses)


def weighted_by_own_loss(out: Tensor, y: Tensor) -> Tensor:
    losses = functional.cross_entropy(out, y, reduction="none")
    return ((1 - (-losses.detach()).exp()).square() * losses).mean()


def own_margin(out: Tensor, y: Tensor) -> Tensor:
    right = out.gather(1, y[:, None])
    wrong = out.masked_fill(one_hot(y).bool(), -torch.inf).max(1).values
    return functional.relu(1 - right[:, 0] + wrong).mean()


def with_figures(out: Tensor, y: Tensor) -> Tensor:
    """What a loop prints of the batch is no part of the loss."""
    loss = functional.cross_entropy(out, y)
    hits = (out.argmax(1) == y).double().mean()
    assert float(hits + loss.detach()) >= 0
    assert out.detach().std().item() >= 0
    return loss


def row_after_row(out: Tensor, y: Tensor) -> Tensor:
    rows = [functional.cross_entropy(o, t) for o, t in zip(out, y, strict=True)]
    return torch.stack(rows).mean()


def connectionist(out: Tensor, y: Tensor) -> Tensor:
    rows = len(out)
    steps = out[None].repeat(4, 1, 1).log_softmax(2)
    lengths = torch.full((rows,), 4), torch.ones(rows, dtype=torch.long)
    return functional.ctc_loss(steps, 1 + y[:, None] % 2, *lengths)


BY_THEMSELVES: list[Loss] = [
    functional.cross_entropy,
    lambda out, y: functional.cross_entropy(out, y, reduction="sum") / len(out),
    lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.2),
    lambda out, y: functional.mse_loss(out, one_hot(y)),
    lambda out, y: functional.smooth_l1_loss(out, one_hot(y)),
    lambda out, y: functional.huber_loss(out, one_hot(y)),
    lambda out, y: functional.binary_cross_entropy_with_logits(out, one_hot(y)),
    lambda out, y: functional.margin_ranking_loss(out[:, 0], out[:, 1], torch.ones(len(y)).double()),
    lambda out, y: functional.triplet_margin_loss(out[:, :1], out[:, 1:2], out[:, 2:]),
    lambda out, y: functional.gaussian_nll_loss(out[:, 0], y.double(), out[:, 1].exp()),
    lambda out, y: torch.logsumexp(out, 1).mean() - out.gather(1, y[:, None]).mean(),
    masked_by_record,
    variational,
    dropped_out,
    by_probability,
    changed_in_place,
    weighted_by_own_loss,
    own_margin,
    with_figures,
    row_after_row,
    connectionist,
]  # fmt: skip


@pytest.mark.parametrize("loss", BY_THEMSELVES)
def test_losses_of_rows_by_themselves(loss: Loss):
    run(loss)


def test_heads_in_a_mapping_and_two_backward_passes():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> dict[str, Any]:
            out = self.body(x)
            return {"main": out, "more": (out[:, 0].tanh(), out[:, None, 1:])}

    def loss(out: dict[str, Any], y: Tensor) -> Tensor:
        side = out["more"][0].abs().mean() + out["more"][1].relu().mean()
        side.backward(retain_graph=True)
        return functional.cross_entropy(out["main"], y)

    def coupled(out: dict[str, Any], y: Tensor) -> Tensor:
        return functional.cross_entropy(out["main"], y) + pairwise_l1(out["more"][0], y)

    loop = private(Heads())
    taken = 0
    for inputs, targets in loop.loader:
        if len(inputs):
            loss(loop.model(inputs), targets).backward()
            taken += 1
        loop.optimizer.step()
        if taken == 2:
            break
    with pytest.raises(CouplingError, match="couples records"):
        run(coupled, Heads())


def test_a_loss_of_rows_that_is_given_its_gradient():
    def backward_of_rows(loss: Loss) -> None:
        loop = private()
        for inputs, targets in loop.loader:
            if len(inputs) > 1:
                rows = loss(loop.model(inputs), targets)
                rows.backward(torch.full_like(rows, 1 / len(rows)))
                loop.optimizer.step()
                return
            loop.optimizer.step()

    backward_of_rows(lambda out, y: functional.cross_entropy(out, y, reduction="none"))
    with pytest.raises(CouplingError, match="couples records"):
        backward_of_rows(lambda out, y: (out[:, None] - out[None]).abs().sum((1, 2)))


def test_a_look_draws_no_random_numbers_and_a_generator_goes_on_as_it_was():
    def steps(looked: bool) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.Generator().manual_seed(7)

        def loss(out: Tensor, y: Tensor) -> Tensor:
            kept = torch.bernoulli(out.detach().sigmoid(), generator=own)
            return functional.cross_entropy(functional.dropout(out * kept, 0.3), y)

        loop = private()
        if not looked:
            loop.session.__class__ = type("Blind", (type(loop.session),), {"looks_now": False})
        torch.manual_seed(4)
        for number, (inputs, targets) in enumerate(loop.loader):
            if len(inputs):
                loss(loop.model(inputs), targets).backward()
            loop.optimizer.step()
            if number == 3:
                break
        return loop.weights, torch.get_rng_state(), own.get_state()

    for with_looks, without in zip(steps(True), steps(False), strict=True):
        assert torch.equal(with_looks, without)


def test_what_has_no_gradient_is_a_plain_tensor_after_the_step():
    kept = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        total = functional.cross_entropy(out, y)
        kept.extend([total.detach(), out.argmax(1)])
        return total

    run(loss)
    assert [type(tensor) for tensor in kept] == [Tensor] * 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def test_a_loss_that_cannot_be_computed_again_is_told():
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out + Doubled.apply(out), y)

    with pytest.warns(UntriedLossWarning, match="could not be tried out"):
        run(loss)


# ── outputs of one number a row ──────────────────────────────────────────────────────────────────────


class Scores(nn.Module):
    def __init__(self, squeezed: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.squeezed = squeezed

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(1) if self.squeezed else self.body(x)


@pytest.mark.parametrize(
    "loss", [functional.binary_cross_entropy_with_logits, functional.mse_loss, functional.l1_loss]
)
@pytest.mark.parametrize("records", [40, 6])
def test_outputs_of_shape_rows_take_the_same_steps(loss: Loss, records: int):
    """Of six records and a batch of one, some draws are empty."""

    def trained(squeezed: bool) -> tuple[Tensor, set[int]]:
        batch = {"batch_size": 8 if records == 40 else 1}
        loop = private(Scores(squeezed), data(records), loader=batch, n_public=records)
        sizes = set()
        for _ in range(4):  # of 24 steps on six records none is empty with probability 6e-5
            for inputs, targets in loop.loader:
                loop.optimizer.zero_grad()
                scores = loop.model(inputs)
                assert scores.shape == ((len(inputs),) if squeezed else (len(inputs), 1))
                wanted = (targets > 0).double()
                loss(scores, wanted if squeezed else wanted[:, None]).backward()
                loop.optimizer.step()
                sizes.add(len(inputs))
        return loop.weights, sizes

    one, sizes = trained(True)
    other, _ = trained(False)
    assert (0 in sizes) == (records == 6)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_look_leaves_no_tensor_behind() -> None:
    """Nor waits for a sweep of reference cycles: outputs may be logits over 50,000 words."""
    tape, leaf = LossTape(), torch.randn(6, 3, requires_grad=True)
    watch = LossWatch(6, LossRules(True, OwnMeans(), Divisors(True), lambda *_: None), tape=tape)
    watch.open([(leaf, 0)])
    loss = nn.functional.cross_entropy(watched_outputs(leaf, watch), torch.arange(6) % 3)
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
        LossProbe().refuse_coupled(loss, None, [[(leaf, 0)]], tape)
        assert sum(issubclass(type(one), Tensor) for one in gc.get_objects()) <= before
    finally:
        gc.enable()
