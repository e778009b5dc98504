"""Hugging Face's Trainer with private steps: nothing unaccounted, and what breaks the guarantee is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpis.dropin.row_losses import classification_losses
from dpis.dropin.trainer_settings import TrainerSettings
from dpis.errors import InputError
from dpis.mechanism import Mechanism
from dpis.options import Privacy
from tests.examples.loops import PRIVACY, example, quiet

pytestmark = pytest.mark.slow  # for the time that importing transformers takes


def hugging_face(folder: Path, private: TrainerSettings = PRIVACY, **settings: Any) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from dpis.dropin.huggingface import PrivateTrainer

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
        privacy=private.privacy,
        noise_multiplier=private.noise_multiplier,
        seed=private.seed,
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
def test_hugging_face_files_do_not_tell_who_was_drawn(tmp_path: Path) -> None:
    """``rng_state.pth`` told how many, from how far a public seed had moved; every other file is looked at, too."""
    saved = []
    for seed in (1, 2):
        privacy = TrainerSettings(privacy=Privacy(n_public=64), noise_multiplier=1.0, seed=seed)
        settings = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
        trainer = hugging_face(tmp_path / str(seed), privacy, **settings)
        for layer in trainer.model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.5
        drawn, release = list[int](), Mechanism.release_sum

        def counted(mechanism: Any, total: Any, drawn: Any = drawn, release: Any = release) -> Any:
            drawn.append(total.records)
            return release(mechanism, total)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mechanism, "release_sum", counted)
            trainer.train()
        own = tmp_path / str(seed)
        files = {path.relative_to(own): path for path in own.rglob("*") if path.is_file()}
        saved.append((drawn, files))
    (one_drawn, one), (other_drawn, other) = saved
    assert one_drawn != other_drawn
    assert one.keys() == other.keys()
    noisy = {"model.safetensors", "optimizer.pt"}  # made of releases alone
    public = [name for name in one if name.name not in noisy and name.name != "training_args.bin"]
    assert {"rng_state.pth", "trainer_state.json"} <= {name.name for name in public}
    for name in public:
        assert contents(one[name]) == contents(other[name]), name


def contents(path: Path) -> str:
    """Of a file, so that it can be compared; numbers that follow from the privacy budget are the same here."""
    if path.suffix in (".pth", ".pt"):
        torch.set_printoptions(profile="full")
        try:
            with np.printoptions(threshold=sys.maxsize):
                return repr(torch.load(path, weights_only=False))
        finally:
            torch.set_printoptions(profile="default")
    return path.read_bytes().decode(errors="replace").replace(f"/{path.parents[1].name}/", "/")


@quiet
@pytest.mark.parametrize(
    ("settings", "epochs", "steps"),
    [({"num_train_epochs": 1.5}, 2, 12), ({"max_steps": 20}, 3, 20), ({"max_steps": 8}, 1, 8)],
    ids=["a half", "steps of three epochs", "steps of one"],
)
def test_hugging_face_plans_for_all_that_it_takes(
    settings: dict[str, Any], epochs: int, steps: int, tmp_path: Path
) -> None:
    """By the public number of records, which is not that of the data set."""
    privacy = TrainerSettings(privacy=Privacy(epsilon=2.0, delta=1e-3, n_public=128), seed=0)
    trainer = hugging_face(tmp_path, privacy, **settings)
    trainer.train()
    engine = trainer.privacy_engine
    assert engine.accountant.plans[-1].config.epochs == epochs
    assert len(engine.accountant) == steps
    logged = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert logged[-1] == pytest.approx(engine.get_epsilon(1e-3))
    assert logged[-1] <= 2.0


@quiet
def test_hugging_face_parts_of_batches_add_up(tmp_path: Path) -> None:
    whole, parts = hugging_face(tmp_path), hugging_face(tmp_path, max_physical_batch_size=5)
    for trainer in (whole, parts):
        trainer.train()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@quiet
def test_hugging_face_empty_batches_are_steps(tmp_path: Path) -> None:
    privacy = TrainerSettings(privacy=Privacy(n_public=64), noise_multiplier=1.0, seed=0)
    trainer = hugging_face(tmp_path, privacy, per_device_train_batch_size=1, max_steps=20)
    trainer.train()
    assert len(trainer.privacy_engine.accountant) == 20
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@quiet
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
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
    asked = "import sys, dpis.dropin.row_losses as _; print({'transformers', 'lightning'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
