"""Items made and collated one by one, in shapes that tell nothing of who shares a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from dpis.accounting import Norms
from dpis.errors import CouplingError, InputError
from dpis.mechanism import run_plan
from tests.training.toys import (
    fit,
    ledger,
    points,
    weights,
)

POINTS = points()


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1, 2 + index % 7), index % 2


def _padded(items: list[Any]) -> Any:
    texts = nn.utils.rnn.pad_sequence([text for text, _ in items], batch_first=True)
    return texts, torch.tensor([target for _, target in items])


class MeanOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, texts: Tensor) -> Tensor:
        mask = (texts > 0).float()[..., None]
        return self.out((self.words(texts) * mask).sum(1) / mask.sum(1))


def test_shapes_that_follow_the_batch_are_refused(tmp_path: Path) -> None:
    settings = {"dataset": Texts(), "collate_fn": _padded, "batch_size": 4, "epochs": 1}
    with pytest.raises(InputError, match=r"one shape are required.*batch_shaped=True"):
        fit(tmp_path / "run", MeanOfWords(), **settings)


def test_shapes_that_follow_the_batch_can_be_declared(tmp_path: Path) -> None:
    settings = {"dataset": Texts(), "collate_fn": _padded, "batch_size": 4, "epochs": 1}
    result = fit(tmp_path / "run", MeanOfWords(), batch_shaped=True, **settings)
    assert ledger(result.folder).header.norms is Norms.BATCH_SHAPED
    assert any("batch-shaped" in note for note in result.summary.notes)


def test_small_steps_are_not_filled_up_and_large_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a number that is public before the data is touched; the ledger says which."""
    small = fit(tmp_path / "small")
    assert ledger(small.folder).header.norms is Norms.BATCH_SHAPED
    assert not any("batch-shaped" in note for note in small.summary.notes)  # nothing is padded
    monkeypatch.setattr(run_plan, "LEAST_TO_FILL", 1)
    large = fit(tmp_path / "large")
    assert ledger(large.folder).header.norms is Norms.FIXED_SHAPE


class UnmaskedMean(MeanOfWords):
    def forward(self, texts: Tensor) -> Tensor:
        return self.out(self.words(texts).mean(1))


class ZeroForPadding(MeanOfWords):
    """Until noise moves it: from the second step on, padding has a vector like any word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 3, padding_idx=0)

    def forward(self, texts: Tensor) -> Tensor:
        return self.out(self.words(texts).sum(1))


@pytest.mark.parametrize("model", [UnmaskedMean, ZeroForPadding])
@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive"])
def test_a_model_that_sees_padding_is_refused(tmp_path: Path, model: Any, method: str) -> None:
    settings = {"dataset": Texts(), "collate_fn": _padded, "batch_size": 4, "epochs": 1}
    settings |= {"batch_shaped": True, "method": method}
    with pytest.raises(CouplingError, match=r"how far it is padded.*guarantee would not hold"):
        fit(tmp_path / "run", model(), **settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    fit(tmp_path / "masked", MeanOfWords(), **settings)


class Packed(nn.Module):
    """Sizes inside follow the lengths of the batch, whatever the collate function says."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        lengths = (rows > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            rows[..., None], lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][0])


def test_packed_sequences_must_be_declared_where_shapes_are_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit(tmp_path / "small", Packed()).claim
    monkeypatch.setattr(run_plan, "LEAST_TO_FILL", 1)
    with pytest.raises(InputError, match="batch_shaped=True"):
        fit(tmp_path / "run", Packed())
    assert not (tmp_path / "run").exists()


def test_a_collate_function_must_keep_the_rows(tmp_path: Path) -> None:
    def joined(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items])[1:], torch.stack([y for _, y in items])[1:]

    with pytest.raises(InputError, match="one row an item"):
        fit(tmp_path / "run", collate_fn=joined)


def test_a_collate_function_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    def standardised(items: list[Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = torch.utils.data.default_collate(items)
        return (inputs - inputs.mean(0)) / (inputs.std(0, correction=0) + 1), targets

    with pytest.raises(CouplingError, match="collate_fn mixes rows"):
        fit(tmp_path / "run", collate_fn=standardised)
    assert not (tmp_path / "run").exists()


class AtOnce(Dataset[Any]):
    """Fetches several items at once, and does something to them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Any:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: list[int]) -> list[Any]:
        inputs, targets = POINTS[places]
        return list(zip(self.change(inputs), targets, strict=True))


def _standardised(inputs: Tensor) -> Tensor:
    return (inputs - inputs.mean(0)) / (inputs.std(0, correction=0) + 1)


def _reversed(inputs: Tensor) -> Tensor:
    return inputs.flip(0)


def _by_the_largest(inputs: Tensor) -> Tensor:
    return inputs / inputs.max()


def _unlike_numbers_of_random_numbers(inputs: Tensor) -> Tensor:
    """As transforms that try until a crop fits."""
    return torch.stack([x + torch.rand(1 + int(x[0] > 0)).sum() for x in inputs])


@pytest.mark.parametrize("change", [_standardised, _reversed, _by_the_largest])
@pytest.mark.parametrize("subset", [False, True])
def test_items_that_are_fetched_at_once_are_made_by_themselves(
    tmp_path: Path, change: Any, subset: bool
) -> None:
    dataset: Any = Subset(AtOnce(change), range(64)) if subset else AtOnce(change)
    with pytest.raises(CouplingError, match=r"__getitems__ mixes records.*guarantee would not"):
        fit(tmp_path / "run", dataset=dataset)
    assert not (tmp_path / "run").exists()


def test_items_may_be_fetched_at_once(tmp_path: Path) -> None:
    plain, found = fit(tmp_path / "plain"), fit(tmp_path / "run", dataset=AtOnce(torch.clone))
    for name, value in weights(plain.folder).items():
        torch.testing.assert_close(weights(found.folder)[name], value)
    fit(tmp_path / "random", dataset=AtOnce(_unlike_numbers_of_random_numbers))


def test_as_many_items_as_were_asked_for(tmp_path: Path) -> None:
    class Fewer(AtOnce):
        def __getitems__(self, places: list[int]) -> list[Any]:
            return super().__getitems__(places)[1:]

    with pytest.raises(InputError, match="one item a place"):
        fit(tmp_path / "run", dataset=Fewer(torch.clone))
