"""Datasets and loaders as people have them: each runs as it is, or is refused with the harm and the edit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from dpis.errors import InputError

from . import BATCH, RECORDS, Loop, data, private

# ── loaders ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_workers_shuffle() -> None:
    loop = private(loader={"num_workers": 2, "shuffle": True}).train()
    assert len(loop.engine.accountant) == RECORDS // BATCH


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_workers_shuffle_pin_droplast() -> None:
    settings = {"shuffle": True, "pin_memory": True, "drop_last": True}
    with pytest.warns(UserWarning, match="drop_last=True is ignored") as caught:
        loop = private(dataset=data(43), n_public=43, loader=settings)
    assert [w.filename for w in caught if "drop_last" in str(w.message)] == [
        private.__code__.co_filename
    ]
    assert len(loop.loader) == 43 // BATCH
    seen = _indices(loop, epochs=20)
    assert seen == set(range(43))  # nobody is dropped for good


def _indices(loop: Loop, epochs: int) -> set[int]:
    seen: set[int] = set()
    for _ in range(epochs):
        for inputs, targets in loop.loader:
            seen.update(loop.session._current.draw.indices.tolist())
            loop.step(inputs, targets)
    return seen


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * RECORDS, RECORDS),
        WeightedRandomSampler([1.0] * RECORDS, RECORDS, replacement=False),
        SubsetRandomSampler(range(RECORDS)),
    ],
    ids=["weighted", "without replacement", "subset"],
)
def test_weighted_random_sampler(sampler: Any) -> None:
    with pytest.raises(InputError, match=r"silently wrong.*Leave sampler out.*weight the losses"):
        private(loader={"sampler": sampler})


def test_subset_random_split_generator() -> None:
    generator = torch.Generator().manual_seed(0)
    train, _ = random_split(data(), [RECORDS - 8, 8], generator=generator)
    loop = private(dataset=train, n_public=RECORDS - 8).train()
    assert len(loop.engine.accountant) == (RECORDS - 8) // BATCH
    private(dataset=Subset(data(), range(8)), n_public=8).train()


def test_last_partial_epoch_len_b_not_dividing() -> None:
    loop = private(dataset=data(43), n_public=43).train(2)
    assert len(loop.engine.accountant) == 2 * (43 // BATCH)
    assert loop.loader.sample_rate == BATCH / 43


# ── datasets ─────────────────────────────────────────────────────────────────────────────────────────


def test_uint8_to_float_in_loop() -> None:
    pixels = torch.randint(256, (RECORDS, 4), dtype=torch.uint8)
    loop = private(dataset=TensorDataset(pixels, data().tensors[1]))
    before = loop.weights
    for inputs, targets in loop.loader:
        loop.step(inputs.double() / 255, targets)
    assert not torch.equal(loop.weights, before)


class Table(Dataset[Any]):
    """As a dataset of Hugging Face with ``with_format("torch")``: rows by name, many at once."""

    def __init__(self) -> None:
        self.columns = dict(zip(("inputs", "labels"), data().tensors, strict=True))

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, place: Any) -> dict[str, Tensor]:
        return {name: column[place] for name, column in self.columns.items()}

    def __getitems__(self, places: list[int]) -> list[dict[str, Tensor]]:
        together = self[places]
        return [{name: column[n] for name, column in together.items()} for n in range(len(places))]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_hf_dataset_with_format_torch(workers: int) -> None:
    loop = private(dataset=Table(), loader={"num_workers": workers})
    before = loop.weights
    for batch in loop.loader:
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(batch["inputs"]), batch["labels"]).backward()
        loop.optimizer.step()
    assert not torch.equal(loop.weights, before)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def test_iterable_dataset() -> None:
    with pytest.raises(InputError, match=r"epsilon would be wrong.*DataLoader\(list\(dataset\)"):
        private(dataset=Stream())
    assert len(private(dataset=list(Stream())).train().engine.accountant) == RECORDS // BATCH


def test_hf_dataset_streaming() -> None:
    with pytest.raises(InputError, match=r"without streaming=True"):
        private(dataset=Stream())


class WebLoader:
    """Not torch's: batches come from a pipeline."""

    def __init__(self) -> None:
        self.dataset, self.batch_size = Stream(), BATCH

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Stream(), batch_size=BATCH))


class WebDataLoader(DataLoader[Any]):
    """Torch's, and batches come from a pipeline."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(DataLoader(Stream(), batch_size=BATCH))


@pytest.mark.parametrize("loader", [WebLoader(), WebDataLoader(data(), batch_size=BATCH)])
def test_webdataset_like(loader: Any) -> None:
    from dpis import PrivacyEngine

    from . import mlp

    model = mlp()
    with pytest.raises(InputError, match=r"not accounted for.*DataLoader\(list\(dataset\)"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            n_public=RECORDS,
        )
