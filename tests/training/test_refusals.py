"""What cannot be honoured is refused in one line, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from dpis.errors import CouplingError, InputError
from dpis.training import EarlyStop
from tests.training.toys import fit, linear, points, weights

MODEL, OTHER = linear(), linear()

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch_size": 65}, "larger than n_public"),
    "epsilon": ({"epsilon": -1.0}, "epsilon"),
    "method": ({"method": "dp-adam"}, "method must be one of"),
    "norm sum": ({"method": "dpis-adaptive", "norm_sum": "guess"}, "norm_sum must be"),
    "optimizer": ({"optimizer": "sgdd"}, "optimizer must be one of"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS(MODEL.parameters())}, "LBFGS"),
    "missing": ({"optimizer": torch.optim.SGD([MODEL.weight])}, "does not step bias"),
    "foreign": (
        {"optimizer": torch.optim.SGD([*MODEL.parameters(), OTHER.weight])},
        "not trainable parameters of this model",
    ),
    "average": ({"ema": 1.0}, "ema must be"),
    "interval": ({"scheduler_interval": "batch"}, "scheduler_interval"),
    "plateau": ({"scheduler": ReduceLROnPlateau}, "the training loss is private"),
    "plateau by step": (
        {
            "scheduler": ReduceLROnPlateau,
            "scheduler_interval": "step",
            "held_out": points(4),
        },
        "once an epoch",
    ),
    "early stop": ({"early_stop": EarlyStop()}, "early stop needs held-out data"),
    "early stop's metric": (
        {"early_stop": EarlyStop(metric="recall"), "held_out": points(4)},
        "'recall'",
    ),
    "early stop on nothing": (
        {"early_stop": EarlyStop(), "held_out": TensorDataset(torch.zeros(0, 4), torch.zeros(0))},
        "early stop needs held-out data",
    ),
    "metric": ({"loss": lambda o, t: o.sum(1), "held_out": points(4)}, "give metrics="),
    "no loss": ({"loss": None}, "exactly one of loss and objective"),
    "physical batch": (
        {"physical_batch": 0},
        "physical_batch must be a whole number of at least 1",
    ),
    "count": ({"release_n": True, "n_public": None}, "release_n needs n_public"),
    "learning rate": ({"lr": 1e38}, "at most 1e\\+06"),
    "two learning rates": (
        {"lr": 0.1, "optimizer": lambda p: torch.optim.SGD(p, lr=0.2)},
        "lr is of a named optimizer",
    ),
    "no device": ({"device": "meta"}, "device 'meta' cannot be used"),
    "sgd with a budget": ({"method": "sgd", "epsilon": 1.0}, "epsilon has no effect on sgd"),
    "held-out NaN": (
        {"held_out": TensorDataset(torch.full((3, 4), torch.nan), torch.zeros(3).long())},
        "held-out inputs and targets must be numbers",
    ),
    "resume what": ({"resume": True}, "nothing to resume"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    settings, message = CASES[case]
    with pytest.raises(InputError, match=message) as refusal:
        fit(tmp_path / "run", MODEL, **settings)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


class Couples(nn.Module):
    """Keeps a running mean of what it sees, as batch normalisation does."""

    def __init__(self, write: Callable[[Couples, Tensor], None]) -> None:
        super().__init__()
        self.out, self._write = nn.Linear(4, 2), write
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.begun = False

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self._write(self, rows)
        return self.out(rows)


def _in_place(module: Couples, rows: Tensor) -> None:
    module.mean.lerp_(rows.mean(0), 0.1)


def _anew(module: Couples, rows: Tensor) -> None:
    module.mean = rows.mean(0)


def _same_again(module: Couples, rows: Tensor) -> None:
    module.mean = module.mean.clone()


def _past_versions(module: Couples, rows: Tensor) -> None:
    module.mean.data.lerp_(rows.mean(0), 0.1)


def _to_what_is_frozen(module: Couples, rows: Tensor) -> None:
    module.frozen.lerp_(rows.mean(0), 0.1)


def _to_what_is_frozen_past_versions(module: Couples, rows: Tensor) -> None:
    module.frozen.data.lerp_(rows.mean(0), 0.1)


def _to_what_is_trained(module: Couples, rows: Tensor) -> None:
    """From the first batch, as activation normalisation begins."""
    if not module.begun:
        module.out.bias.data.copy_(-rows.mean(0)[:2])
        module.begun = True


WRITERS = {
    _in_place: "mean",
    _anew: "mean",
    _past_versions: "mean",
    _to_what_is_frozen: "frozen",
    _to_what_is_frozen_past_versions: "frozen",
    _to_what_is_trained: "out.bias",
}


@pytest.mark.parametrize("write", WRITERS)
def test_a_model_that_writes_to_what_it_is_released_with(tmp_path: Path, write: Any) -> None:
    with pytest.raises(CouplingError, match=f"wrote to '{WRITERS[write]}'"):
        fit(tmp_path / "run", Couples(write))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_in_a_pass_over_all_records(tmp_path: Path, write: Any) -> None:
    """The adaptive method begins an epoch with one."""
    with pytest.raises(CouplingError, match=f"wrote to '{WRITERS[write]}'"):
        fit(tmp_path / "run", Couples(write), method="dpis-adaptive")


def test_a_frozen_table_that_shortens_its_rows_is_refused(tmp_path: Path) -> None:
    table = nn.Embedding.from_pretrained(torch.ones(9, 4), freeze=True, max_norm=0.5)
    with pytest.raises(CouplingError, match="max_norm"):
        fit(tmp_path / "run", nn.Sequential(linear(), table))


def test_buffers_that_stay_are_released_as_they_are(tmp_path: Path) -> None:
    model = Couples(_same_again)
    model.mean += 3.0
    found = weights(fit(tmp_path / "run", model).folder)
    assert torch.equal(found["mean"], torch.full((4,), 3.0))


def test_buffers_and_frozen_parameters_of_any_kind_may_stay(tmp_path: Path) -> None:
    model = linear()
    model.register_buffer("neighbours", torch.eye(3).to_sparse(), persistent=False)
    model.register_buffer("waves", torch.ones(2, dtype=torch.complex64), persistent=False)
    model.register_parameter("off", nn.Parameter(torch.tensor(torch.nan), requires_grad=False))
    fit(tmp_path / "run", model)


def test_batch_normalisation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CouplingError, match="statistics of the whole batch"):
        fit(tmp_path / "run", nn.Sequential(nn.BatchNorm1d(4), linear()))
    assert not (tmp_path / "run").exists()


def test_a_label_out_of_range_leaves_nothing(tmp_path: Path) -> None:
    inputs, target = points().tensors
    with pytest.raises((IndexError, RuntimeError)):
        fit(tmp_path / "run", dataset=TensorDataset(inputs, target + 7))
    assert not (tmp_path / "run").exists()


def test_a_held_out_set_of_another_form(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="held-out batches must be"):
        fit(tmp_path / "run", held_out=[{"x": torch.zeros(4), "y": 0}])


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="not empty"):
        fit(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_unfinished_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.secret").write_text("")
    with pytest.raises(InputError, match="holds an unfinished run"):
        fit(tmp_path)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="cannot use"):
        fit(tmp_path / "run")


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert fit(tmp_path).folder == tmp_path
