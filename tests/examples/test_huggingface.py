"""Hugging Face's Trainer with private steps: nothing unaccounted, and what breaks the guarantee is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dpis.errors import InputError
from dpis.integrations import Privacy
from dpis.integrations.row_losses import classification_losses
from tests.examples.loops import PRIVACY, example, quiet

pytestmark = pytest.mark.slow  # for the time that importing transformers takes


def hugging_face(folder: Path, privacy: Privacy = PRIVACY, **settings: Any) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from dpis.integrations.huggingface import PrivateTrainer

    module = example("huggingface_trainer")
    parts = settings.pop("max_physical_batch_size", None)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 16,
            "learning_rate": 1e-2,
            "logging_steps": 4,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **settings,
        }
    )
    return PrivateTrainer(
        module.classifier(),
        arguments,
        train_dataset=module.Sentences(64, seed=1),
        eval_dataset=module.Sentences(20, seed=2),
        privacy=privacy,
        max_physical_batch_size=parts,
    )


@quiet
def test_hugging_face_steps_are_accounted(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    output = trainer.train()
    assert len(trainer.privacy_engine.accountant) == trainer.state.global_step == 8
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    logged = [key for entry in trainer.state.log_history for key in entry]
    assert "epsilon" in logged
    assert set(logged) <= {"learning_rate", "epoch", "step", "epsilon"}
    assert set(output.metrics) <= {"epoch", "epsilon"}
    assert trainer.state.total_flos == 0
    assert trainer.state.num_input_tokens_seen == 0
    assert "eval_loss" in trainer.evaluate()


@quiet
def test_hugging_face_parts_of_batches_add_up(tmp_path: Path) -> None:
    whole, parts = hugging_face(tmp_path), hugging_face(tmp_path, max_physical_batch_size=5)
    for trainer in (whole, parts):
        trainer.train()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@quiet
def test_hugging_face_empty_batches_are_steps(tmp_path: Path) -> None:
    privacy = Privacy(max_grad_norm=1.0, noise_multiplier=1.0, n_public=64, seed=0)
    trainer = hugging_face(tmp_path, privacy, per_device_train_batch_size=1, max_steps=20)
    trainer.train()
    assert len(trainer.privacy_engine.accountant) == 20
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@quiet
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"dataloader_drop_last": True},
        {"label_smoothing_factor": 0.1},
        {"include_num_input_tokens_seen": True},
        {"include_num_input_tokens_seen": "all"},
        {"include_num_input_tokens_seen": "non_padding"},
    ],
    ids=lambda settings: "-".join(map(str, *settings.items())),
)
def test_hugging_face_settings_that_break_the_guarantee_are_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="not supported in a private run"):
        hugging_face(tmp_path, **settings)


@quiet
def test_hugging_face_settings_that_change_before_training_are_refused_too(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path)
    trainer.args.include_num_input_tokens_seen = "all"
    with pytest.raises(InputError, match="how many records were drawn"):
        trainer.train()


@quiet
def test_hugging_face_neither_resumes_nor_trains_twice(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path)
    with pytest.raises(InputError, match="resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    trainer.train()
    with pytest.raises(InputError, match="spent its plan"):
        trainer.train()


@quiet
def test_a_loss_over_the_batch_is_refused(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path)
    trainer._row_losses = lambda outputs, labels: classification_losses(outputs, labels).mean()
    with pytest.raises(InputError, match="couples records"):
        trainer.train()


@quiet
def test_the_hugging_face_example_runs() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer = example("huggingface_trainer").main(epochs=1, records=1000)
    assert 0 < trainer.privacy_engine.get_epsilon(1e-5) <= 8


def test_integrations_are_read_without_the_packages_of_others() -> None:
    """Bare pytest imports what is beside the two trainers, and must stay quick."""
    asked = "import sys, dpis.integrations.row_losses as _; print({'transformers', 'lightning'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
