"""With uniform sampling, the same records and no noise, a step is that of Opacus 1.6.0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpis import PrivacyEngine
from dpis.mechanism import noisy_update

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

RECORDS, BATCH, C = 60, 12, 0.5


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2),
            nn.ReLU(),
            nn.GroupNorm(2, 6),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
        )
        self.head = nn.Linear(8 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 7, batch_first=True)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


class Attention(nn.Module):
    """Self-attention of linear layers, which Opacus knows. (Its own layer, with rows first, is another function.)"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.batch_first, self.heads = True, heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = torch.softmax(q @ k.transpose(2, 3) / q.shape[3] ** 0.5, dim=3) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)), None

    @classmethod
    def of(cls, layer: nn.MultiheadAttention) -> Attention:
        """With the weights of torch's layer."""
        made = cls(layer.embed_dim, layer.num_heads)
        made.out.load_state_dict(layer.out_proj.state_dict())
        for own, weight, bias in zip(
            (made.q, made.k, made.v),
            layer.in_proj_weight.chunk(3),
            layer.in_proj_bias.chunk(3),
            strict=True,
        ):
            own.load_state_dict({"weight": weight, "bias": bias})
        return made

    def as_torch(self) -> dict[str, Tensor]:
        """By the names of torch's layer."""
        own = (self.q, self.k, self.v)
        return {
            "in_proj_weight": torch.cat([layer.weight for layer in own]).detach(),
            "in_proj_bias": torch.cat([layer.bias for layer in own]).detach(),
        } | {f"out_proj.{name}": value for name, value in self.out.state_dict().items()}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        nn.init.normal_(self.layer.self_attn.in_proj_bias)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x)).mean(1))


def images() -> Tensor:
    return torch.randn(RECORDS, 1, 12, 12)


def words() -> Tensor:
    return torch.randint(20, (RECORDS, 9))


def ours_and_theirs(name: str) -> tuple[nn.Module, nn.Module]:
    """The same function for both, of the same weights."""
    from opacus.layers import DPLSTM

    torch.manual_seed(4)
    ours = {"CNN": CNN, "LSTM": Recurrent, "transformer": Transformer}[name]()
    theirs = copy.deepcopy(ours)
    if name == "LSTM":
        theirs.lstm = DPLSTM(6, 7, batch_first=True)
        theirs.lstm.load_state_dict(ours.lstm.state_dict())
    if name == "transformer":
        theirs.layer.self_attn = Attention.of(ours.layer.self_attn)
    return ours, theirs


def weights(model: nn.Module) -> dict[str, Tensor]:
    """By the names that torch's layers have."""
    named = dict(model.state_dict())
    if isinstance(model, Recurrent):
        named |= {f"lstm.{name}": value for name, value in model.lstm.state_dict().items()}
    if isinstance(model, Transformer) and isinstance(model.layer.self_attn, Attention):
        attention = model.layer.self_attn.as_torch()
        named |= {f"layer.self_attn.{name}": value for name, value in attention.items()}
    return named


def steps(engine: Any, model: nn.Module, records: TensorDataset, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records, batch_size=BATCH),
        max_grad_norm=C,
        **options,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["CNN", "LSTM", "transformer"])
def test_one_step_is_that_of_opacus(name: str, reduction: str, monkeypatch: pytest.MonkeyPatch):
    opacus = pytest.importorskip("opacus")
    monkeypatch.setattr(
        noisy_update,
        "add_noise",
        lambda sums, std, stream: {n: value.double() for n, value in sums.items()},
    )
    ours, theirs = ours_and_theirs(name)
    records = TensorDataset(images() if name == "CNN" else words(), torch.randint(5, (RECORDS,)))
    assert torch.allclose(ours(records[:][0]), theirs(records[:][0]), rtol=0, atol=1e-6)
    mine = steps(
        PrivacyEngine(),
        ours,
        records,
        noise_multiplier=1.0,
        method="dp-sgd",
        n_public=RECORDS,
        loss_reduction=reduction,
    )
    module, optimizer, loader = mine
    start = [p.detach().clone() for p in ours.parameters()]
    inputs, targets = next(iter(loader))
    assert len(inputs) > 2
    functional.cross_entropy(module(inputs), targets, reduction=reduction).backward()
    optimizer.step()

    module, optimizer, _ = steps(
        opacus.PrivacyEngine(), theirs, records, noise_multiplier=0.0, loss_reduction=reduction
    )
    functional.cross_entropy(module(inputs), targets, reduction=reduction).backward()
    optimizer.step()

    after, moved = weights(theirs), 0.0
    for (parameter, value), before in zip(ours.state_dict().items(), start, strict=True):
        assert torch.allclose(
            value, after[parameter], rtol=0, atol=1e-6 * (BATCH if reduction == "sum" else 1)
        )
        moved += float((value - before).abs().sum())
    assert moved > 0.01
