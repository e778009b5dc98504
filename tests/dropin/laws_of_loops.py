"""What a private loop must satisfy, whoever drives it. Every law raises where it is broken.

They are run on the real code and on broken code by `test_broken_on_purpose`.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from dpis import BatchMemoryManager, PrivacyEngine
from dpis.accounting import Adjacency, CountSource
from dpis.dropin.trainer_settings import TrainerSettings
from dpis.errors import PublicCountWarning
from dpis.mechanism import Method
from dpis.options import Privacy

from .loops import BATCH, RECORDS, Loop, data, mlp, private

# ── noise ────────────────────────────────────────────────────────────────────────────────────────────


def law_every_parameter_has_its_noise() -> None:
    """Records without gradients: what is left of a step is noise, C/B · 1.001 z in every entry (rule 12)."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 30)
    ).double()
    C, z, kappa, steps = 0.5, 3.0, 0.5, 30
    loop = private(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        max_grad_norm=C,
        noise_multiplier=z,
        kappa=kappa,
    )
    moves: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    while len(next(iter(moves.values()))) < steps:
        for inputs, _ in loop.loader:
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            loop.optimizer.zero_grad()
            (0 * loop.model(inputs)).sum().backward()
            loop.optimizer.step()
            for name, parameter in model.named_parameters():
                moves[name].append((parameter.detach() - before[name]).flatten())
    expected = C / (BATCH / kappa) * 1.001 * z
    for name, noise in moves.items():
        found = torch.stack(noise)
        error = found.numel() ** -0.5  # more than the error of a standard deviation
        assert abs(found.std() / expected - 1) < 5 * error, name
        assert abs(found.mean() / expected) < 5 * error, name
        assert found.std(0).min() > 0.5 * expected, name  # every entry, not most
    everything = torch.cat([torch.stack(noise).flatten() for noise in moves.values()])
    assert len(everything.unique()) > 0.95 * len(everything)  # on a grid some meet by chance


def law_noise_without_a_seed_is_the_operating_systems() -> None:
    """Nothing else decides coins and noise: the same secret gives the same weights, another others (rule 18)."""

    def weights(secret: int) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secrets, "token_bytes", lambda count: bytes([secret]) * count)
            torch.manual_seed(secret)
            loop = private(seed=None)
        torch.manual_seed(0)
        return loop.train().weights

    one, same, other = weights(1), weights(1), weights(2)
    assert torch.equal(one, same)
    assert (one - other).abs().min() > 0


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────


def in_halves(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loop.optimizer.zero_grad()
    middle = len(inputs) // 3
    for part in (slice(0, middle), slice(middle, None)):
        if len(inputs[part]):
            functional.cross_entropy(loop.model(inputs[part]), targets[part]).backward()
    loop.optimizer.step()


def law_parts_of_a_batch_add_up() -> None:
    """At a clip norm that no norm reaches: else clipping hides how losses were scaled."""
    options: dict[str, Any] = {"max_grad_norm": 20.0, "kappa": 0.25, "noise_multiplier": 0.01}
    expected = private(**options).train()
    by_hand = private(**options)
    for inputs, targets in by_hand.loader:
        in_halves(by_hand, inputs, targets)
    physical = private(**options)
    with BatchMemoryManager(
        data_loader=physical.loader, max_physical_batch_size=3, optimizer=physical.optimizer
    ) as parts:
        for inputs, targets in parts:
            physical.step(inputs, targets)
    summed = private(
        **options, loss_reduction="sum", optimizer=lambda p: torch.optim.SGD(p, 0.1 / BATCH)
    )
    for inputs, targets in summed.loader:
        summed.optimizer.zero_grad()
        functional.cross_entropy(summed.model(inputs), targets, reduction="sum").backward()
        summed.optimizer.step()
    norms = expected.session.mechanism.sampler.last_norms
    assert 0 < norms[norms.isfinite()].max() < 20
    for loop in (by_hand, physical, summed):
        assert torch.allclose(loop.weights, expected.weights, rtol=0, atol=1e-9)
        found = loop.session.mechanism.sampler.last_norms
        assert torch.allclose(found, norms, rtol=1e-5)


def law_an_optimizer_steps_what_is_protected_and_nothing_else() -> None:
    """A stranger among its parameters would be stepped by whatever gradient it has."""
    for missing, strangers in ((1, 0), (0, 1), (0, 0)):
        model, stranger = mlp(), nn.Parameter(torch.zeros(3))
        stepped = [*model.parameters()][missing:] + [stranger] * strangers
        optimizer = torch.optim.SGD(stepped, lr=0.1)
        loader = DataLoader(data(), batch_size=BATCH)
        fits = PrivacyEngine().is_compatible(module=model, optimizer=optimizer, data_loader=loader)
        assert fits == (not missing and not strangers)


# ── what was asked for ───────────────────────────────────────────────────────────────────────────────


def law_a_count_from_the_data_is_public() -> None:
    """Then only records are protected, not their number: zero-out, in plan and header."""
    for method in ("dpis", "dpis-adaptive"):
        asked: dict[str, Any] = {"epochs": 2, "method": method, "loader": {"batch_size": 8}}
        given = private(**asked)
        with pytest.warns(PublicCountWarning):
            read = private(n_public=None, **asked)
        for loop, adjacency in ((given, Adjacency.ADD_REMOVE), (read, Adjacency.ZERO_OUT)):
            plan = loop.session.mechanism.plan
            assert plan.privacy.adjacency is adjacency
            header = plan.header(versions={}, seeded=True, diagnostics=False)
            assert header.adjacency is adjacency
            assert header.n_public == RECORDS
    with pytest.warns(PublicCountWarning):
        loop = private(n_public=None)
    assert loop.session.mechanism.plan.config.n_public_source is CountSource.DATASET_LENGTH


def law_what_is_asked_for_is_what_is_planned() -> None:
    """By the engine's own names, and every other option of the table by its own."""
    asked: dict[str, Any] = {"max_grad_norm": 0.3, "kappa": 0.5, "n_public": 50}
    noisy = private(**asked, headroom=2.0, noise_multiplier=1.7)
    planned = private(**asked, target_epsilon=1.25, target_delta=1e-4, epochs=3, method="dp-sgd")
    for loop, method in ((noisy, Method.DPIS), (planned, Method.DP_SGD)):
        check_config(loop.engine, method, clip_norm=0.3, kappa=0.5, n_public=50)
        assert loop.loader.sample_rate == pytest.approx(BATCH / 0.5 / 50)
        assert len(loop.loader) == 50 // BATCH
    check_config(noisy.engine, Method.DPIS, headroom=2.0)
    assert noisy.optimizer.noise_multiplier == 1.7
    check_config(planned.engine, Method.DP_SGD, epsilon=1.25, delta=1e-4, epochs=3)


def law_the_guarantee_of_an_integration_is_that_of_its_engine() -> None:
    """Every field of `TrainerSettings`: none is lost on its way."""
    common: dict[str, Any] = {"clip_norm": 0.3, "n_public": 50}
    by_importance = {**common, "headroom": 2.0}
    budget = {"epsilon": 1.25, "delta": 1e-4}
    for privacy, noise, expected in (
        (Privacy(kappa=0.5, **by_importance), 1.7, {**by_importance, "kappa": 0.5}),
        (Privacy(method="dp-sgd", **budget, **common), None, {**common, **budget, "epochs": 3}),
        (
            Privacy(method="dpis-adaptive", **budget, **by_importance),
            None,
            {**by_importance, **budget, "epochs": 3},
        ),
    ):
        engine, model = PrivacyEngine(), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data(), batch_size=BATCH)
        settings = TrainerSettings(privacy=privacy, noise_multiplier=noise, seed=4)
        settings.make_private(engine, model, optimizer, loader, 3)
        check_config(engine, Method(privacy.method), **expected)
        assert engine._runs[-1].session.mechanism._key.seed == 4
    unseeded = TrainerSettings(privacy=Privacy(n_public=RECORDS), noise_multiplier=1.0)
    engine, model = PrivacyEngine(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unseeded.make_private(engine, model, optimizer, DataLoader(data(), batch_size=BATCH), 1)
    assert engine._runs[-1].session.mechanism._key.seed is None


def check_config(engine: PrivacyEngine, method: Method, **expected: Any) -> None:
    config = engine._runs[-1].session.mechanism.plan.config
    assert config.method is method
    assert {name: getattr(config, name) for name in expected} == expected
