"""Several processes are refused, wrapped or not: each would draw, noise and claim by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import dpis
from dpis.errors import InputError

from .loops import data, private

RANK = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dpis import PrivacyEngine
from dpis.errors import InputError
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.zeros(16).long()), batch_size=4)
try:
    PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, n_public=16)
except InputError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_bare_module_in_a_process_group_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "group")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all("one process is required, found 2" in text for text in told)


def test_an_environment_of_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"not connected.*Nothing was released"):
        private()
    folder = tmp_path / "run"
    with pytest.raises(InputError, match="init_process_group"):
        dpis.train(
            nn.Linear(4, 3).double(), data(), nn.CrossEntropyLoss(), n_public=40, batch_size=8,
            delta=1e-3, epochs=1, out=folder,
        )  # fmt: skip
    assert not folder.exists()


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_process_is_one_process(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert private().train(steps=1).weights.isfinite().all()
