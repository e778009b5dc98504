"""The paper's networks: sizes, shapes, initialisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dpis.models.kinds import paper as models

IMAGES = [
    ("pixels-mnist", models.pixel_cnn_mnist, (1, 28, 28), 26_010),
    ("pixels-cifar10", models.pixel_cnn_cifar10, (3, 32, 32), 550_570),
    ("scatter-mnist", models.scatter_cnn_mnist, (81, 7, 7), 33_066),
    ("scatter-cifar10", models.scatter_cnn_cifar10, (243, 8, 8), 187_210),
]


def trainable(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("build", "shape", "parameters"),
    [case[1:] for case in IMAGES],
    ids=[case[0] for case in IMAGES],
)
def test_image_networks(
    build: Callable[[], nn.Module], shape: tuple[int, ...], parameters: int
) -> None:
    model = build()
    assert trainable(model) == parameters
    assert model(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("build", [case[1] for case in IMAGES], ids=[case[0] for case in IMAGES])
def test_networks_start_as_in_keras_but_for_the_widest(build: Callable[[], nn.Module]) -> None:
    biases = [layer.bias for layer in build().modules() if isinstance(layer, nn.Linear)]
    assert all(bool(bias.any()) == (build is models.scatter_cnn_cifar10) for bias in biases)


def test_the_widest_network_starts_where_tanh_is_not_saturated() -> None:
    first = next(m for m in models.scatter_cnn_cifar10().modules() if isinstance(m, nn.Conv2d))
    assert first.weight.abs().max() <= (243 * 9) ** -0.5


def test_imdb_network() -> None:
    model = models.ImdbRnn(torch.randn(50, 100))
    assert trainable(model) == 21_202
    assert not model.embedding.weight.requires_grad
    assert model(torch.randint(50, (3, 80))).shape == (3, 2)


def test_lstm_starts_as_in_keras() -> None:
    lstm = models.ImdbRnn(torch.randn(50, 100)).lstm
    assert torch.equal(lstm.bias_ih_l0, torch.eye(4)[1].repeat_interleave(32))
    assert not lstm.bias_hh_l0_reverse.any()
    assert torch.allclose(lstm.weight_hh_l0.T @ lstm.weight_hh_l0, torch.eye(32), atol=1e-5)
    assert lstm.weight_ih_l0.abs().max() <= (6 / (32 + 128)) ** 0.5


def test_activation_is_an_argument() -> None:
    rectified = models.pixel_cnn_mnist(nn.ReLU)
    assert sum(isinstance(layer, nn.ReLU) for layer in rectified) == 3
    assert not any(isinstance(layer, nn.Tanh) for layer in rectified)
    assert isinstance(models.ImdbRnn(torch.randn(5, 100), nn.Tanh).activation, nn.Tanh)
