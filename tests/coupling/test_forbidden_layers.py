"""``fix`` replaces the layers that couple records, says what it did, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpis.coupling.forbidden_layers import fix
from dpis.gradients import RecordGradients
from tests.gradients.problems import mlp


def image_model() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(8 * 9, 4),
    )


def test_it_lists_what_it_did() -> None:
    fixed, changes = fix(image_model())
    assert [str(change) for change in changes] == [
        "0.1: BatchNorm2d(8) -> GroupNorm(8, 8)",
        "0.2: ReLU no longer in place",
        "1: InstanceNorm2d no longer keeps running statistics",
    ]
    batch = torch.randn(5, 3, 5, 5), torch.randint(0, 4, (5,))
    assert RecordGradients(fixed, nn.CrossEntropyLoss()).record(batch).norms().isfinite().all()


def test_the_old_module_stays() -> None:
    model = image_model()
    fix(model)
    assert isinstance(model[0][1], nn.BatchNorm2d)
    assert model[0][2].inplace


def test_a_lone_layer() -> None:
    fixed, changes = fix(nn.BatchNorm1d(6))
    assert isinstance(fixed, nn.GroupNorm)
    assert [change.layer for change in changes] == ["BatchNorm1d"]


def test_nothing_to_do() -> None:
    fixed, changes = fix(mlp())
    assert changes == ()
    assert fixed.state_dict().keys() == mlp().state_dict().keys()


def test_scale_and_precision_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6)).double()
    nn.init.normal_(model[0].weight)
    fixed, _ = fix(model)
    assert torch.equal(fixed[0].weight, model[0].weight)


@pytest.mark.parametrize("channels", [2, 8, 12, 64])
def test_batch_norm_of_vectors_keeps_its_inputs_apart(channels):
    fixed, _ = fix(nn.BatchNorm1d(channels))
    inputs = torch.randn(5, channels)
    assert fixed(inputs).std(0).min() > 0.1
