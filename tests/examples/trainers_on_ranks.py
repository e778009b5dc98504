"""Scripts that launchers of others start: `python -m tests.examples.trainers_on_ranks WHICH FOLDER`.

Each rank leaves what it found in the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpis.dropin.trainer_settings import TrainerSettings
from dpis.group import current_group
from dpis.options import Privacy

PRIVACY = TrainerSettings(privacy=Privacy(n_public=64), noise_multiplier=1.0, seed=0)


def found(engine: Any, model: nn.Module, steps: int) -> dict[str, Any]:
    """What every rank must agree on."""
    weights = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    return {
        "weights": weights.tolist(),
        "batch": engine.accountant.plans[-1].workload.batch_size,
        "events": len(engine.accountant),
        "steps": steps,
        "ranks": current_group().size,
    }


def lightning(folder: Path) -> dict[str, Any]:
    from tests.examples.test_lightning import fit, small_module

    torch.manual_seed(0)
    module = small_module()
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    trainer, callback = fit(
        module, PRIVACY, strategy="ddp" if devices > 1 else "auto", devices=devices
    )
    return found(callback.engine, module, trainer.global_step)


def lightning_raises(folder: Path) -> dict[str, Any]:
    from tests.examples.test_lightning import fit, small_module

    torch.manual_seed(0)  # the data are made here
    module = small_module()
    real = type(module).training_step

    def fails_later(self: Any, batch: Any, index: int) -> torch.Tensor:
        if index == 1 and os.environ["RANK"] == "1":
            raise ArithmeticError("for a try")
        return real(self, batch, index)

    type(module).training_step = fails_later
    fit(module, PRIVACY, strategy="ddp", devices=2)
    return {}


def hugging_face(folder: Path) -> dict[str, Any]:
    from tests.examples.test_huggingface import hugging_face

    trainer = hugging_face(folder / "trainer", PRIVACY, save_strategy="epoch")
    trainer.train()
    return found(trainer.privacy_engine, trainer.model, trainer.state.global_step)


def accelerate(folder: Path) -> dict[str, Any]:
    """Ranks run the model a different number of times: nothing around it may wait for the others there."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    from dpis import BatchMemoryManager, PrivacyEngine

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    model = nn.Linear(4, 2).to(accelerator.device)
    model.register_buffer("scale", torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, part = PrivacyEngine(), 2 + 2 * accelerator.process_index
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0, max_grad_norm=1.0, n_public=64, seed=0,
    )  # fmt: skip
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=made[2], max_physical_batch_size=part, optimizer=made[1]
        ) as parts:
            private, optimizer, loader = accelerator.prepare(*made[:2], parts)
            for inputs, targets in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(private(inputs), targets))
                optimizer.step()
    return found(engine, model, 8)


SCRIPTS = {one.__name__: one for one in (lightning, lightning_raises, hugging_face, accelerate)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    which, folder = sys.argv[1], Path(sys.argv[2])
    told = SCRIPTS[which](folder)
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))
    os._exit(
        0
    )  # what was trained is tried here: threads of gloo may abort the end of an interpreter
