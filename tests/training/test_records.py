"""Which rows a record brings, and that its gradient is the mean over them; against loops that are obviously right."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpis.errors import CouplingError, InputError
from dpis.generators import torch_generator
from dpis.mechanism.mechanism import APPLIED_NOISE
from dpis.randomness import Key
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
    total += APPLIED_NOISE * z * Key.from_seed(7).normals("noise", 0, 10)[:]
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
    chance = torch_generator(Key.from_seed(7).stream("augment:0:0", 0), torch.device("cpu"))
    changed = TensorDataset(*shaken(repeated.tensors, chance))
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        ({"views": 2.5}, "views must be a whole number of at least 1, found 2.5"),
        ({"views": 3}, "3 views along its first axis"),
    ],
)
def test_what_makes_no_records_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
