"""Which rows a record brings, and that its gradient is the mean over them; against loops that are obviously right."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from dpis.accounting import Norms
from dpis.errors import InputError
from dpis.gradients import CouplingError
from dpis.mechanism.mechanism import APPLIED_NOISE
from dpis.randomness import Key
from dpis.training.chance import torch_generator
from dpis.training.records import Records
from tests.training.toys import (
    Crash,
    crash_at,
    fit,
    ledger,
    linear,
    mlp,
    points,
    released,
    weights,
)

C = 0.5


def _one_step(out: Path, records: int, **settings: Any) -> tuple[Tensor, float]:
    """The change of the weight by one step over all records, in units of the mean; and the noise multiplier."""
    model = linear()
    result = fit(
        out,
        model,
        method="dp-sgd",
        epochs=1,
        batch_size=records,
        n_public=records,
        clip_norm=C,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        **settings,
    )
    z = ledger(result.folder).entries[0].event.noise_multiplier
    return linear().weight.detach() - weights(result.folder)["weight"], z


def _expected(records: list[TensorDataset], z: float) -> Tensor:
    """``(C/B)·(Σ clip(grad_i, C)/C + z·noise)``, record by record; the noise is that of the seeded key."""
    model, total = linear(), torch.zeros(10, dtype=torch.float64)
    for record in records:
        inputs, target = record.tensors
        model.zero_grad()
        cross_entropy(model(inputs), target).backward()
        gradient = torch.cat([model.bias.grad, model.weight.grad.flatten()]).double()
        total += gradient / max(C, float(gradient.norm()))
    total += APPLIED_NOISE * z * Key.from_seed(7).stream("noise", 0).normals(10)
    return (C / len(records) * total)[2:].reshape(2, 4).float()


def _some(data: TensorDataset, rows: list[int]) -> TensorDataset:
    return TensorDataset(*(tensor[rows] for tensor in data.tensors))


def test_a_record_is_a_row(tmp_path: Path) -> None:
    data = points(16)
    change, z = _one_step(tmp_path / "run", 16, dataset=data)
    torch.testing.assert_close(change, _expected([_some(data, [i]) for i in range(16)], z))


def test_a_users_rows_count_together(tmp_path: Path) -> None:
    data = points(24)
    users = [0, 0, 0, *"abcdefghijklmno", 0, "a", "a", "a", "b", "o"]
    change, z = _one_step(
        tmp_path / "run", 16, dataset=data, user_ids=list(map(str, users)), max_rows_per_user=4
    )
    names = list(dict.fromkeys(users))
    rows = [[i for i, user in enumerate(users) if user == name] for name in names]
    assert max(map(len, rows)) == 4
    torch.testing.assert_close(change, _expected([_some(data, own) for own in rows], z))


def test_a_user_with_too_many_rows_is_heard_through_some(tmp_path: Path) -> None:
    data = points(17)
    users = [*range(15), 14, 14]
    change, z = _one_step(tmp_path / "run", 15, dataset=data, user_ids=users, max_rows_per_user=2)
    single = [_some(data, [i]) for i in range(14)]
    pairs = ([14, 15], [14, 16], [15, 16])
    possible = [_expected([*single, _some(data, pair)], z) for pair in pairs]
    assert sum(torch.allclose(change, one, atol=1e-6) for one in possible) == 1


def test_users_are_what_is_counted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="treated as public"):
        result = fit(
            tmp_path / "run",
            user_ids=[i // 2 for i in range(64)],
            n_public=None,
            max_rows_per_user=2,
        )
    assert ledger(result.folder).header.n_public == 32
    assert result.summary.claim["protects"] == "one user with all of their rows"


@pytest.mark.parametrize("users", [None, [0, 0, *range(1, 15)]])
def test_augmentations_are_averaged_within_a_record(
    tmp_path: Path, users: list[int] | None
) -> None:
    data, K = points(16), 3

    def shaken(batch: Any, generator: torch.Generator) -> Any:
        inputs, target = batch
        return inputs + torch.randn(inputs.shape, generator=generator), target

    rows = 1 if users is None else 2
    more = {} if users is None else {"user_ids": users, "max_rows_per_user": 2}
    count = 16 if users is None else 15
    change, z = _one_step(
        tmp_path / "run", count, dataset=data, augment=shaken, augmentations=K, **more
    )
    places = (
        [[i] for i in range(16)] if users is None else [[0, 1], *([i, i] for i in range(2, 16))]
    )
    repeated = _some(data, [i for own in places for i in own for _ in range(K)])
    seed = Key.from_seed(7).stream("augment:0", 0).bytes(8)
    changed = TensorDataset(*shaken(repeated.tensors, torch_generator(seed, torch.device("cpu"))))
    real = [K * len(set(own)) for own in places]  # what only fills up does not count
    own_rows = [list(range(i * rows * K, i * rows * K + n)) for i, n in enumerate(real)]
    torch.testing.assert_close(change, _expected([_some(changed, own) for own in own_rows], z))


def _stacked(data: TensorDataset, views: int) -> TensorDataset:
    """Every ``views`` rows as the views of one item, under the target of the first."""
    inputs, targets = data.tensors
    return TensorDataset(inputs.unflatten(0, (-1, views)), targets[::views])


def _records_of_views(data: TensorDataset) -> list[TensorDataset]:
    return [
        TensorDataset(views, target.repeat(len(views)))
        for views, target in zip(*data.tensors, strict=True)
    ]


def test_views_are_averaged_within_a_record(tmp_path: Path) -> None:
    data = _stacked(points(48), 3)
    change, z = _one_step(tmp_path / "run", 16, dataset=data, views=np.int64(3))
    torch.testing.assert_close(change, _expected(_records_of_views(data), z))


def test_views_of_a_users_rows_count_together(tmp_path: Path) -> None:
    data, users = _stacked(points(48), 3), [0, 0, *range(1, 15)]
    more = {"user_ids": users, "max_rows_per_user": 2}
    change, z = _one_step(tmp_path / "run", 15, dataset=data, views=3, **more)
    first, second, *rest = _records_of_views(data)
    both = TensorDataset(*(torch.cat(p) for p in zip(first.tensors, second.tensors, strict=True)))
    torch.testing.assert_close(change, _expected([both, *rest], z))


def test_views_of_others_show(tmp_path: Path, monkeypatch: Any) -> None:
    """Rule 9, broken on purpose: a record that brought another's view would not be all that changes without it."""
    data = _stacked(points(48), 3)
    own = Records._view_by_view

    def a_row_off(self: Records, batch: Any) -> Any:
        inputs, targets = own(self, batch)
        return inputs.roll(1, 0), targets

    monkeypatch.setattr(Records, "_view_by_view", a_row_off)
    change, z = _one_step(tmp_path / "run", 16, dataset=data, views=3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(change, _expected(_records_of_views(data), z))


def test_records_are_counted_and_the_work_of_their_views(tmp_path: Path) -> None:
    data = _stacked(points(64), 2)
    with pytest.warns(UserWarning, match="treated as public"):
        result = fit(tmp_path / "run", dataset=data, views=2, n_public=None)
    assert ledger(result.folder).header.n_public == 32
    assert result.summary.claim["protects"] == "one record"
    settings: Any = {"epochs": 1, "batch_size": 32, "n_public": 32, "method": "dp-sgd"}
    shown = fit(tmp_path / "shown", dataset=data, views=2, diagnostics=True, **settings)
    assert shown.diagnostics.gradient_evaluations == 2 * 32


def test_views_resume_bit_for_bit(tmp_path: Path) -> None:
    settings: Any = {"dataset": _stacked(points(64), 2), "views": 2, "n_public": 32}
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fit(tmp_path / "run", progress=crash_at(3), **settings)
    with pytest.raises(InputError, match="the rows of a record"):
        fit(tmp_path / "run", augment=_global_noise, augmentations=2, resume=True, **settings)
    again = fit(tmp_path / "run", resume=True, **settings)
    assert released(again.folder) == released(whole.folder)


def _mixup(batch: Any, generator: torch.Generator) -> Any:
    inputs, target = batch
    return (inputs + inputs.flip(0)) / 2, target


def _noise_in_place(batch: Any, generator: torch.Generator) -> Any:
    inputs, target = batch
    return inputs.add_(torch.randn(inputs.shape, generator=generator)), target


def _global_noise(batch: Any, generator: torch.Generator) -> Any:
    inputs, target = batch
    return inputs + torch.randn_like(inputs) + float(np.random.rand()) + random.random(), target


def _fewer(batch: Any, generator: torch.Generator) -> Any:
    return tuple(tensor[1:] for tensor in batch)


@pytest.mark.parametrize("K", [1, 2])
def test_augmentation_that_mixes_records_is_refused(tmp_path: Path, K: int) -> None:
    with pytest.raises(CouplingError, match="mixes rows"):
        fit(tmp_path / "run", augment=_mixup, augmentations=K)
    assert not (tmp_path / "run").exists()


def test_a_first_batch_that_shows_nothing_does_not_pass_for_a_check(tmp_path: Path) -> None:
    """Equal records cannot show whether they are mixed: the next batch is asked again."""
    inputs = torch.cat([torch.ones(8, 4), torch.randn(8, 4)])
    data = TensorDataset(inputs, torch.zeros(16).long())

    def mean(batch: Any, generator: torch.Generator) -> Any:
        return (batch[0].mean(0, keepdim=True).expand(len(batch[0]), 4).clone(), batch[1])

    with pytest.raises(CouplingError, match="mixes rows"):
        fit(tmp_path / "run", dataset=data, n_public=16, batch_size=2, epochs=4, augment=mean)


@pytest.mark.parametrize("augment", [_noise_in_place, _global_noise])
def test_any_source_of_chance_may_augment_and_is_repeatable(tmp_path: Path, augment: Any) -> None:
    whole = fit(tmp_path / "whole", augment=augment, augmentations=2)
    with pytest.raises(Crash):
        fit(tmp_path / "run", augment=augment, augmentations=2, progress=crash_at(6))
    again = fit(tmp_path / "run", augment=augment, augmentations=2, resume=True)
    assert released(again.folder) == released(whole.folder)


def test_an_augmentation_must_keep_the_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="as many rows"):
        fit(tmp_path / "run", augment=_fewer)


# ── data sets of all kinds ───────────────────────────────────────────────────────────────────────────


class Dictionaries(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, target = points()[index]
        return {"x": inputs, "y": int(target), "name": f"row {index}"}


def _objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def _without_names(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([item["x"] for item in items]),
        "y": torch.tensor([item["y"] for item in items]),
    }


def test_dictionaries_with_an_objective(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain")
    found = fit(
        tmp_path / "run", dataset=Dictionaries(), collate_fn=_without_names, objective=_objective
    )
    for name, value in weights(plain.folder).items():
        torch.testing.assert_close(weights(found.folder)[name], value)


def test_a_list_is_a_data_set(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain")
    found = fit(tmp_path / "run", dataset=list(points()))
    for name, value in weights(plain.folder).items():
        torch.testing.assert_close(weights(found.folder)[name], value)


POINTS = points()


class Shaken(Dataset[Any]):
    """Random transforms by all three generators, as torchvision and its like do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        inputs, target = POINTS[index]
        chance = torch.rand(4) + float(np.random.rand()) + random.random()
        return inputs + 0.1 * chance, target


class ShakenTensors(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(4), target


@pytest.mark.parametrize(
    ("dataset", "method"),
    [(Shaken(), "dpis-adaptive"), (ShakenTensors(*points().tensors), "dpis")],
)
def test_random_transforms_resume_bit_by_bit(tmp_path: Path, dataset: Any, method: str) -> None:
    settings = {"dataset": dataset, "held_out": copy.copy(dataset), "method": method}
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fit(tmp_path / "run", **settings, progress=crash_at(6))
    torch.manual_seed(99)
    again = fit(tmp_path / "run", **settings, resume=True)
    assert released(again.folder) == released(whole.folder)
    plain = fit(tmp_path / "plain", method=method)
    assert not torch.equal(weights(plain.folder)["weight"], weights(whole.folder)["weight"])


@pytest.mark.usefixtures("checked_engine")
@pytest.mark.parametrize(("method", "step"), [("dpis", 3), ("dpis-adaptive", 6)])
def test_dropout_resumes_bit_by_bit(tmp_path: Path, method: str, step: int) -> None:
    """The engine's checks, at its 1st, 2nd, 4th, ... pass, leave the generator of dropout alone."""
    whole = fit(tmp_path / "whole", mlp(dropout=0.4), method=method)
    with pytest.raises(Crash):
        fit(tmp_path / "run", mlp(dropout=0.4), method=method, progress=crash_at(step))
    torch.manual_seed(99)
    again = fit(tmp_path / "run", mlp(dropout=0.4, seed=5), method=method, resume=True)
    assert released(again.folder) == released(whole.folder)


def test_the_process_generators_are_left_alone(tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)

    seed()
    expected = state()
    seed()
    fit(tmp_path / "run", mlp(dropout=0.4), dataset=Shaken(), augment=_global_noise)
    assert state() == expected


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────


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
    plain = fit(tmp_path / "plain")
    assert ledger(plain.folder).header.norms is Norms.FIXED_SHAPE


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


def test_packed_sequences_must_be_declared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_shaped=True"):
        fit(tmp_path / "run", Packed())
    assert not (tmp_path / "run").exists()


def test_a_collate_function_must_keep_the_rows(tmp_path: Path) -> None:
    def joined(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items])[1:], torch.stack([y for _, y in items])[1:]

    with pytest.raises(InputError, match="one row an item"):
        fit(tmp_path / "run", collate_fn=joined)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(points())


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="map-style"):
        fit(tmp_path / "run", dataset=Endless())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"user_ids": [1, 2]}, "one user id a row"),
        ({"max_rows_per_user": 2}, "needs user_ids"),
        ({"augmentations": 2}, "without augment"),
        ({"augmentations": 0}, "at least 1"),
        ({"views": 0}, "at least 1"),
        ({"views": 2.0}, "whole number"),
        ({"views": 3}, "3 views along its first axis"),
    ],
)
def test_what_makes_no_records_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_collate_function_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    def standardised(items: list[Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = torch.utils.data.default_collate(items)
        return (inputs - inputs.mean(0)) / (inputs.std(0) + 1), targets

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
    return (inputs - inputs.mean(0)) / (inputs.std(0) + 1)


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


DATA = points()


@pytest.mark.parametrize(
    "held_out",
    [
        DATA,
        TensorDataset(*(tensor[:10] for tensor in DATA.tensors)),
        TensorDataset(*(tensor[::2] for tensor in DATA.tensors)),
        TensorDataset(DATA.tensors[0][:, 2:], DATA.tensors[1]),
        Subset(DATA, range(60)),
        Subset(Subset(DATA, [3, 62]), [0]),
        ConcatDataset([points(8, seed=1), Subset(DATA, [-60])]),
        Subset(TensorDataset(*(tensor[60:] for tensor in DATA.tensors)), [0]),
    ],
    ids=[
        "itself",
        "first",
        "strided",
        "columns",
        "subset",
        "subset of it",
        "sum",
        "part of a view",
    ],
)
@pytest.mark.parametrize("part", [False, True])
def test_training_data_is_not_held_out_data(tmp_path: Path, held_out: Any, part: bool) -> None:
    trained = Subset(DATA, range(62)) if part else DATA
    with pytest.raises(InputError, match="held_out is the training data"):
        fit(tmp_path / "run", dataset=trained, held_out=held_out)


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [
        (Subset(DATA, range(54)), Subset(DATA, range(54, 64))),
        (Subset(DATA, range(54)), ConcatDataset([Subset(DATA, range(54, 64)), points(8, seed=1)])),
        (
            TensorDataset(*(t[:54] for t in DATA.tensors)),
            TensorDataset(*(t[54:] for t in DATA.tensors)),
        ),
        (
            TensorDataset(*(t[::2] for t in DATA.tensors)),
            TensorDataset(*(t[1::2] for t in DATA.tensors)),
        ),
    ],
    ids=["subsets", "sum", "views", "every other row"],
)
def test_other_rows_of_one_data_set_may_be_held_out(
    tmp_path: Path, trained: Any, held_out: Any
) -> None:
    fit(tmp_path / "run", dataset=trained, held_out=held_out, epochs=1)
