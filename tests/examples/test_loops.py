"""Trainers of others, with private steps: they learn nothing that was not accounted, and refuse what breaks it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpis.errors import InputError
from dpis.integrations import Privacy
from dpis.integrations.huggingface import PRIVATE_VALUES, classification_losses

EXAMPLES = Path(__file__).parents[2] / "examples"
PRIVACY = Privacy(max_grad_norm=1.0, noise_multiplier=1.0, n_public=64, seed=0)

quiet = pytest.mark.filterwarnings("ignore")  # of the other packages


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_drop_in_loop_runs() -> None:
    epsilon, accuracy = example("dropin_loop").main(epochs=1, records=2000)
    assert 0 < epsilon <= 3
    assert accuracy > 0.1


def test_losses_of_batches_can_be_added_up() -> None:
    """``running += loss.detach()``, and a list of losses that is stacked: what every logging loop does."""
    from dpis import PrivacyEngine

    model: Any = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    model, optimizer, loader = PRIVACY.make_private(
        PrivacyEngine(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=16),
        1,
    )
    running, kept = torch.zeros(()), []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
        running += loss.detach()
    torch.testing.assert_close(torch.stack(kept).sum(), running)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.randn(3, 4), torch.tensor([0, 3, 1])),
        (torch.randn(3, 1), torch.randn(3)),
        (torch.randn(3, 4), torch.rand(3, 4)),
        (torch.randn(3, 5, 4), torch.tensor([[0, 1, 2, 3, -100]] * 3)),
    ],
    ids=["classes", "regression", "several classes", "tokens"],
)
def test_losses_are_of_single_rows(logits: torch.Tensor, labels: torch.Tensor) -> None:
    together = classification_losses({"logits": logits}, labels)
    alone = [
        classification_losses({"logits": logits[i : i + 1]}, labels[i : i + 1]) for i in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone))


# ── Lightning ────────────────────────────────────────────────────────────────────────────────────────


def fit(module: Any, privacy: Privacy = PRIVACY, model: str = "", **settings: Any) -> Any:
    import lightning

    from dpis.integrations.lightning import PrivacyCallback

    callback = PrivacyCallback(privacy, model=model)
    trainer = lightning.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "callbacks": [callback],
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            **settings,
        }
    )
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    trainer.fit(module, DataLoader(data, batch_size=16))
    return trainer, callback


def small_module(called: str = "self") -> Any:
    import lightning

    class Small(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            model = self if called == "self" else self.net
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Small()


@quiet
@pytest.mark.parametrize(("called", "model"), [("self", ""), ("net", "net")])
def test_lightning_steps_are_accounted(called: str, model: str) -> None:
    pytest.importorskip("lightning")
    module = small_module(called)
    before = module.net.weight.detach().clone()
    trainer, callback = fit(module, model=model)
    assert len(callback.engine.accountant) == trainer.global_step == 8
    assert not torch.equal(module.net.weight, before)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.125)
    assert trainer.callback_metrics["epsilon"] == pytest.approx(
        callback.engine.get_epsilon(1e-5), rel=1e-5
    )
    assert not {"forward", "training_step"} & {*vars(module), *vars(module.net)}


@quiet
def test_lightning_keeps_the_noise_of_a_hand_written_loop() -> None:
    """The same key, records and initial weights: the same weights after two epochs."""
    pytest.importorskip("lightning")
    from dpis import PrivacyEngine

    torch.manual_seed(0)
    module = small_module()
    net = nn.Linear(4, 2)
    net.load_state_dict(module.net.state_dict())
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
    private, optimizer, loader = PRIVACY.make_private(
        PrivacyEngine(), net, optimizer, DataLoader(data, batch_size=16), 2
    )
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * 0.5**epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(inputs), targets).backward()
            optimizer.step()

    import lightning

    from dpis.integrations.lightning import PrivacyCallback

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[PrivacyCallback(PRIVACY)], logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=16))
    torch.testing.assert_close(module.net.state_dict(), net.state_dict())


@quiet
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 1.0},
        {"precision": "bf16-mixed"},
        {"overfit_batches": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_lightning_settings_that_break_the_guarantee_are_refused(settings: dict[str, Any]) -> None:
    pytest.importorskip("lightning")
    with pytest.raises(InputError, match="not supported in a private run"):
        fit(small_module(), **settings)


@quiet
def test_lightning_training_past_the_model_is_refused() -> None:
    """``training_step`` calls ``self.net`` and nobody said so: nothing would be clipped."""
    pytest.importorskip("lightning")
    with pytest.raises(RuntimeError, match="past the private model"):
        fit(small_module("net"))


@quiet
@pytest.mark.slow
def test_the_lightning_example_runs() -> None:
    pytest.importorskip("lightning")
    trainer = example("lightning_loop").main(epochs=1, records=2000)
    assert 0 < trainer.callback_metrics["epsilon"] <= 3


# ── Hugging Face ─────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.slow
@quiet
def test_hugging_face_steps_are_accounted(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(trainer.privacy_engine.accountant) == trainer.state.global_step == 8
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    logged = [key for entry in trainer.state.log_history for key in entry]
    assert "epsilon" in logged
    assert not set(logged) & set(PRIVATE_VALUES)
    assert trainer.state.total_flos == 0
    assert "eval_loss" in trainer.evaluate()


@quiet
@pytest.mark.slow
def test_hugging_face_parts_of_batches_add_up(tmp_path: Path) -> None:
    whole, parts = hugging_face(tmp_path), hugging_face(tmp_path, max_physical_batch_size=5)
    for trainer in (whole, parts):
        trainer.train()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@quiet
@pytest.mark.slow
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
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_hugging_face_settings_that_break_the_guarantee_are_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="not supported in a private run"):
        hugging_face(tmp_path, **settings)


@quiet
@pytest.mark.slow
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
@pytest.mark.slow
def test_the_hugging_face_example_runs() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer = example("huggingface_trainer").main(epochs=1, records=1000)
    assert 0 < trainer.privacy_engine.get_epsilon(1e-5) <= 8
