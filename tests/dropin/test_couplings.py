"""Models and losses that couple records, keep something of them, or train past the noise: refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpis.dropin import MisuseError
from dpis.errors import CouplingError, InputError

from .loops import first_batch, private


@pytest.mark.parametrize("way", ["the model itself", "a layer", "evaluation mode"])
def test_gradients_that_pass_by_the_private_model_are_refused(way: str):
    loop = private()
    _, inputs, targets = first_batch(loop)
    logits = {
        "the model itself": lambda: loop.plain_model(inputs),
        "a layer": lambda: loop.model.get_submodule("_module.0")(inputs)[:, :3],
        "evaluation mode": lambda: loop.model.eval()(inputs),
    }[way]()
    loss = functional.cross_entropy(logits, targets)
    with pytest.raises(MisuseError, match=r"neither clipped nor noised.*weight_decay"):
        loss.backward()
    assert all(parameter.grad is None for parameter in loop.model.parameters())


TRAINED_BESIDE = {
    "a head": lambda outputs: nn.Linear(3, 3).double()(outputs),
    "a scale made of outputs": lambda outputs: outputs * outputs.detach()[0].requires_grad_().exp(),
    "a temperature": lambda outputs: outputs * torch.zeros((), requires_grad=True).exp(),
    "a bias in a list": lambda outputs: torch.stack([outputs, torch.ones(1, 3, requires_grad=True)
                                                     .double().expand(len(outputs), 3)]).sum(0),
}  # fmt: skip


@pytest.mark.parametrize("beside", TRAINED_BESIDE)
def test_what_is_trained_beside_the_private_model_is_refused(beside: str):
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(MisuseError, match=r"neither clipped nor noised.*one model of all"):
        TRAINED_BESIDE[beside](loop.model(inputs))


def test_a_head_behind_a_tensor_that_outputs_were_written_into():
    loop = private()
    _, inputs, _ = first_batch(loop)
    rows = torch.zeros(len(inputs), 3).double()
    rows[:] = loop.model(inputs)
    with pytest.raises(MisuseError, match="one model of all that is trained"):
        nn.Linear(3, 3).double()(rows)


def test_a_fixed_head_and_rows_put_in_another_order_are_not_trained_beside_it():
    loop = private()
    _, inputs, targets = first_batch(loop)
    outputs = loop.model(inputs)
    fixed = nn.Linear(3, 3).double().requires_grad_(False)
    placed = torch.zeros(len(inputs), 3).double()
    placed[:] = fixed(outputs)
    functional.cross_entropy(placed + outputs, targets).backward()
    loop.optimizer.step()


def test_a_teacher_may_look_at_the_records():
    loop = private()
    _, inputs, targets = first_batch(loop)
    with torch.no_grad():
        taught = nn.Linear(3, 3).double()(loop.model(inputs))
    (functional.cross_entropy(loop.model(inputs), targets) + taught.sum() * 0).backward()
    loop.optimizer.step()


def test_a_layer_that_begins_to_couple_records():
    loop = private(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval()).double())
    loop.model.train()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(CouplingError, match="guarantee does not hold"):
        loop.model(inputs)


class Remembering(nn.Module):
    def __init__(self, past_versions: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.past_versions = past_versions
        self.register_buffer("seen", torch.zeros(4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x):
            seen = self.seen.data if self.past_versions else self.seen
            seen += x.detach().mean(0)
        return self.layer(x)


@pytest.mark.parametrize("past_versions", [False, True])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_model_that_keeps_something_of_records(gradients: bool, past_versions: bool):
    loop = private(Remembering(past_versions))
    _, inputs, _ = first_batch(loop)
    with torch.set_grad_enabled(gradients), pytest.raises(CouplingError, match="wrote to 'seen'"):
        loop.model(inputs)


@pytest.mark.parametrize("written", ["0.weight", "2.bias"])
def test_a_loop_that_writes_to_the_model_before_the_step(written: str):
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    loop.plain_model.get_parameter(written).data += inputs.mean()
    with pytest.raises(CouplingError, match=f"wrote to '{written}'"):
        loop.optimizer.step()


def test_a_model_that_averages_over_the_batch():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x - x.mean(0))

    loop = private(Centred())
    _, inputs, _ = first_batch(loop)
    with pytest.raises(CouplingError):
        loop.model(inputs)


def test_a_model_that_computes_its_own_loss():
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.layer(x), y)

    loop = private(WithLoss())
    _, inputs, targets = first_batch(loop)
    with pytest.raises(InputError, match=r"one entry a row.*couples"):
        loop.model(inputs, targets)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────


def negatives_from_the_batch(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(out @ out.T, torch.arange(len(out)))


def root_of_the_mean(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return out.square().mean().sqrt()


def softmax_over_the_batch(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -functional.log_softmax(out, dim=0)[0].mean()


@pytest.mark.parametrize(
    "loss", [negatives_from_the_batch, root_of_the_mean, softmax_over_the_batch]
)
def test_losses_whose_rows_depend_on_one_another(loss: Any):
    loop = private()
    _, inputs, targets = first_batch(loop)
    with pytest.raises(CouplingError, match=r"couples records.*guarantee would not hold"):
        loss(loop.model(inputs), targets).backward()


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.1),
        lambda out, y: functional.mse_loss(out, functional.one_hot(y, 3).double()),
        lambda out, y: functional.l1_loss(out, functional.one_hot(y, 3).double()),
        lambda out, y: functional.multi_margin_loss(out, y),
        lambda out, y: functional.cross_entropy(out, y, reduction="none").exp().mean(),
        lambda out, y: out.sum(),
        lambda out, y: functional.kl_div(
            out.log_softmax(1), out.detach().softmax(1), reduction="batchmean"
        ),
    ],
)
def test_losses_whose_rows_are_by_themselves(loss: Any):
    loop = private()
    _, inputs, targets = first_batch(loop)
    loss(loop.model(inputs), targets).backward()
    loop.optimizer.step()


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────
