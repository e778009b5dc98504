"""Lightning with private steps: it learns nothing that was not accounted, and refuses what breaks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpis.dropin.trainer_settings import TrainerSettings
from dpis.errors import InputError, MisuseError
from dpis.options import Privacy
from tests.examples.loops import PRIVACY, example, quiet

pytestmark = pytest.mark.slow  # for the time that importing Lightning takes

TARGET = TrainerSettings(privacy=Privacy(epsilon=2.0, delta=1e-3, n_public=64), seed=0)


def callback_of(private: TrainerSettings, **more: Any) -> Any:
    from dpis.dropin.lightning import PrivacyCallback

    noise, seed = private.noise_multiplier, private.seed
    return PrivacyCallback(private.privacy, noise_multiplier=noise, seed=seed, **more)


def fit(module: Any, private: TrainerSettings = PRIVACY, model: str = "", **settings: Any) -> Any:
    import lightning

    callback = callback_of(private, model=model)
    checkpoint = settings.pop("ckpt_path", None)
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
    trainer.fit(module, DataLoader(data, batch_size=16), ckpt_path=checkpoint)
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

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[callback_of(PRIVACY)], logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=16))
    torch.testing.assert_close(module.net.state_dict(), net.state_dict())


@quiet
def test_lightning_in_bfloat16() -> None:
    """Forward passes run under autocast, and weights stay close to those of float32."""
    pytest.importorskip("lightning")
    kinds, weights = set(), []
    for precision in ("32-true", "bf16-mixed"):
        torch.manual_seed(0)
        module = small_module()
        module.net.register_forward_hook(lambda _, given, out: kinds.add(out.dtype))
        _, callback = fit(module, precision=precision)
        assert len(callback.engine.accountant) == 8
        weights.append(module.net.weight.detach())
    assert kinds == {torch.float32, torch.bfloat16}
    torch.testing.assert_close(*weights, rtol=0.05, atol=0.01)
    assert not torch.equal(*weights)


@quiet
@pytest.mark.parametrize("records", [11, 64])
def test_lightning_in_bfloat16_one_record_moves_the_sum_by_its_own(
    records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    import lightning

    from dpis.mechanism import noisy_update

    real, seen = noisy_update.add_noise, list[torch.Tensor]()

    def add_noise(values: dict[str, torch.Tensor], *given: Any) -> dict[str, torch.Tensor]:
        seen.append(torch.cat([value.double().flatten() for value in values.values()]))
        return real(values, *given)

    monkeypatch.setattr(noisy_update, "add_noise", add_noise)
    torch.manual_seed(1)
    inputs, targets = torch.randn(records, 4), torch.randint(2, (records,))
    privacy = Privacy(method="dp-sgd", n_public=records, clip_norm=0.1)
    for rows in (slice(None), slice(1, None), slice(1)):
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, precision="bf16-mixed",
            enable_model_summary=False, enable_progress_bar=False,
            callbacks=[callback_of(TrainerSettings(privacy=privacy, noise_multiplier=1.0, seed=0))],
        )  # fmt: skip
        data = TensorDataset(inputs[rows], targets[rows])
        trainer.fit(small_module(), DataLoader(data, batch_size=records))
    everyone, without, alone = seen
    assert 0.9 < alone.norm() <= 1.001
    torch.testing.assert_close(everyone - without, alone, rtol=1e-3, atol=1e-4)


@quiet
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 1.0},
        {"precision": "bf16-true"},
        {"overfit_batches": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_lightning_settings_that_break_the_guarantee_are_refused(settings: dict[str, Any]) -> None:
    pytest.importorskip("lightning")
    with pytest.raises(InputError, match="not supported in a private run"):
        fit(small_module(), **settings)


@quiet
def test_lightning_modules_that_step_by_themselves_are_refused() -> None:
    pytest.importorskip("lightning")
    module = small_module()
    module.automatic_optimization = False
    with pytest.raises(InputError, match="manual optimisation is not supported"):
        fit(module)


@quiet
def test_lightning_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """It knows nothing of what was spent: epsilon would begin at 0."""
    pytest.importorskip("lightning")
    trainer, _ = fit(small_module(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    with pytest.raises(InputError, match="ckpt_path is not supported"):
        fit(small_module(), ckpt_path=tmp_path / "kept.ckpt")


@quiet
def test_lightning_needs_a_horizon_for_a_target() -> None:
    pytest.importorskip("lightning")
    with pytest.raises(InputError, match="max_epochs"):
        fit(small_module(), TARGET, max_epochs=-1, max_steps=3)


@quiet
def test_lightning_plans_for_its_epochs_and_logs_epsilon_at_the_planned_delta() -> None:
    pytest.importorskip("lightning")
    trainer, callback = fit(small_module(), TARGET, max_epochs=3)
    config = callback.engine.accountant.plans[-1].config
    assert (config.epochs, config.epsilon, config.delta) == (3, 2.0, 1e-3)
    spent = callback.engine.get_epsilon(1e-3)
    assert trainer.callback_metrics["epsilon"] == pytest.approx(spent, rel=1e-5)
    assert 1.9 < spent <= 2.0


@quiet
def test_lightning_leaves_the_module_as_it_was_after_an_error() -> None:
    pytest.importorskip("lightning")
    module = small_module()
    real = type(module).training_step

    def fails_later(self: Any, batch: Any, index: int) -> torch.Tensor:
        if index == 2:
            raise ArithmeticError("for a try")
        return real(self, batch, index)

    type(module).training_step = fails_later
    with pytest.raises(ArithmeticError, match="for a try"):
        fit(module)
    assert not {"forward", "training_step"} & {*vars(module), *vars(module.net)}


@quiet
def test_lightning_training_past_the_model_is_refused() -> None:
    """``training_step`` calls ``self.net`` and nobody said so: nothing would be clipped."""
    pytest.importorskip("lightning")
    with pytest.raises(RuntimeError, match="past the private model"):
        fit(small_module("net"))


@quiet
def test_the_lightning_example_runs() -> None:
    pytest.importorskip("lightning")
    trainer = example("lightning_loop").main(epochs=1, records=2000)
    assert 0 < trainer.callback_metrics["epsilon"] <= 3


@quiet
def test_lightning_files_do_not_tell_who_was_drawn(tmp_path: Path) -> None:
    """A checkpoint of one run is that of another, but for what was made of releases."""
    saved = []
    for seed in (1, 2):
        torch.manual_seed(0)
        privacy = TrainerSettings(privacy=Privacy(n_public=64), noise_multiplier=1.0, seed=seed)
        module = small_module()
        module.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        trainer, _ = fit(module, privacy)
        saved.append(torch.get_rng_state())
        trainer.save_checkpoint(tmp_path / f"{seed}.ckpt")
        saved.append(torch.load(tmp_path / f"{seed}.ckpt", weights_only=False))
    one_state, one, other_state, other = saved
    assert torch.equal(one_state, other_state)
    noisy = {"state_dict", "optimizer_states"}
    assert one.keys() == other.keys()
    for name in one.keys() - noisy:
        assert repr(one[name]) == repr(other[name]), name


@quiet
def test_make_private_inside_configure_optimizers() -> None:
    """As people have it from Opacus: the network inside is made private, and the loader with it."""
    lightning = pytest.importorskip("lightning")
    from dpis import PrivacyEngine

    class Own(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.engine = nn.Linear(4, 2), PrivacyEngine()
            data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
            self.loader = DataLoader(data, batch_size=16)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def train_dataloader(self) -> Any:
            return self.loader

        def configure_optimizers(self) -> Any:
            self.net, optimizer, self.loader = self.engine.make_private(
                module=self.net,
                optimizer=torch.optim.SGD(self.net.parameters(), lr=0.5),
                data_loader=self.loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                n_public=64,
            )
            return optimizer

    def fitted(**settings: Any) -> Any:
        quietly = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        module = Own()
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", enable_progress_bar=False, **quietly, **settings
        )
        trainer.fit(module)
        return module

    assert len(fitted().engine.accountant) == 8
    with pytest.raises(MisuseError, match=r"before optimizer\.step"):
        fitted(accumulate_grad_batches=2)
