"""A loop of one's own with private steps, and losses of single rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpis.dropin.row_losses import classification_losses
from tests.examples.loops import PRIVACY, example


@pytest.mark.slow
def test_the_drop_in_loop_runs() -> None:
    epsilon, accuracy = example("dropin_loop").main(epochs=1, records=2000)
    assert 0 < epsilon <= 3
    assert accuracy > 0.1


@pytest.mark.slow
def test_the_gan_runs() -> None:
    epsilon, mean = example("private_gan").main(epochs=2, records=1024)
    assert 0 < epsilon < 12
    assert mean.isfinite().all()


def test_losses_of_batches_can_be_added_up() -> None:
    """``running += loss.detach()``, and a list of losses that is stacked: what every logging loop does."""
    from dpis import PrivacyEngine

    model: Any = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    model, optimizer, loader = PRIVACY.make_private(
        PrivacyEngine(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=16),
        1,
    )
    running, kept = torch.zeros(()), []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
        running += loss.detach()
    torch.testing.assert_close(torch.stack(kept).sum(), running)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.randn(3, 4), torch.tensor([0, 3, 1])),
        (torch.randn(3, 1), torch.randn(3)),
        (torch.randn(3, 4), torch.rand(3, 4)),
        (torch.randn(3, 5, 4), torch.tensor([[0, 1, 2, 3, -100]] * 3)),
    ],
    ids=["classes", "regression", "several classes", "tokens"],
)
def test_losses_are_of_single_rows(logits: torch.Tensor, labels: torch.Tensor) -> None:
    together = classification_losses({"logits": logits}, labels)
    alone = [
        classification_losses({"logits": logits[i : i + 1]}, labels[i : i + 1]) for i in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone))
