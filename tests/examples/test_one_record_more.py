"""One record more, through the trainers of Hugging Face and Lightning (rule 23).

Items are moved at random when they are fetched, and the model drops some of what it sees. Where a record comes after
all others, nobody else's chances change, and the sum before its noise moves by one at most. Masks of several layers
are given out by place, one layer after the other, so a record more shifts those of everybody from the second layer on:
there it is the law of masks that stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from dpis import generators
from dpis.dropin import session as session_module
from dpis.mechanism import noisy_update
from dpis.options import Privacy

from .loops import quiet

pytestmark = pytest.mark.slow  # for the time that importing the packages takes

RECORDS, FEATURES, HIDDEN, STEPS = 16, 4, 36, 20
MOST = 1.001
FALSE_ALARM = 1e-6  # of every statistical assertion; keys are fixed


class Moved(Dataset[Any]):
    """Every item is moved at random, by the numbers of torch, numpy and Python."""

    by = 3.0

    def __init__(self, records: int, first: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(2 * RECORDS, FEATURES, generator=generator).double()[:records]
        if first is not None:
            self.rows = torch.cat([first, self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        moved = torch.randn(FEATURES) + np.random.randn() + random.gauss(0, 1)
        return {"rows": self.rows[place] + self.by * moved, "labels": place % 3}


class Still(Moved):
    """Nothing about it is random."""

    by = 0.0


class Greedy(Moved):
    """Its first record takes more random numbers, and is another."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place == 0:
            torch.randn(5)
        return super().__getitem__(place)


class Dropping(nn.Module):
    """Keeps what its dropout let through: one mask for every layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = [FEATURES, *[HIDDEN] * layers]
        self.hidden = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.last, self.drop = nn.Linear(widths[-1], 3), nn.Dropout(0.5)
        self.masks: list[Tensor] = []
        self.double()

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        self.masks = []
        for layer in self.hidden:
            values = layer(rows)
            kept = self.drop(torch.ones_like(values))
            self.masks.append((kept != 0).detach())
            rows = torch.tanh(values) * kept
        return {"logits": self.last(rows)}


Seen = list[tuple[Tensor, list[Tensor]]]
"""Of every step: the rows as the model was given them, and the masks of its layers."""


def private(seed: int) -> dict[str, Any]:
    """Everybody is drawn in every step."""
    privacy = Privacy(n_public=RECORDS, method="dp-sgd")
    return {"privacy": privacy, "noise_multiplier": 1.0, "seed": seed}


def through_hugging_face(
    net: Dropping, dataset: Dataset[Any], *, workers: int, steps: int, seed: int
) -> Seen:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from dpis.dropin.huggingface import PrivateTrainer

    seen: Seen = []

    class Watched(PrivateTrainer):
        def _losses_of(self, model: nn.Module, inputs: Any) -> Tensor:
            losses = super()._losses_of(model, inputs)
            seen.append((inputs["rows"].clone(), net.masks))
            return losses

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=steps,
        per_device_train_batch_size=RECORDS,
        dataloader_num_workers=workers,
        logging_strategy="no",
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Watched(net, arguments, train_dataset=dataset, **private(seed)).train()
    return seen


def through_lightning(
    net: Dropping, dataset: Dataset[Any], *, workers: int, steps: int, seed: int
) -> Seen:
    lightning = pytest.importorskip("lightning")
    from dpis.dropin.lightning import PrivacyCallback

    seen: Seen = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            logits = self.net(batch["rows"])["logits"]
            seen.append((batch["rows"].clone(), net.masks))
            return functional.cross_entropy(logits, batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lightning.seed_everything(0, verbose=False)  # as so many scripts do
    trainer = lightning.Trainer(
        max_epochs=steps,
        accelerator="cpu",
        callbacks=[PrivacyCallback(**private(seed), model="net")],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(dataset, batch_size=RECORDS, num_workers=workers))
    return seen


Train = Callable[..., Seen]
TRAINERS = {"hugging face": through_hugging_face, "lightning": through_lightning}
through_both = pytest.mark.parametrize("train", TRAINERS.values(), ids=TRAINERS)
with_workers = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was summed up, before its noise."""
    seen, real = list[Tensor](), noisy_update.add_noise

    def add_noise(values: dict[str, Tensor], std: float, normals: Any) -> dict[str, Tensor]:
        seen.append(torch.cat([value.double().flatten() for value in values.values()]))
        return real(values, std, normals)

    monkeypatch.setattr(noisy_update, "add_noise", add_noise)
    return seen


def moved_by(
    sums: list[Tensor], train: Train, workers: int, layers: int, *datasets: Dataset[Any]
) -> float:
    """How far apart the sums of the first step are, over two data sets with one key."""
    for dataset in datasets:
        train(Dropping(layers), dataset, workers=workers, steps=1, seed=1)
    one, other = sums
    assert one.norm() > 1  # they are of records
    return float((one - other).norm())


# ── the sum ──────────────────────────────────────────────────────────────────────────────────────────


@quiet
@through_both
@with_workers
@pytest.mark.parametrize("layers", [0, 1])
def test_one_record_more_moves_the_sum_by_one(
    train: Train, workers: int, layers: int, sums: list[Tensor]
) -> None:
    """With transforms alone, and with a layer of dropout, in which the last record takes its mask last."""
    fewer, more = Moved(RECORDS), Moved(RECORDS + 1)
    assert 0.1 < moved_by(sums, train, workers, layers, fewer, more) <= MOST


@quiet
@through_both
@with_workers
def test_a_record_that_takes_more_chances_moves_no_other(
    train: Train, workers: int, sums: list[Tensor]
) -> None:
    """One is taken away, and one is added."""
    assert moved_by(sums, train, workers, 0, Moved(RECORDS), Greedy(RECORDS)) <= 2 * MOST


@quiet
@through_both
def test_items_from_a_shared_stream_would_move_others(
    train: Train, sums: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_place(self: Any, places: list[int], secret: bytes) -> list[Any]:
        return [self._make(place) for place in places]

    monkeypatch.setattr(generators.ItemChance, "items", by_place)
    assert moved_by(sums, train, 0, 0, Moved(RECORDS), Greedy(RECORDS)) > 2 * MOST


# ── what is random about a record ────────────────────────────────────────────────────────────────────


def same_under_two_keys(train: Train, workers: int) -> tuple[bool, bool]:
    """Whether the items, and the masks, of a run are those of a run with another key."""
    runs = [
        train(Dropping(2), Moved(RECORDS), workers=workers, steps=2, seed=seed)
        for seed in (1, 1, 2)
    ]
    items = [torch.stack([rows for rows, _ in run]) for run in runs]
    masks = [masks_of(run) for run in runs]
    for one, again, _ in (items, masks):
        assert torch.equal(one, again)  # a function of the key
        assert not torch.equal(one[0], one[1])  # and of the step
    return torch.equal(items[0], items[2]), torch.equal(masks[0], masks[2])


def masks_of(run: Seen) -> Tensor:
    """By step, layer, row and place."""
    return torch.stack([torch.stack(masks) for _, masks in run])


@quiet
@through_both
@with_workers
def test_the_seeds_of_trainers_say_nothing(train: Train, workers: int) -> None:
    """They are public, and set for every run: 42 by Hugging Face, and `seed_everything`."""
    assert same_under_two_keys(train, workers) == (False, False)


@quiet
@through_both
def test_masks_of_the_processs_generator_would_be_known(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "seeded_generators", nullcontext)
    assert same_under_two_keys(train, 0) == (False, True)


def assert_fair(heads: Tensor) -> None:
    """As many as of a fair coin."""
    tossed = stats.binomtest(int(heads.sum()), heads.numel(), 0.5)
    assert tossed.pvalue > FALSE_ALARM


@quiet
@pytest.mark.statistical
@through_both
def test_the_law_of_masks_is_the_same_whoever_else_is_drawn(train: Train) -> None:
    """Three layers: every entry a fair coin, and no two of them tell of each other.

    Between neighbours, layers, steps, and the record that was added and those after it; with it, and without.
    """
    added = torch.full((1, FEATURES), 9.0).double()
    for first in (None, added):
        dataset = Still(RECORDS, first)
        seen = train(Dropping(3), dataset, workers=0, steps=STEPS, seed=4)
        masks = masks_of(seen)
        assert masks.shape == (STEPS, 3, len(dataset), HIDDEN)
        others = masks[:, :, len(dataset) - RECORDS :]
        for row in range(RECORDS):
            assert_fair(others[:, :, row])
        for layer in range(3):
            assert_fair(others[:, layer])
        assert_fair(others[:, :, 1:] == others[:, :, :-1])
        assert_fair(others[:, 1:] == others[:, :-1])
        assert_fair(others[1:] == others[:-1])
        if first is not None:
            for row in range(RECORDS):
                assert_fair(masks[:, :, 0] == others[:, :, row])
