"""Models by name, for data of any shape: what `dpis train --model` builds."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dpis.datasets.glove import load_glove
from dpis.errors import InputError
from dpis.features.texts import VOCABULARY, embedding_table
from dpis.models import paper

NOISE_STEP = 7.5e-4
"""Standard deviation of the noise in one weight and one step, chosen on validation splits of Fashion-MNIST; for bags of
words on those of IMDb."""
USUAL_NUMBERS = 28 * 28
"""Of an image of Fashion-MNIST."""

Shape = tuple[int, ...]
Build = Callable[[Shape, int], nn.Module]


class Inputs(StrEnum):
    """What a model takes; each is made from one record alone."""

    AS_THEY_ARE = "as they are"
    """Pixels, numbers."""
    SCATTERED = "scattered"
    """Normalised scatter features of images."""
    WORDS = "words"
    """The last words of a text, as places in a public vocabulary."""
    BAG = "bag"
    """A text as one vector, from frozen word vectors."""

    @property
    def of_text(self) -> bool:
        """Whether they are made from texts."""
        return self in (Inputs.WORDS, Inputs.BAG)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model that can be built for inputs of any fitting shape.

    Attributes:
        name: as on the command line.
        build: from the shape of one record's input and the number of outputs.
        inputs: what it takes.
        clip_norm: a clip norm that suits it.
        largest_learning_rate: of SGD with momentum 0.9 that suits it, at that clip norm, where noise is small.
        noise_step: how much noise a weight bears in one step.
    """

    name: str
    build: Build
    inputs: Inputs = Inputs.AS_THEY_ARE
    clip_norm: float = 1.0
    largest_learning_rate: float = 0.5
    noise_step: float = NOISE_STEP

    def learning_rate(
        self, equivalent_batch: float, noise_multiplier: float, shape: Shape | None = None
    ) -> float:
        """A learning rate at which the noise of a step stays bearable: ``min(largest, noise_step·(B/z) / C)``.

        A step moves every weight by noise of standard deviation ``lr·C·z/B``. An output adds up such noise over its
        inputs, so for scattered images with n times the numbers of those it was chosen on, noise is bearable up to
        ``1/√n`` of that. Public numbers alone decide.

        Args:
            equivalent_batch: B.
            noise_multiplier: z, in the first epoch.
            shape: of an image, before it is scattered.
        """
        if noise_multiplier == 0:
            return self.largest_learning_rate
        bearable = self.noise_step * equivalent_batch / (noise_multiplier * self.clip_norm)
        if self.inputs is Inputs.SCATTERED and shape is not None:
            bearable /= math.sqrt(max(1.0, math.prod(shape) / USUAL_NUMBERS))
        return min(self.largest_learning_rate, bearable)


def _linear(shape: Shape, outputs: int) -> nn.Module:
    return paper.keras_initialised(
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))
    )


def _mlp(shape: Shape, outputs: int) -> nn.Module:
    return paper.keras_initialised(
        nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(shape), 128), nn.Tanh(), nn.Linear(128, outputs)
        )
    )


def _cnn(shape: Shape, outputs: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    """The paper's networks for their shapes; for other images the smaller of them, its last layers fitted."""
    if len(shape) != 3:
        raise InputError(
            f"a cnn needs images, [channels, height, width] a record; found the shape {list(shape)}. Use mlp or linear"
        )
    if shape == (1, 28, 28):
        return paper.pixel_cnn_mnist(activation, outputs)
    if shape == (3, 32, 32):
        return paper.pixel_cnn_cifar10(activation, outputs)
    return _with_head(
        [
            nn.Conv2d(shape[0], 16, 5, stride=2, padding=2),
            activation(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            activation(),
        ],
        shape,
        outputs,
    )


def _scatter_cnn(shape: Shape, outputs: int) -> nn.Module:
    if shape == (81, 7, 7):
        return paper.scatter_cnn_mnist(classes=outputs)
    if shape == (243, 8, 8):
        return paper.scatter_cnn_cifar10(classes=outputs)
    return _with_head(
        [
            nn.Conv2d(shape[0], 16, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Tanh(),
        ],
        shape,
        outputs,
    )


def _rnn(shape: Shape, outputs: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """The paper's, on frozen public word vectors."""
    if outputs != 2:
        raise InputError(f"the rnn tells two classes apart, found {outputs}")
    return paper.ImdbRnn(embedding_table(load_glove(VOCABULARY)), activation)


def _with_head(layers: list[nn.Module], shape: Shape, outputs: int) -> nn.Module:
    """Convolutions, then two dense layers that fit what comes out of them."""
    with torch.no_grad():
        size = nn.Sequential(*layers)(torch.zeros(1, *shape)).numel()
    dense = [nn.Flatten(), nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, outputs)]
    return paper.keras_initialised(nn.Sequential(*layers, *dense))


KINDS = {
    kind.name: kind
    for kind in (
        ModelKind(
            "scatter-linear",
            _linear,
            Inputs.SCATTERED,
            clip_norm=0.1,
            largest_learning_rate=16.0,
        ),
        ModelKind(
            "scatter-cnn",
            _scatter_cnn,
            Inputs.SCATTERED,
            clip_norm=0.1,
            largest_learning_rate=8.0,
        ),
        ModelKind("cnn", _cnn, clip_norm=0.1, largest_learning_rate=8.0),
        ModelKind(
            "cnn-relu", partial(_cnn, activation=nn.ReLU), clip_norm=0.1, largest_learning_rate=8.0
        ),
        ModelKind("rnn", _rnn, Inputs.WORDS),
        ModelKind("rnn-tanh", partial(_rnn, activation=nn.Tanh), Inputs.WORDS),
        ModelKind(
            "bag-linear",
            _linear,
            Inputs.BAG,
            clip_norm=0.6,
            largest_learning_rate=10.0,
            noise_step=8.6e-3,
        ),
        ModelKind("bag-mlp", _mlp, Inputs.BAG),
        ModelKind("mlp", _mlp),
        ModelKind("linear", _linear),
    )
}


def model_kind(name: str) -> ModelKind:
    """A model by name, or by the import path of a factory: ``package.module:factory``.

    The factory is called with the shape of one input and the number of outputs, or without arguments if it takes none.
    """
    if name in KINDS:
        return KINDS[name]
    if ":" not in name:
        raise InputError(
            f"--model must be one of {', '.join(KINDS)}, or package.module:factory, found {name!r}"
        )
    return ModelKind(name, _factory(name))


def _factory(path: str) -> Build:
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise InputError(f"cannot import {module_name!r} for the model {path!r}: {error}") from None
    except AttributeError:
        raise InputError(f"{module_name} has no {attribute!r} for the model {path!r}") from None
    except Exception as error:  # whatever a module of the user's own does
        raise InputError(
            f"importing {module_name!r} for the model {path!r} failed: {_told(error)}"
        ) from error
    if not callable(factory):
        raise InputError(f"{path} is not a function or class that makes a model")
    takes_arguments = _takes_arguments(factory)

    def build(shape: Shape, outputs: int) -> nn.Module:
        try:
            module = factory(shape, outputs) if takes_arguments else factory()
        except Exception as error:  # likewise
            call = f"{list(shape)}, {outputs}" if takes_arguments else ""
            raise InputError(f"{path}({call}) made no model: {_told(error)}") from error
        if not isinstance(module, nn.Module):
            raise InputError(f"{path} must return a torch.nn.Module, found {type(module).__name__}")
        return module

    return build


def _takes_arguments(factory: Callable[..., object]) -> bool:
    try:
        return bool(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # some of those written in C do not tell
        return True


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
