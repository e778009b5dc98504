"""What a loss for the batch means for a record; what belongs to none is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.errors import CouplingError, InputError
from dpis.gradients import RecordGradients
from tests.gradients.problems import mlp


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch(records: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(records, 6).double(), torch.randint(0, 4, (records,))


def sums(module: nn.Module, data: tuple[Tensor, ...], **options: object) -> list[Tensor]:
    gradients = RecordGradients(module, **options)  # type: ignore[arg-type]
    weights = torch.ones(len(data[0]))
    return list(gradients.record(data).weighted_sum(weights).values())


def plain(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other)


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "none": nn.CrossEntropyLoss(reduction="none"),
    "function": functional.cross_entropy,
    "partial": partial(functional.cross_entropy, reduction="sum"),
    "lambda-mean": lambda output, target: functional.cross_entropy(output, target),
    "lambda-sum": lambda o, t: functional.cross_entropy(o, t, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_records_loss_is_its_own(name: str) -> None:
    module, data = mlp().double(), batch()
    expected = plain(module, functional.cross_entropy(module(data[0]), data[1], reduction="sum"))
    assert_close(sums(module, data, loss=LOSSES[name]), expected)


def test_mean_over_the_outputs_of_a_record() -> None:
    module, (x, _) = mlp().double(), batch()
    target = torch.randn(5, 4).double()
    expected = plain(module, (module(x) - target).square().mean(1).sum())
    assert_close(sums(module, (x, target), loss=nn.MSELoss()), expected)


def test_class_weights_are_divided_by_the_records_own_terms() -> None:
    module, (x, y) = mlp().double(), batch()
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    terms = functional.cross_entropy(module(x), y, weight, reduction="none")
    expected = plain(module, terms.sum())
    assert_close(sums(module, (x, y), loss=nn.CrossEntropyLoss(weight)), expected)


def test_ignored_positions_do_not_count() -> None:
    module = nn.Sequential(nn.Linear(6, 4)).double()
    x, y = torch.randn(5, 3, 6).double(), torch.randint(0, 4, (5, 3))
    y[0, 1:] = y[2] = -100
    loss = nn.CrossEntropyLoss()

    def objective(m: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        per_term = functional.cross_entropy(m(data[0]).mT, data[1], reduction="none")
        return per_term.sum(1) / (data[1] != -100).sum(1).clamp(min=1)

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mT

    assert_close(sums(Transposed(), (x, y), loss=loss), sums(module, (x, y), objective=objective))


def test_one_loss_for_the_batch_with_several_rows_a_record() -> None:
    module, (x, y) = mlp().double(), batch(6)
    expected = plain(module, functional.cross_entropy(module(x), y, reduction="sum") / 3)
    for loss in (LOSSES["lambda-mean"], LOSSES["lambda-sum"], nn.CrossEntropyLoss()):
        gradients = RecordGradients(module, loss, rows_per_record=3)
        assert_close(list(gradients.record((x, y)).weighted_sum(torch.ones(2)).values()), expected)


def test_a_normaliser_over_the_batch_is_undone() -> None:
    """A record's loss is asked for alone: class weights then cancel, whoever shares the batch."""
    module, (x, y) = mlp().double(), batch()
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    expected = plain(module, functional.cross_entropy(module(x), y, reduction="sum"))
    found = sums(module, (x, y), loss=lambda o, t: functional.cross_entropy(o, t, weight))
    assert_close(found, expected)


def test_a_loss_that_cannot_be_vectorised_is_asked_row_by_row() -> None:
    module, (x, y) = mlp().double(), batch()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) * (1.0 if float(target[0]) >= 0 else 2.0)

    expected = plain(module, functional.cross_entropy(module(x), y, reduction="sum"))
    assert_close(sums(module, (x, y), loss=loss), expected)


class TestRefused:
    def test_one_value_for_the_batch_from_an_objective(self) -> None:
        """The first records may look alike; later a neighbour's label would move every norm."""
        weight = torch.tensor([1.0, 50.0, 1.0, 1.0]).double()
        x, _ = batch()
        with pytest.raises(CouplingError, match=r"normalised over the batch.*privacy"):
            sums(
                mlp().double(),
                (x, torch.zeros(5, dtype=torch.long)),
                objective=lambda m, d: functional.cross_entropy(m(d[0]), d[1], weight),
            )

    def test_losses_divided_by_a_count_over_the_batch(self) -> None:
        """Equal masks hide it until one changes."""
        x, mask = torch.randn(5, 4, 6).double(), torch.ones(5, 4, dtype=torch.long)
        module = nn.Linear(6, 1).double()

        def objective(m: nn.Module, d: tuple[Tensor, Tensor]) -> Tensor:
            return (m(d[0]).squeeze(2).square() * d[1]).sum(1) / d[1].sum()

        with pytest.raises(CouplingError, match="the loss of another record"):
            sums(module, (x, mask), objective=objective)

    def test_a_weight_penalty(self) -> None:
        def penalised(module: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
            penalty = sum(parameter.square().sum() for parameter in module.parameters())
            return functional.cross_entropy(module(data[0]), data[1]) + 0.1 * penalty

        with pytest.raises(CouplingError, match="weight_decay"):
            sums(mlp().double(), batch(), objective=penalised)

    def test_a_loss_of_the_wrong_shape(self) -> None:
        with pytest.raises(InputError, match=r"One loss a row.*\(3, 4\)"):
            sums(mlp().double(), batch(), loss=lambda output, target: output)

    def test_a_batch_without_rows_in_front(self) -> None:
        with pytest.raises(InputError, match="rows in the first dimension"):
            sums(mlp().double(), (torch.randn(5, 6), torch.zeros(4)), loss=nn.MSELoss())

    def test_a_mapping_needs_an_objective(self) -> None:
        gradients = RecordGradients(mlp(), nn.MSELoss())
        with pytest.raises(InputError, match="objective="):
            gradients.record({"x": torch.randn(5, 6)})

    def test_loss_and_objective(self) -> None:
        with pytest.raises(InputError, match="Exactly one"):
            RecordGradients(mlp())

    def test_nothing_to_train(self) -> None:
        with pytest.raises(InputError, match="nothing to train"):
            RecordGradients(mlp().requires_grad_(False), nn.MSELoss())
