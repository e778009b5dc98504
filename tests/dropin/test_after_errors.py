"""After an error in the middle of a step: no record counts twice, no refusal is forgotten, no draw is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from dpis.dropin import MisuseError
from dpis.errors import CouplingError, InputError

from .loops import Loop, private

RECORDS = 8


class StoppedError(Exception):
    """Out of memory, say."""


def one_hot_loop() -> Loop:
    """Every record moves a weight of its own, by one."""
    model = nn.Linear(RECORDS, 1, bias=False)
    nn.init.zeros_(model.weight)
    dataset = TensorDataset(torch.eye(RECORDS), torch.zeros(RECORDS))
    return private(
        model, dataset, n_public=RECORDS, loader={"batch_size": RECORDS}, method="dp-sgd",
        noise_multiplier=0.01, optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip


def in_two_parts(loop: Loop, inputs: Tensor) -> None:
    for part in inputs.tensor_split(2):
        (100 * loop.model(part)).mean().backward()


def added(loop: Loop) -> list[float]:
    return [round(-RECORDS * float(weight), 1) for weight in loop.weights]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_part_that_was_added_before_an_error_counts_once(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, calls = one_hot_loop(), 0
    real = loop.session.mechanism.add

    def add(total: Any, tape: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise StoppedError
        real(total, tape)

    monkeypatch.setattr(loop.session.mechanism, "add", add)
    for inputs, _ in loop.loader:
        in_two_parts(loop, inputs)
        with pytest.raises(StoppedError):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        with pytest.raises(MisuseError, match="without a batch"):
            loop.optimizer.step()
        break
    assert len(loop.engine.accountant) == 0
    for inputs, _ in loop.loader:  # the same draw, delivered again
        loop.optimizer.zero_grad()
        in_two_parts(loop, inputs)
        loop.optimizer.step()
    assert added(loop) == [1.0] * RECORDS
    assert len(loop.engine.accountant) == 1


def test_a_loss_that_was_refused_is_looked_at_again() -> None:
    loop = private(nn.Linear(4, 3).double())
    for _ in range(6):
        with pytest.raises(CouplingError):  # noqa: PT012
            for inputs, _ in loop.loader:
                rows = functional.normalize(loop.model(inputs), dim=1)
                functional.cross_entropy(rows @ rows.T, torch.arange(len(rows))).backward()
                loop.optimizer.step()
    assert len(loop.engine.accountant) == 0
    loop.train()  # another loss, by each record itself
    assert len(loop.engine.accountant) == len(loop.loader)


class Uneven(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.full((2 + place % 7, 3), float(place)), place % 2


def padded(items: list[Any]) -> tuple[Tensor, Tensor]:
    rows, targets = zip(*items, strict=True)
    return pad_sequence(rows, batch_first=True), torch.tensor(targets)


class SeesPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows).mean(1)


def test_a_model_that_sees_padding_is_refused_for_good() -> None:
    loop = private(SeesPadding(), Uneven(), loader={"batch_size": 10, "collate_fn": padded})
    for _ in range(4):
        with pytest.raises(CouplingError, match="padd"):  # noqa: PT012
            for inputs, targets in loop.loader:
                loop.step(inputs, targets)
        with pytest.raises(CouplingError, match="padd"):
            loop.optimizer.step()
    assert len(loop.engine.accountant) == 0


def test_a_checkpoint_of_our_loop_is_no_engines(tmp_path: Any) -> None:
    from dpis.mechanism.secret_state import save_secret_state

    loop, path = private(), tmp_path / "checkpoint.secret"
    save_secret_state(path, {"key": b"k", "options": {}, "training": None})
    with pytest.raises(InputError, match="of another kind"):
        loop.engine.load_checkpoint(path=path, module=loop.model, optimizer=loop.optimizer)
