"""A metric measures the model, or says that there is nothing to measure."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpis.errors import InputError
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
    assert math.isnan(evaluate(model, held_out(torch.ones(3, 2)), CPU)["accuracy"])


def test_classes_that_are_ruled_out_by_minus_infinity_are_fine():
    class Certain(nn.Module):
        def forward(self, inputs):
            return torch.tensor([[0.0, -torch.inf]]).expand(len(inputs), 2)

    assert evaluate(Certain(), held_out(torch.ones(3, 2)), CPU) == {"accuracy": 1.0}
