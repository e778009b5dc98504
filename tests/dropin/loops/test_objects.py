"""What people ask of engine, optimizer, model and accountant, inside and around their loops."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from dpis import BatchMemoryManager, ModuleValidator, PrivacyEngine, UnsupportedModuleError, layers
from dpis.accounting import Composition, PoissonGaussian, epsilon_by_pld
from dpis.errors import BudgetExceededError, DpisError, InputError, MisuseError

from . import BATCH, DELTA, RECORDS, Loop, data, first_batch, mlp, private

RATE = BATCH / RECORDS


def epsilon_of(*runs: tuple[float, int]) -> float:
    """Of steps with these noises."""
    events = [(PoissonGaussian(sampling_rate=RATE, noise_multiplier=z), steps) for z, steps in runs]
    return epsilon_by_pld(Composition(tuple(events)), DELTA)


def second(engine: PrivacyEngine, **options: Any) -> Loop:
    """Another model of the same engine."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_grad_norm": 1.0, "n_public": RECORDS, **options}
    make = engine.make_private_with_epsilon
    if "epochs" not in options:
        make, settings = engine.make_private, {"noise_multiplier": 2.0, **settings}
    loader = DataLoader(data(), batch_size=BATCH)
    made = make(module=model, optimizer=optimizer, data_loader=loader, **settings)
    return Loop(engine, *made, plain_model=model, plain_optimizer=optimizer)


# ── the optimizer ────────────────────────────────────────────────────────────────────────────────────


def test_log_grad_norm_after_step() -> None:
    loop = private(optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    for inputs, targets in loop.loader:
        before = loop.weights
        loop.step(inputs, targets)
        norm = torch.stack([p.grad.norm() for p in loop.model.parameters()]).norm()
        assert norm == pytest.approx(float((loop.weights - before).norm()) / 0.5, 1e-9)
    loop.optimizer.zero_grad()
    assert all(p.grad is None for p in loop.model.parameters())


def test_a_gradient_that_is_left_over_is_not_added_to_the_next() -> None:
    loop, expected = private(), private().train()
    for inputs, targets in loop.loader:  # without zero_grad
        functional.cross_entropy(loop.model(inputs), targets).backward()
        loop.optimizer.step()
    assert torch.equal(loop.weights, expected.weights)


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradscaler(zeroed: bool) -> None:
    loop, scaler = private(), torch.amp.GradScaler("cpu")
    batches, inputs, targets = first_batch(loop)
    loop.step(inputs, targets)
    taken = len(loop.engine.accountant)
    inputs, targets = next(batches)
    if zeroed:
        loop.optimizer.zero_grad()
    scaler.scale(functional.cross_entropy(loop.model(inputs), targets)).backward()
    with pytest.raises(MisuseError, match=r"leaves out steps.*GradScaler\(enabled=False\)"):
        scaler.step(loop.optimizer)
    assert len(loop.engine.accountant) == taken
    plain, disabled = private(), torch.amp.GradScaler("cpu", enabled=False)
    for inputs, targets in plain.loader:
        plain.optimizer.zero_grad()
        disabled.scale(functional.cross_entropy(plain.model(inputs), targets)).backward()
        disabled.step(plain.optimizer)
        disabled.update()
    assert torch.equal(plain.weights, private().train().weights)


def test_adamw_groups_scheduler() -> None:
    def in_groups(parameters: Any) -> torch.optim.Optimizer:
        weights = list(parameters)
        decayed, others = [weights[0], weights[2]], [weights[1], weights[3]]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01
        )

    loop = private(optimizer=in_groups)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 5)
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        scheduler.step()
    assert loop.plain_optimizer.param_groups[0]["lr"] < 0.01
    assert len(loop.plain_optimizer.state) == 4


def test_hf_get_scheduler_and_clip_grad_norm() -> None:
    """``get_scheduler("linear", ...)`` is a `LambdaLR`; gradients are clipped before the step, when there are none."""

    def trained(clipped: bool) -> Loop:
        loop = private()
        scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 - step / 5)
        for inputs, targets in loop.loader:
            functional.cross_entropy(loop.model(inputs), targets).backward()
            if clipped:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
            loop.optimizer.step()
            scheduler.step()
            loop.optimizer.zero_grad()
        return loop

    assert torch.equal(trained(True).weights, trained(False).weights)
    assert not torch.equal(trained(True).weights, private().train().weights)


def test_zero_grad_set_after_backward_order() -> None:
    loop, expected = private(), private().train()
    for inputs, targets in loop.loader:
        functional.cross_entropy(loop.model(inputs), targets).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)
    assert torch.equal(loop.weights, expected.weights)


def test_the_attributes_of_opacus_optimizers() -> None:
    loop, seen = private(), []
    optimizer = loop.optimizer
    assert (optimizer.accumulated_iterations, optimizer.expected_batch_size) == (1, BATCH)
    assert [id(p) for p in optimizer.params] == [id(p) for p in loop.plain_model.parameters()]
    assert optimizer.original_optimizer is loop.plain_optimizer
    assert optimizer.defaults["lr"] == 0.1
    optimizer.attach_step_hook(lambda o: seen.append(o.params[0].grad.norm()))
    loop.train()
    assert len(seen) == len(loop.loader)
    for name in ("grad_samples", "clip_and_accumulate", "add_noise", "scale_grad", "pre_step"):
        with pytest.raises(MisuseError, match=rf"no {name}.*never held.*Call step\(\)"):
            getattr(optimizer, name)


def test_a_step_hook_sees_noise_and_what_it_changes_is_the_step() -> None:
    loop = private(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    before = loop.weights
    loop.optimizer.attach_step_hook(lambda o: [p.grad.zero_() for p in o.params])
    loop.train()
    assert torch.equal(loop.weights, before)
    assert len(loop.engine.accountant) == len(loop.loader)  # all the same


def test_grad_accumulation_bmm() -> None:
    loop, expected = private(), private().train()
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=2, optimizer=loop.optimizer
    ) as parts:
        assert len(parts) == len(loop.loader) * BATCH // 2
        for inputs, targets in parts:
            loop.step(inputs, targets)
    assert torch.allclose(loop.weights, expected.weights, rtol=0, atol=1e-12)


# ── noise and clip norm that change ──────────────────────────────────────────────────────────────────


def test_every_step_is_charged_with_the_noise_it_had() -> None:
    loop = private(noise_multiplier=2.0)
    loop.train()
    loop.optimizer.noise_multiplier = 1.0
    assert loop.optimizer.noise_multiplier == 1.0
    loop.train(2)
    assert loop.engine.accountant.history == [(2.0, RATE, 5), (1.0, RATE, 10)]
    assert loop.engine.get_epsilon(DELTA) == epsilon_of((2.0, 5), (1.0, 10))


def test_the_noise_that_is_added_is_the_noise_that_is_charged() -> None:
    """Of 3,000 weights without gradients, so that the update is noise alone."""
    model = nn.Linear(4, 750, bias=False).double()
    loop = private(model, noise_multiplier=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    for z in (1.0, 5.0, 0.5):
        loop.optimizer.noise_multiplier = z
        before = loop.weights
        for inputs, _ in loop.loader:
            (0.0 * loop.model(inputs)).sum(1).mean().backward()
            loop.optimizer.step()
        added = float((loop.weights - before).std()) * BATCH / math.sqrt(5)
        assert added == pytest.approx(z, rel=0.1)
    assert [z for z, _, _ in loop.engine.accountant.history] == [1.0, 5.0, 0.5]


def test_a_batch_that_was_seen_keeps_its_noise() -> None:
    loop = private(noise_multiplier=2.0)
    batches, inputs, targets = first_batch(loop)
    loop.optimizer.noise_multiplier = 100.0  # after a look at the batch
    loop.step(inputs, targets)
    assert {z for z, _, _ in loop.engine.accountant.history} == {2.0}
    loop.step(*next(batches))
    assert loop.engine.accountant.history[-1] == (100.0, RATE, 1)


def test_a_batch_that_waits_keeps_its_noise_in_a_checkpoint(tmp_path: Path) -> None:
    loop, path = private(noise_multiplier=2.0), tmp_path / "run.pt"
    loop.train(steps=2)  # a third was drawn
    loop.optimizer.noise_multiplier = 3.0
    loop.engine.save_checkpoint(path=path, module=loop.model)
    again = private(noise_multiplier=2.0)
    again.engine.load_checkpoint(path=path, module=again.model)
    assert again.optimizer.noise_multiplier == 3.0
    again.train(steps=2)
    assert again.engine.accountant.history == [(2.0, RATE, 3), (3.0, RATE, 1)]


@pytest.mark.parametrize("noise", [0.0, 1e-3, -1.0, math.nan, math.inf, "1"])
def test_noise_that_cannot_be_accounted_for_is_refused(noise: Any) -> None:
    loop = private(noise_multiplier=2.0)
    with pytest.raises(InputError, match="noise_multiplier must be"):
        loop.optimizer.noise_multiplier = noise
    assert loop.optimizer.noise_multiplier == 2.0


def test_a_promised_epsilon_bears_more_noise_and_not_less() -> None:
    loop = private(epochs=2)
    planned = loop.optimizer.noise_multiplier
    with pytest.raises(InputError, match=r"larger than promised.*dp-sgd-decay.*make_private"):
        loop.optimizer.noise_multiplier = 0.99 * planned
    loop.optimizer.noise_multiplier = planned  # nothing changes
    loop.train()
    loop.optimizer.noise_multiplier = 2 * planned
    assert loop.train().engine.get_epsilon(DELTA) < 2.0
    with pytest.raises(BudgetExceededError, match="2 epochs and all are done"):
        loop.train()


def test_what_is_solved_from_releases_cannot_be_set() -> None:
    adaptive = {"epochs": 3, "method": "dpis-adaptive", "n_public": 200, "dataset": data(200)}
    loop = private(**adaptive, loader={"batch_size": 10})
    with pytest.raises(InputError, match="cannot be set"):
        loop.optimizer.noise_multiplier = 50.0
    with pytest.raises(InputError, match="cannot be set"):
        loop.optimizer.max_grad_norm = 0.5


@pytest.mark.parametrize("method", ["dpis", "dp-sgd"])
def test_a_new_clip_norm_bounds_contributions_and_scales_the_noise(method: str) -> None:
    loop = private(method=method, max_grad_norm=1.0)
    loop.train()
    loop.optimizer.max_grad_norm = 1e-6
    assert loop.optimizer.max_grad_norm == 1e-6
    before = loop.weights
    loop.train()
    assert (loop.weights - before).abs().max() < 1e-5  # records and noise of a millionth
    assert loop.engine.accountant.history == [(1.0, RATE, 10)]
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="clip_norm must be"):
            loop.optimizer.max_grad_norm = wrong


def test_a_batch_that_was_drawn_keeps_its_clip_norm() -> None:
    """Its records were drawn for it: the update would be scaled wrongly."""
    loop, expected = private(max_grad_norm=0.5), private(max_grad_norm=0.5)
    _, inputs, targets = first_batch(loop)
    loop.optimizer.max_grad_norm = 50.0
    loop.step(inputs, targets)
    _, inputs, targets = first_batch(expected)
    expected.step(inputs, targets)
    assert torch.equal(loop.weights, expected.weights)


def scheduled(name: str, optimizer: Any, **how: Any) -> Any:
    from dpis import schedulers

    return getattr(schedulers, name)(optimizer, **how)


@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        ("ExponentialNoise", {"gamma": 0.5}, [2.0, 1.0, 0.5, 0.25]),
        ("StepNoise", {"step_size": 2, "gamma": 0.5}, [2.0, 2.0, 1.0, 1.0]),
        ("LambdaNoise", {"noise_lambda": lambda e: 1 / (1 + e)}, [2.0, 1.0, 2 / 3, 0.5]),
        ("ExponentialGradClip", {"gamma": 0.5}, [3.0, 1.5, 0.75, 0.375]),
        ("StepGradClip", {"step_size": 3, "gamma": 2.0}, [3.0, 3.0, 3.0, 6.0]),
        ("LambdaGradClip", {"scheduler_function": lambda e: 1 + e}, [3.0, 6.0, 9.0, 12.0]),
    ],
)
def test_schedulers_of_noise_and_clip_norm(name: str, how: Any, expected: list[float]) -> None:
    loop = private(noise_multiplier=2.0, max_grad_norm=3.0)
    scheduler, attribute = scheduled(name, loop.optimizer, **how), "noise_multiplier"
    if name.endswith("Clip"):
        attribute = "max_grad_norm"
    found = []
    for _ in range(4):
        found.append(getattr(loop.optimizer, attribute))
        loop.train(steps=1)
        scheduler.step()
    assert found == pytest.approx(expected)
    if attribute == "noise_multiplier":
        charged = [z for z, _, times in loop.engine.accountant.history for _ in range(times)]
        assert charged[0] == 2.0
        assert set(charged) <= set(found)
    with pytest.raises(AttributeError):
        scheduled(name, loop.plain_optimizer, **how)


def test_schedulers_go_on_from_a_checkpoint() -> None:
    def begun() -> tuple[Loop, Any, Any]:
        loop = private(noise_multiplier=2.0)
        noise = scheduled("StepNoise", loop.optimizer, step_size=2, gamma=0.5)
        return loop, noise, scheduled("ExponentialGradClip", loop.optimizer, gamma=0.5)

    def train(loop: Loop, noise: Any, clip: Any, epochs: int) -> None:
        for _ in range(epochs):
            loop.train()
            noise.step()
            clip.step()

    whole, kept = begun(), io.BytesIO()
    train(*whole, 3)
    loop, noise, clip = whole
    loop.engine.save_checkpoint(
        path=kept, module=loop.model, noise_scheduler=noise, grad_clip_scheduler=clip
    )
    train(*whole, 2)
    kept.seek(0)
    again, noise, clip = resumed = begun()
    again.engine.load_checkpoint(
        path=kept, module=again.model, noise_scheduler=noise, grad_clip_scheduler=clip
    )
    train(*resumed, 2)
    assert again.engine.accountant.history == loop.engine.accountant.history
    assert torch.equal(again.weights, loop.weights)


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────


def test_checkpoint_bytesio() -> None:
    loop, kept = private().train(), io.BytesIO()
    loop.engine.save_checkpoint(
        path=kept, module=loop.model, optimizer=loop.optimizer, checkpoint_dict={"epoch": 1}
    )
    again = private()
    kept.seek(0)
    given = again.engine.load_checkpoint(path=kept, module=again.model, optimizer=again.optimizer)
    assert given == {"epoch": 1}
    assert torch.equal(again.train().weights, loop.train().weights)
    damaged = io.BytesIO(kept.getvalue()[:-1])
    fresh = private()
    with pytest.raises(InputError, match="none that this engine made private"):
        fresh.engine.load_checkpoint(path=kept, module=again.model)
    with pytest.raises(InputError, match="damaged"):
        fresh.engine.load_checkpoint(path=damaged, module=fresh.model)


def test_accountant_history_and_steps() -> None:
    loop = private(noise_multiplier=1.5).train(2)
    accountant = loop.engine.accountant
    assert accountant.history == [(1.5, RATE, 10)]
    assert len(accountant) == 10
    assert accountant.mechanism() == "pld"
    spent = loop.engine.get_epsilon(DELTA)
    assert accountant.get_epsilon(delta=DELTA, alphas=[2.0, 3.0]) == spent
    assert accountant.get_epsilon(DELTA, eps_error=0.1, delta_error=1e-9) == spent


def test_accountant_state_dict() -> None:
    loop = private(noise_multiplier=1.5).train()
    state = loop.engine.accountant.state_dict()
    again = private(noise_multiplier=1.5)
    again.engine.accountant.load_state_dict(copy.deepcopy(state))
    again.train()
    assert again.engine.accountant.history == [(1.5, RATE, 10)]
    assert again.engine.get_epsilon(DELTA) == epsilon_of((1.5, 10))
    with pytest.raises(InputError, match="would forget them, and epsilon would be too small"):
        again.engine.accountant.load_state_dict(state)
    assert again.engine.accountant.history == [(1.5, RATE, 10)]


def test_a_checkpoint_holds_all_that_was_spent_or_is_refused() -> None:
    """That of one model of two, or without a history that was loaded before, would report too small an epsilon."""
    history = private(noise_multiplier=0.8).train().engine.accountant.state_dict()
    engine = PrivacyEngine()
    engine.accountant.load_state_dict(history)
    loop = second(engine).train(steps=1)
    two = private().train(steps=1)
    second(two.engine).train(steps=1)
    for one in (loop, two):
        with pytest.raises(InputError, match="too small an epsilon"):
            one.engine.save_checkpoint(path=io.BytesIO(), module=one.model)


def test_a_history_without_noise_is_not_handed_on() -> None:
    with pytest.warns(UserWarning, match="adds no noise"):
        loop = private(noise_multiplier=0)
    with pytest.raises(InputError, match="too small an epsilon"):
        loop.train(steps=1).engine.accountant.state_dict()


def test_an_accountant_may_be_loaded_before_a_model_is_made_private() -> None:
    engine = PrivacyEngine()
    engine.accountant.load_state_dict({"history": [(1.0, RATE, 7)], "mechanism": "rdp"})
    assert engine.get_epsilon(DELTA) == epsilon_of((1.0, 7))
    with pytest.raises(InputError, match="would be that of one model"):
        second(engine, target_epsilon=1.0, target_delta=DELTA, epochs=1)
    second(engine).train()
    assert engine.get_epsilon(DELTA) == epsilon_of((1.0, 7), (2.0, 5))


@pytest.mark.parametrize("state", [{}, None, {"mechanism": "rdp"}])
def test_a_state_without_history_is_refused(state: Any) -> None:
    with pytest.raises(InputError, match="history"):
        PrivacyEngine().accountant.load_state_dict(state)


@pytest.mark.parametrize("line", [(0.0, 0.1, 3), (1.0, 0.1, -3), (1.0, 1.5, 3), (1.0, 0.1, 2.5)])
def test_a_history_that_cannot_be_accounted_for_is_refused(line: Any) -> None:
    with pytest.raises(InputError):
        PrivacyEngine().accountant.load_state_dict({"history": [line]})


def test_what_was_spent_before_counts_towards_a_promise() -> None:
    first = private(epochs=2).train()
    again = private(epochs=2)
    again.engine.accountant.load_state_dict(first.engine.accountant.state_dict())
    again.train()
    assert again.engine.get_epsilon(DELTA) <= 2.0
    with pytest.raises(BudgetExceededError, match="the plan ended"):
        again.train()
    noisy = private(epochs=2)
    with pytest.raises(BudgetExceededError, match="spends more"):
        noisy.engine.accountant.load_state_dict({"history": [(0.1, RATE, 1)]})


def test_one_engine_twice() -> None:
    loop = private(noise_multiplier=1.0)
    other = second(loop.engine)
    loop.train()
    other.train(2)
    loop.train()
    engine = loop.engine
    assert len(engine.accountant) == 20
    assert engine.get_epsilon(DELTA) == epsilon_of((1.0, 10), (2.0, 10))


@pytest.mark.parametrize("first", [True, False])
def test_a_promise_is_of_one_model(first: bool) -> None:
    promised: dict[str, Any] = {"target_epsilon": 1.0, "target_delta": DELTA, "epochs": 1}
    loop = private(**promised) if first else private()
    with pytest.raises(InputError, match=r"both together cost more.*make_private.*new Privacy"):
        second(loop.engine, **({} if first else promised))
    assert loop.train().engine.get_epsilon(DELTA) <= (1.0 if first else math.inf)


def test_noise_multiplier_zero() -> None:
    with pytest.warns(UserWarning, match="nothing is private, and epsilon is infinite"):
        loop = private(noise_multiplier=0.0, method="dp-sgd")
    assert loop.engine.get_epsilon(DELTA) == math.inf
    _, inputs, targets = first_batch(loop)
    before = loop.weights
    loop.step(inputs, targets)
    rows = len(inputs)
    assert 0 < (loop.weights - before).norm() <= 0.1 * rows / BATCH  # clipped all the same
    assert loop.train().engine.get_epsilon(DELTA) == math.inf
    with pytest.raises(InputError, match="epsilon stays infinite"):
        loop.optimizer.noise_multiplier = 1.0
    second(loop.engine).train()
    assert loop.engine.get_epsilon(DELTA) == math.inf  # of both


def test_train_past_epochs() -> None:
    promised = private(epochs=1).train()
    with pytest.raises(BudgetExceededError, match=r"not covered by the claim.*more epochs"):
        promised.train()
    assert promised.engine.get_epsilon(DELTA) <= 2.0
    assert len(private().train(3).engine.accountant) == 15


def test_a_call_that_fails_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PrivacyEngine()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="one process"):
        second(engine)
    monkeypatch.delenv("WORLD_SIZE")
    second(engine, target_epsilon=1.0, target_delta=DELTA, epochs=1)


# ── the model ────────────────────────────────────────────────────────────────────────────────────────


def test_model_remove_hooks_to_standard() -> None:
    loop = private().train()
    loop.model.remove_hooks()
    public = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    before = loop.weights
    public.zero_grad()
    loop.model(torch.randn(3, 4).double()).sum().backward()  # as any other model
    public.step()
    assert not torch.equal(loop.weights, before)
    with pytest.raises(MisuseError, match="would not be accounted for"):
        loop.train()
    with pytest.raises(MisuseError, match="original optimizer was stepped"):
        loop.plain_optimizer.step()
    standard = (other := private().train()).model.to_standard_module()
    assert standard is other.plain_model


def test_model_zero_grad() -> None:
    loop, expected = private(), private().train()
    for inputs, targets in loop.loader:
        loop.model.zero_grad()
        functional.cross_entropy(loop.model(inputs), targets).backward()
        loop.optimizer.step()
    assert torch.equal(loop.weights, expected.weights)


def test_ema_model_deepcopy() -> None:
    loop = private()
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        average.update_parameters(loop.model)
    best = copy.deepcopy(loop.model)
    with torch.no_grad():
        assert average(data()[:3][0]).shape == best.eval()(data()[:3][0]).shape == (3, 3)


def test_eval_each_epoch_and_save_load_state_dict(tmp_path: Path) -> None:
    loop, best = private(), tmp_path / "best.pt"
    for _ in range(2):
        loop.model.train()
        loop.train()
        loop.model.eval()
        with torch.no_grad():
            loop.model(data()[:][0]).argmax(1)
        torch.save(loop.model.state_dict(), best)
    before = loop.weights
    loop.model.train()
    loop.train(steps=2)
    loop.model.load_state_dict(torch.load(best))
    assert torch.equal(loop.weights, before)


@pytest.mark.slow
def test_accelerate_prepare() -> None:
    accelerate = pytest.importorskip("accelerate")
    loop, accelerator = private(), accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(loop.model, loop.optimizer, loop.loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    assert len(loop.engine.accountant) == len(loop.loader)


def test_a_gans_discriminator() -> None:
    """Generated records hold nobody: their gradient joins the noisy one between noise and update."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 4).double(), nn.Linear(4, 1).double()
    loop = private(discriminator)
    adam = torch.optim.Adam(generator.parameters(), lr=0.1)
    before, added = generator.weight.detach().clone(), []

    def judged(model: Any, records: Any, real: float) -> Any:
        outputs = model(records)
        return functional.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, real))

    def add_generated(optimizer: Any) -> None:
        noisy = [p.grad.clone() for p in optimizer.params]
        loss = judged(discriminator, fake.detach(), 0.0)
        for p, g in zip(optimizer.params, torch.autograd.grad(loss, optimizer.params), strict=True):
            p.grad += g
        added.append([p.grad - n for p, n in zip(optimizer.params, noisy, strict=True)])

    loop.optimizer.attach_step_hook(add_generated)
    for real, _ in loop.loader:
        fake = generator(torch.randn(BATCH, 2).double())
        loop.optimizer.zero_grad()
        judged(loop.model, real, 1.0).backward()
        loop.optimizer.step()
        adam.zero_grad()
        judged(discriminator, fake, 1.0).backward(inputs=list(generator.parameters()))
        adam.step()
    assert len(loop.engine.accountant) == len(added) == len(loop.loader)
    assert all(gradient.norm() > 0 for step in added for gradient in step)
    assert not torch.equal(generator.weight, before)
    with pytest.raises(MisuseError, match="neither clipped nor noised"):
        judged(discriminator, fake.detach(), 1.0).backward()


def test_validator_as_opacus_has_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(UnsupportedModuleError):
        ModuleValidator.validate(model, strict=True)
    assert ModuleValidator.fix(model)[1].num_groups == 8
    assert "1: BatchNorm2d(8) -> GroupNorm(8, 8)" in caplog.text
    assert ModuleValidator.fix(model, num_groups=2)[1].num_groups == 2
    instance = ModuleValidator.fix(model, replace_bn_with_in=True)[1]
    assert type(instance) is nn.InstanceNorm2d
    assert instance.weight is not None
    for wrong in ({"num_groups": 3}, {"num_groups": 2, "replace_bn_with_in": True}):
        with pytest.raises(ValueError, match="num_groups"):
            ModuleValidator.fix(model, **wrong)
    fixed = ModuleValidator.fix(model, num_groups=4)
    assert ModuleValidator.is_valid(fixed)
    assert not ModuleValidator.is_valid(fixed.eval())


class Reader(nn.Module):
    """Of layers of Opacus or of ours."""

    def __init__(self, names: Any) -> None:
        super().__init__()
        self.lstm = names.DPLSTM(4, 6, num_layers=2, bidirectional=True)
        self.gru, self.rnn = names.DPGRU(12, 6), names.DPRNN(6, 6, bias=False)
        self.attention = names.DPMultiheadAttention(6, 2, add_bias_kv=True)
        self.other = names.DPMultiheadAttention(6, 2, bias=False, kdim=6, vdim=4)

    def forward(self, x: Any) -> Any:
        for layer in (self.lstm, self.gru, self.rnn):
            x = layer(x)[0]
        x = self.attention(x, x, x)[0]
        return self.other(x, x, x[..., :4])[0]


def test_weights_of_opacus_layers_are_loaded() -> None:
    theirs = Reader(pytest.importorskip("opacus.layers")).eval()
    ours, x = Reader(layers).eval(), torch.randn(5, 3, 4)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    again = Reader(layers)
    again.load_state_dict(ours.state_dict())  # their own, too
    with pytest.raises(RuntimeError, match="Unexpected"):
        ours.load_state_dict({**theirs.state_dict(), "lstm.l9.ih.other": torch.zeros(1)})


def test_every_error_is_one_of_ours() -> None:
    assert issubclass(UnsupportedModuleError, DpisError)
    assert issubclass(UnsupportedModuleError, ValueError)
