"""The networks of the paper's experiments, each once.

Every factory takes the ``activation`` to put between layers (a class or function without
arguments) and initialises as Keras does, in which the paper's networks were built: Glorot uniform
weights, zero biases, orthogonal recurrent weights, forget gates open.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpis.features.scattering import SCATTER_CHANNELS

Activation = Callable[[], nn.Module]

CLASSES = 10


def pixel_cnn_mnist(activation: Activation = nn.Tanh, classes: int = CLASSES) -> nn.Module:
    """Pixels of MNIST or Fashion-MNIST, ``[records, 1, 28, 28]``; 26,010 parameters."""
    return keras_initialised(
        nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=2),
            activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 32),
            activation(),
            nn.Linear(32, classes),
        )
    )


def pixel_cnn_cifar10(activation: Activation = nn.Tanh, classes: int = CLASSES) -> nn.Module:
    """Pixels of CIFAR-10, ``[records, 3, 32, 32]``; 550,570 parameters."""

    def stage(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            activation(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
        ]

    return keras_initialised(
        nn.Sequential(
            *stage(3, 32),
            *stage(32, 64),
            *stage(64, 128),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 128),
            activation(),
            nn.Linear(128, classes),
        )
    )


def scatter_cnn_mnist(activation: Activation = nn.Tanh, classes: int = CLASSES) -> nn.Module:
    """Scatter features of MNIST or Fashion-MNIST, ``[records, 81, 7, 7]``; 33,066 parameters."""
    return keras_initialised(
        nn.Sequential(
            nn.Conv2d(SCATTER_CHANNELS, 16, 3, stride=2, padding=1),
            activation(),
            nn.Conv2d(16, 32, 3, padding=1),
            activation(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 32),
            activation(),
            nn.Linear(32, classes),
        )
    )


def scatter_cnn_cifar10(activation: Activation = nn.Tanh, classes: int = CLASSES) -> nn.Module:
    """Scatter features of CIFAR-10, ``[records, 243, 8, 8]``; 187,210 parameters.

    It starts as PyTorch starts it. As Keras would, from more than twice as far, each of its first activations would add
    up 2,187 inputs to a tanh that is saturated.
    """
    return nn.Sequential(
        nn.Conv2d(3 * SCATTER_CHANNELS, 64, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, classes),
    )


class ImdbRnn(nn.Module):
    """Reviews as word indices ``[records, words]``: frozen embedding, FC32, BiLSTM 32, FC16, FC2.

    21,202 trainable parameters. (Keras counts 20,946: its LSTM has one bias where torch has two.)

    Args:
        embedding: The frozen word vectors, ``[vocabulary, width]``: public knowledge.
        activation: After each fully connected layer but the last.
    """

    def __init__(self, embedding: Tensor, activation: Activation = nn.ReLU) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*embedding.shape)
        self.embedding.weight = nn.Parameter(embedding, requires_grad=False)
        self.project = nn.Linear(embedding.shape[1], 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(64, 16)
        self.classify = nn.Linear(16, 2)
        self.activation = activation()
        for layer in (self.project, self.lstm, self.hidden, self.classify):
            keras_initialised(layer)

    def forward(self, words: Tensor) -> Tensor:
        """The two classes' logits, from the last state of either direction."""
        projected = self.activation(self.project(self.embedding(words)))
        _, (last_states, _) = self.lstm(projected)
        both_directions = torch.cat([last_states[0], last_states[1]], dim=1)
        logits: Tensor = self.classify(self.activation(self.hidden(both_directions)))
        return logits


def keras_initialised(module: nn.Module) -> nn.Module:
    """The module, its weights drawn anew as Keras draws them."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LSTM):
            _initialise_lstm(layer)
    return module


@torch.no_grad()
def _initialise_lstm(lstm: nn.LSTM) -> None:
    forget = slice(lstm.hidden_size, 2 * lstm.hidden_size)  # gates: input, forget, cell, output
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight_ih"):
            nn.init.xavier_uniform_(parameter)
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                parameter[forget] = 1.0
