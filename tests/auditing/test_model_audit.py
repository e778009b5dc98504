"""A model of one's own under attack, through the real per-example gradients."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from dpis.app import main
from dpis.auditing import audit_model, model_audit
from dpis.auditing.model_audit import WorstCase
from dpis.errors import CouplingError, InputError
from dpis.mechanism import Method
from dpis.mechanism import mechanism as module
from dpis.randomness import Key
from tests.auditing.attacks import config, unclipped

TINY = config(n_public=8, batch_size=8, delta=0.05, clip_norm=0.5)  # one step at π = 1


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    inputs[0] *= 20
    return inputs, torch.arange(8) % 2


def case(model: nn.Module | None = None) -> WorstCase:
    """No weights to begin with: then every record has a gradient, the canary a large one."""
    model = nn.Linear(4, 2) if model is None else model
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return WorstCase(model, batch(), nn.CrossEntropyLoss())


def test_a_right_model_survives() -> None:
    tried = case()
    before = [p.clone() for p in tried.model.parameters()]
    found = audit_model(TINY, tried, runs=100, key=Key.from_seed(1))
    assert not found.refuted
    assert "moved a sum by 1 at most" in found.notes[0]
    assert all(torch.equal(a, b) for a, b in zip(before, tried.model.parameters(), strict=True))


def test_a_missing_clip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "contribution_weights", unclipped)
    found = audit_model(TINY, case(), runs=100, key=Key.from_seed(1))
    assert found.refuted
    assert "by this alone the claim is false" in found.notes[0]


@pytest.mark.statistical
def test_masks_of_a_public_seed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary stands first, so its presence shifts everybody's masks; who knows the seed knows the shift."""
    dropping = case(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)))
    assert not audit_model(TINY, dropping, runs=300, key=Key.from_seed(1)).refuted

    @contextlib.contextmanager
    def public(stream):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield

    monkeypatch.setattr(model_audit, "seeded_torch", public)
    assert audit_model(TINY, dropping, runs=300, key=Key.from_seed(1)).refuted


class Centred(nn.Module):
    """Every record sees the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs - inputs.mean(0))


def test_a_model_that_mixes_records_is_refused_before_it_leaks() -> None:
    torch.manual_seed(1)
    with pytest.raises(CouplingError):
        audit_model(TINY, WorstCase(Centred(), batch(), nn.CrossEntropyLoss()), runs=10)


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(InputError, match="another method"):
        audit_model(config(method=Method.DPIS_ADAPTIVE, rate_cap=1.0), case(), runs=10)
    one = WorstCase(nn.Linear(4, 2), tuple(t[:1] for t in batch()), nn.CrossEntropyLoss())
    with pytest.raises(InputError, match="two records"):
        audit_model(TINY, one, runs=10)


# ── from the command line ────────────────────────────────────────────────────────────────────────────


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "own_case.py").write_text(
        "import torch\n"
        "def made():\n"
        "    return torch.nn.Linear(4, 2), (torch.ones(8, 4), torch.arange(8) % 2), torch.nn.CrossEntropyLoss()\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = ["--n-public", "8", "--batch-size", "8", "--epochs", "1", "--delta", "0.05"]
    assert main(["audit", "--case", "own_case:made", "--runs", "100", *plan]) == 0
    assert "survives this attack" in capsys.readouterr().out
    assert main(["audit", "--mechanism", "--runs", "2000", "--json", *plan]) == 0
    assert '"attack": "mechanism"' in capsys.readouterr().out
    assert main(["audit", "--mechanism"]) == 2
    assert "--n-public" in capsys.readouterr().err
    assert main(["audit", "--mechanism", "--lr", "1", *plan]) == 2
    assert "leave out --lr" in capsys.readouterr().err
    assert main(["audit", "--case", "own_case:none"]) == 2
    monkeypatch.setattr(module, "contribution_weights", unclipped)
    assert main(["audit", "--mechanism", "--runs", "4000", *plan]) == 1
    assert "does NOT survive" in capsys.readouterr().out
