"""A metric measures the model, or says that there is nothing to measure."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import dpis
from dpis.errors import CouplingError, InputError
from dpis.training.api import _metrics_for
from dpis.training.evaluation import METRICS, HeldOut, evaluate

CPU = torch.device("cpu")


def held_out(inputs):
    return HeldOut(
        TensorDataset(inputs, torch.zeros(len(inputs)).long()), {"accuracy": METRICS["accuracy"]}
    )


def test_inputs_that_are_no_numbers_are_refused():
    inputs = torch.zeros(3, 2)
    inputs[1, 0] = torch.nan
    with pytest.raises(InputError, match="found NaN"):
        evaluate(nn.Linear(2, 2), held_out(inputs), CPU)


def test_a_model_that_gives_no_numbers_has_no_accuracy():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, torch.nan)
    assert math.isnan(evaluate(model, held_out(torch.ones(3, 2)), CPU).metrics["accuracy"])


def test_classes_that_are_ruled_out_by_minus_infinity_are_fine():
    class Certain(nn.Module):
        def forward(self, inputs):
            return torch.tensor([[0.0, -torch.inf]]).expand(len(inputs), 2)

    assert evaluate(Certain(), held_out(torch.ones(3, 2)), CPU).metrics == {"accuracy": 1.0}


class Scores(nn.Module):
    """Outputs as they are given."""

    def forward(self, inputs):
        return inputs


def measured(metric, outputs, targets):
    data = HeldOut(TensorDataset(outputs, targets), {"metric": metric})
    return evaluate(Scores(), data, CPU).metrics


OUTPUTS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
CLASSES = torch.tensor([0, 1, 1])


def test_accuracy_is_the_share_of_rows_that_are_right():
    assert measured(METRICS["accuracy"], OUTPUTS, CLASSES)["metric"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("targets", [CLASSES[:, None], torch.rand(3, 2)], ids=["column", "soft"])
def test_targets_of_another_shape_are_refused_not_broadcast(targets):
    with pytest.raises(InputError, match=r"accuracy needs one class a row.*found \[3, "):
        measured(METRICS["accuracy"], OUTPUTS, targets)


@pytest.mark.parametrize(
    "metric",
    [
        lambda output, target: (output.argmax(1) == target).double().mean(),
        lambda output, target: (output.argmax(1)[:, None] == target).double(),
        lambda output, target: 1.0,
    ],
    ids=["mean of the batch", "broadcast", "a number"],
)
def test_a_metric_must_give_one_value_a_row(metric):
    with pytest.raises(InputError, match="'metric' must give one value a row"):
        measured(metric, OUTPUTS, CLASSES)


def test_positions_that_the_loss_ignores_do_not_count():
    outputs = torch.eye(2)[torch.tensor([[0, 1, 1], [1, 0, 0]])].movedim(-1, 1)
    targets = torch.tensor([[0, 1, -100], [1, 1, -100]])
    assert measured(METRICS["accuracy"], outputs, targets) == {"metric": 0.75}
    with pytest.raises(InputError, match=r"every target is -100.*Remove those rows"):
        measured(METRICS["accuracy"], outputs, torch.full((2, 3), -100))


def test_errors_need_as_many_targets_as_outputs():
    with pytest.raises(InputError, match="as many targets as outputs"):
        measured(METRICS["squared_error"], OUTPUTS, torch.zeros(3))
    assert measured(METRICS["squared_error"], OUTPUTS[:, 0], torch.zeros(3, 1))["metric"] == (
        pytest.approx(2 / 3)
    )


def test_a_metric_that_does_not_fit_shows_before_anything_is_spent(tmp_path):
    data = TensorDataset(torch.randn(40, 2), torch.zeros(40).long())
    held_out = TensorDataset(torch.randn(8, 2), torch.zeros(8, 1).long())
    with pytest.raises(InputError, match="accuracy needs one class a row"):
        dpis.train(
            nn.Linear(2, 2),
            data,
            nn.CrossEntropyLoss(),
            n_public=40,
            batch_size=10,
            epochs=1,
            held_out=held_out,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ignored", [7, -100])
def test_the_class_that_the_loss_ignores_is_the_metrics_too(ignored):
    metric = _metrics_for(nn.CrossEntropyLoss(ignore_index=ignored))["accuracy"]
    outputs = torch.eye(2)[torch.tensor([[0, 1, 1]])].movedim(-1, 1)
    assert metric(outputs, torch.tensor([[0, ignored, 0]])).tolist() == [0.5]


def test_no_class_of_a_byte_is_ignored():
    """-100 in a byte is 156."""
    outputs = torch.eye(200)[torch.tensor([156, 3])]
    targets = torch.tensor([156, 4], dtype=torch.uint8)
    assert measured(METRICS["accuracy"], outputs, targets) == {"metric": 0.5}


def test_a_column_of_values_is_one_a_row():
    absolute = measured(
        lambda output, target: (output - target).abs(), OUTPUTS[:, :1], OUTPUTS[:, 1:]
    )
    assert absolute == {"metric": 1.0}


def fitted(out, held_out, model=None):
    return dpis.train(
        nn.Linear(2, 2) if model is None else model,
        TensorDataset(torch.randn(40, 2), torch.zeros(40).long()),
        nn.CrossEntropyLoss(),
        n_public=40,
        batch_size=10,
        epochs=1,
        held_out=held_out,
        out=out,
    )


class OneItself(IterableDataset):
    """Its own iterator."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


class OneOfAGenerator(OneItself):
    """Whose iterator is another object every time, and still comes to its end."""

    def __iter__(self):
        return (item for item in self.items)


class Repeatable(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("stream", [OneItself, OneOfAGenerator])
def test_a_stream_that_ends_is_refused_before_anything_is_spent(tmp_path, stream):
    """It would be read to its end by the trial, and nothing would be measured ever after."""
    held_out = [(OUTPUTS[0], torch.tensor(1)), (OUTPUTS[1], torch.tensor(0))]
    with pytest.raises(InputError, match="read once only"):
        fitted(tmp_path / "run", stream(held_out))
    assert not (tmp_path / "run").exists()


class OneThatGoesOn(OneItself):
    """Every reading takes up where the one before ended: some items at a time, then none."""

    def __iter__(self):
        return itertools.islice(self.items, 2)


def test_a_stream_that_goes_on_between_readings_is_refused(tmp_path):
    """Its figures would be of other records after every epoch."""
    items = [(OUTPUTS[0], torch.tensor(1))] * 4
    with pytest.raises(InputError, match="had 2 rows before training and 1 now"):
        fitted(tmp_path / "run", OneThatGoesOn(items))


@pytest.mark.parametrize(
    "nothing", [Repeatable([]), TensorDataset(torch.ones(0, 2), torch.ones(0).long())]
)
def test_nothing_to_measure_on_is_refused(tmp_path, nothing):
    with pytest.raises(InputError, match=r"has no rows|came to its end"):
        fitted(tmp_path / "run", nothing)
    assert not (tmp_path / "run").exists()


def test_a_stream_that_can_be_read_again_is_measured(tmp_path):
    held_out = [(OUTPUTS[0], torch.tensor(1)), (OUTPUTS[1], torch.tensor(0))]
    assert set(fitted(tmp_path / "run", Repeatable(held_out)).metrics) == {"accuracy"}


def test_trying_the_metrics_leaves_the_model_alone(tmp_path):
    """Otherwise a model could be started from held-out records, and its accuracy on them would say nothing."""

    class FromFirstBatch(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, inputs):
            if not self.mean.any():
                self.mean.copy_(inputs.detach().mean(0))
            return super().forward(inputs - self.mean)

    held_out = TensorDataset(torch.randn(8, 2), torch.zeros(8).long())
    with pytest.raises(CouplingError, match="mean"):
        fitted(tmp_path / "run", held_out, FromFirstBatch())
