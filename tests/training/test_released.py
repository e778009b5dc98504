"""What leaves: a model for plain PyTorch, a claim, public numbers; and what stays secret."""

from __future__ import annotations

import io
import itertools
import json
import os
import stat
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from dpis.accounting import Adjacency
from dpis.errors import PublicCountWarning
from dpis.randomness import Key
from dpis.runs.checkpoint import NOTICE
from dpis.training import trainer
from dpis.training.model_file import architecture_of
from dpis.training.progress import ProgressBar
from dpis.training.result import summary_of
from tests.training.toys import (
    RELEASED,
    Each,
    fit,
    ledger,
    mlp,
    points,
    released,
    weights,
)

# ── the count of records ─────────────────────────────────────────────────────────────────────────────


def test_a_count_that_was_not_given_is_public_and_that_is_said(tmp_path: Path) -> None:
    with pytest.warns(PublicCountWarning, match="how many there are is not"):
        result = fit(tmp_path / "run", n_public=None)
    assert ledger(result.folder).header.adjacency is Adjacency.ZERO_OUT
    assert result.summary.claim["adjacency"] == "zero-out"
    assert any("number of records is treated as public" in note for note in result.summary.notes)


def test_a_count_that_was_given_is_protected(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(tmp_path / "run")
    assert ledger(result.folder).header.adjacency is Adjacency.ADD_REMOVE


def _public(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The ledger but for its end, and the summary but for what training gave."""
    lines = (folder / "ledger.jsonl").read_bytes().splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["model_sha256"]
    return b"\n".join(lines[:-1]), summary


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpis", "dp-sgd"])
@pytest.mark.parametrize("n", [0, 65, 300])
def test_nothing_shows_how_many_records_there_are(tmp_path: Path, method: str, n: int) -> None:
    declared = fit(tmp_path / "declared", method=method)
    other = fit(tmp_path / "other", dataset=points(n), method=method)
    assert _public(declared.folder) == _public(other.folder)


def test_the_adaptive_method_takes_any_number_of_records(tmp_path: Path) -> None:
    for n in (0, 300):
        result = fit(tmp_path / str(n), dataset=points(n), method="dpis-adaptive")
        assert len(ledger(result.folder).entries) == 2 * (1 + 4)


def test_nobody_is_drawn_from_an_empty_data_set(tmp_path: Path) -> None:
    """Every step is empty: pure noise, one event each, and the optimizer steps."""
    model, seen = mlp(), []
    each = Each(lambda _: seen.append(model[0].weight.detach().clone()))
    data = TensorDataset(torch.zeros(0, 4), torch.zeros(0).long())
    result = fit(tmp_path / "run", model, dataset=data, progress=each, diagnostics=True)
    assert result.diagnostics.gradient_evaluations == 0
    assert len(ledger(result.folder).entries) == len(seen) == 8
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────

KEYS = {
    "method",
    "claim",
    "not_for_release",
    "metrics",
    "notes",
    "config",
    "recipe",
    "history",
    "stopped_early",
    "model_sha256",
    "versions",
}
EPOCH = {
    "epoch",
    "kappa",
    "clip_norm",
    "grad_noise_multiplier",
    "noise_multiplier",
    "sampling_rate",
    "held_out_accuracy",
}


def law_the_summary_holds_public_values_alone(folder: Path) -> None:
    result = fit(folder, held_out=points(9))
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary.keys() == KEYS  # a key that is added here must be public, and no time
    assert all(epoch.keys() == EPOCH for epoch in summary["history"])
    assert summary["not_for_release"] == ["seeded"]
    text = (result.folder / "summary.json").read_text()
    for private in ("seconds", "time", "evaluations", "candidates", "loss", "secret", "norms"):
        assert private not in text, private


def test_the_summary_holds_public_values_alone(tmp_path: Path) -> None:
    law_the_summary_holds_public_values_alone(tmp_path / "run")


def test_a_private_number_in_the_summary_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 20: how many gradients were computed tells how many records were drawn."""
    tells = lambda run, **given: replace(summary_of(run, **given), gradient_evaluations=17)  # noqa: E731
    monkeypatch.setattr(trainer, "summary_of", tells)
    with pytest.raises(AssertionError):
        law_the_summary_holds_public_values_alone(tmp_path / "run")


def test_private_values_are_shown_under_diagnostics_only(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain")
    assert plain.diagnostics is None
    shown = fit(tmp_path / "shown", diagnostics=True)
    assert 0 < shown.diagnostics.gradient_evaluations <= 8 * 64
    summary = json.loads((shown.folder / "summary.json").read_text())
    assert summary["gradient_evaluations"] == shown.diagnostics.gradient_evaluations
    assert summary["not_for_release"] == ["seeded", "diagnostics"]
    assert ledger(shown.folder).header.diagnostics


def test_a_fresh_key_is_for_release(tmp_path: Path) -> None:
    one, other = (fit(tmp_path / name, seed=None) for name in "ab")
    assert one.summary.not_for_release == ()
    assert not ledger(one.folder).header.seeded
    assert not torch.equal(weights(one.folder)["weight"], weights(other.folder)["weight"])


# ── the secret checkpoint ────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_is_secret_and_deleted(tmp_path: Path) -> None:
    modes, files = [], []

    def look(_: object) -> None:
        modes.append(stat.S_IMODE(os.stat(tmp_path / "run" / "checkpoint.secret").st_mode))
        files.append(sorted(path.name for path in (tmp_path / "run").iterdir()))

    fit(tmp_path / "run", progress=Each(look))
    assert set(modes) == {0o600}
    assert (
        files == [["checkpoint.secret", "ledger.jsonl"]] * 8
    )  # and nothing is released before the end
    assert set(released(tmp_path / "run")) == set(RELEASED)


def test_a_checkpoint_is_kept_on_request(tmp_path: Path) -> None:
    fit(tmp_path / "run", keep_checkpoint=True)
    assert NOTICE.encode() in (tmp_path / "run" / "checkpoint.secret").read_bytes()[:600]
    assert stat.S_IMODE(os.stat(tmp_path / "run" / "checkpoint.secret").st_mode) == 0o600
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    fit(tmp_path / "run", resume=True, keep_checkpoint=True)  # a finished run ends as it did
    for name in RELEASED:
        assert (tmp_path / "run" / name).read_bytes() == before[name]


def test_the_key_is_in_no_released_file(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    secret = Key.from_seed(7).secret
    for contents in released(tmp_path / "run").values():
        assert secret not in contents
        assert secret.hex().encode() not in contents


def test_released_tensors_are_the_models_own(tmp_path: Path) -> None:
    model = mlp()
    fit(tmp_path / "run", model)
    found = weights(tmp_path / "run")
    assert {n: v.shape for n, v in found.items()} == {
        n: v.shape for n, v in model.state_dict().items()
    }


def test_released_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        fit(tmp_path / "run")
    finally:
        os.umask(before)
    for path in (tmp_path / "run").iterdir():
        if path.name != "ledger.jsonl":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ── the model in plain PyTorch ───────────────────────────────────────────────────────────────────────

PLAIN = """
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dpis":
            raise ImportError("dpis is not here")
sys.meta_path.insert(0, Guard())
sys.path.insert(0, sys.argv[1])
import torch
from model import load, preprocess
inputs = torch.load(sys.argv[2])
torch.save(load(sys.argv[1] + "/model.safetensors")(preprocess(inputs)), sys.argv[3])
assert not any(name.split(".")[0] == "dpis" for name in sys.modules)
"""


@pytest.mark.slow
def test_a_model_runs_without_this_package(tmp_path: Path) -> None:
    model = mlp(dropout=0.3)
    result = fit(tmp_path / "run", model)
    inputs = points(20, seed=3).tensors[0]
    torch.save(inputs, tmp_path / "inputs.pt")
    files = [str(result.folder), str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")]
    subprocess.run([sys.executable, "-I", "-c", PLAIN, *files], check=True, timeout=120)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "outputs.pt"), model.eval()(inputs))


def _hooked() -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return layer


RELU = nn.ReLU()


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (nn.Sequential(nn.Linear(4, 8), RELU, nn.Linear(8, 8), RELU), True),
        (nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.GroupNorm(1, 2), nn.Flatten()), True),
        (nn.Sequential(nn.AvgPool2d(2), nn.Flatten()), True),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), False),  # which its repr does not show
        (nn.Linear(4, 2).double(), False),
        (_hooked(), False),
        (nn.Sequential(nn.Linear(4, 2)).append(mlp()), True),
    ],
)
def test_an_architecture_is_written_down_only_if_it_builds_the_same(
    module: nn.Module, known: bool
) -> None:
    assert (architecture_of(module) is not None) is known


def test_a_model_of_ones_own_has_no_loader(tmp_path: Path) -> None:
    class Own(nn.Linear):
        pass

    result = fit(tmp_path / "run", Own(4, 2))
    assert "model.py" not in released(result.folder)


def test_any_memory_format_can_be_released(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 2))
    model.to(memory_format=torch.channels_last)
    inputs, target = points().tensors
    result = fit(
        tmp_path / "run",
        model,
        dataset=TensorDataset(inputs.reshape(-1, 1, 2, 2).repeat(1, 2, 1, 1), target),
    )
    assert torch.equal(weights(result.folder)["0.weight"], model[0].weight.detach())


# ── the bar ──────────────────────────────────────────────────────────────────────────────────────────


def _shown(tmp_path: Path, terminal: bool, data: TensorDataset) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    fit(tmp_path, dataset=data, held_out=points(8, seed=5), progress=ProgressBar(console), lr=1e-9)
    return text.getvalue()


def test_the_bar_shows_public_values(tmp_path: Path) -> None:
    text = _shown(tmp_path / "run", True, points())
    for word in ("epoch 2/2", "step 8/8", "noise", "kappa", "budget 100 %", "held-out accuracy"):
        assert word in text


def test_the_lines_show_nothing_private(tmp_path: Path) -> None:
    """With a learning rate of almost nothing, other data gives the same lines."""
    lines = _shown(tmp_path / "a", False, points())
    assert lines.count("\n") == 2
    assert lines == _shown(tmp_path / "b", False, points(200, seed=8))
