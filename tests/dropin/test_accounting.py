"""What was spent, and what is kept for later."""

from __future__ import annotations

import contextlib
import inspect
import pydoc
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dpis
from dpis import ModuleValidator, PrivacyEngine
from dpis.accounting import Composition, PoissonGaussian, epsilon_by_pld
from dpis.errors import InputError, PublicCountWarning
from dpis.mechanism import EventCounter

from .loops import BATCH, DELTA, RECORDS, Loop, data, mlp, private

# ── epsilon ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_epsilon_is_that_of_the_events_so_far():
    loop = private(noise_multiplier=1.3)
    assert loop.engine.get_epsilon(DELTA) == 0.0
    for epochs in (1, 2):
        loop.train()
        event = PoissonGaussian(sampling_rate=BATCH / RECORDS, noise_multiplier=1.3)
        expected = epsilon_by_pld(Composition(((event, 5 * epochs),)), DELTA)
        assert loop.engine.get_epsilon(delta=DELTA) == expected
        assert loop.engine.accountant.get_epsilon(DELTA) == expected
        assert loop.engine.accountant.get_epsilon(delta=DELTA) == expected


def test_the_planned_epsilon_is_reached_and_not_passed():
    loop = private(epochs=2, target_epsilon=1.5)
    half = loop.train().engine.get_epsilon(DELTA)
    whole = loop.train().engine.get_epsilon(DELTA)
    assert 0 < half < whole <= 1.5
    assert whole > 1.5 * 0.998


def test_the_adaptive_mode_claims_its_target_throughout():
    loop = private(
        epochs=3,
        method="dpis-adaptive",
        n_public=200,
        dataset=data(200),
        loader={"batch_size": 10},
        seed=9,  # by others all released norm sums are cut off at their bound
    )
    rates = []
    for _ in range(3):
        loop.train(steps=15)
        rates.append(loop.session.mechanism.terms.sampling_rate)
        assert loop.engine.get_epsilon(DELTA) == 2.0
    assert len(set(rates)) > 1
    with pytest.raises(InputError, match="or larger"):
        loop.engine.get_epsilon(DELTA / 10)
    assert loop.engine.accountant.journal.fraction_spent <= 1


def test_a_delta_too_small_for_pld_is_answered_all_the_same():
    assert 0 < private().train().engine.get_epsilon(1e-14) < float("inf")
    with pytest.raises(InputError, match="between 0 and 1"):
        private().engine.get_epsilon(0.0)


def test_the_number_of_records_shows_in_nothing_that_is_public():
    few, many = (
        private(dataset=data(records), epochs=2, n_public=RECORDS)
        for records in (RECORDS - 1, RECORDS)
    )
    assert len(few.loader) == len(many.loader) == RECORDS // BATCH
    assert few.session.mechanism.plan == many.session.mechanism.plan
    for loop in (few, many):
        loop.train(2)
    journals = [loop.engine.accountant.journal for loop in (few, many)]
    assert journals[0].events == journals[1].events


def test_a_count_that_was_not_given_is_declared_public():
    with pytest.warns(PublicCountWarning, match="treated as public") as caught:
        loop = private(n_public=None)
    assert caught[0].filename == inspect.getsourcefile(private)
    assert len(loop.loader) == RECORDS // BATCH


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────

MODES: dict[str, dict[str, Any]] = {
    "open-ended": {},
    "predeclared": {"epochs": 4, "kappa": "1,0.5,0.5,1"},
    "adaptive": {
        "epochs": 4,
        "method": "dpis-adaptive",
        "n_public": 200,
        "dataset": data(200),
        "loader": {"batch_size": 20},
    },
}


def with_dropout() -> nn.Module:
    return nn.Sequential(mlp()[:2], nn.Dropout(0.3), nn.Linear(6, 3).double())


def start(**options: Any) -> Loop:
    torch.manual_seed(0)
    adam = {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01)}
    return private(with_dropout(), **adam, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["open-ended", pytest.param("predeclared", marks=pytest.mark.slow), "adaptive"]
)
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(None, id="after an epoch", marks=pytest.mark.slow),
        pytest.param(3, id="after a break"),
    ],
)
def test_a_seeded_run_goes_on_bit_by_bit(mode: str, steps: int | None, tmp_path: Path):
    whole = start(**MODES[mode])
    whole.train(2, steps)
    path = tmp_path / "run.pt"
    whole.engine.save_checkpoint(
        path=path, module=whole.model, optimizer=whole.optimizer, checkpoint_dict={"epoch": 2}
    )
    whole.train(2)

    resumed = start(**MODES[mode])
    kept = resumed.engine.load_checkpoint(
        path=path, module=resumed.model, optimizer=resumed.optimizer
    )
    assert kept == {"epoch": 2}
    resumed.train(2)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)
    assert resumed.engine.accountant.journal._runs == whole.engine.accountant.journal._runs


def saved(loop: Loop, path: Path) -> Path:
    loop.engine.save_checkpoint(path=path, module=loop.model, optimizer=loop.optimizer)
    return path


def test_a_checkpoint_is_readable_by_its_owner_only(tmp_path: Path):
    path = saved(private().train(), tmp_path / "run.pt")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_seed_two_ways_from_one_checkpoint_share_no_noise(tmp_path: Path):
    path = saved(private(seed=None).train(), tmp_path / "run.pt")
    ways = []
    for _ in range(2):
        loop = private(seed=None)
        loop.engine.load_checkpoint(path=path, module=loop.model, optimizer=loop.optimizer)
        before = loop.weights
        loop.train(steps=1)
        ways.append(loop.weights - before)
    assert (ways[0] - ways[1]).abs().min() > 0
    assert len(loop.engine.accountant) == 6


def test_going_back_would_forget_what_was_spent(tmp_path: Path):
    loop = private().train()
    path = saved(loop, tmp_path / "run.pt")
    with pytest.raises(InputError, match=r"epsilon would be too small.*module.load_state_dict"):
        loop.engine.load_checkpoint(path=path, module=loop.model)


@pytest.mark.parametrize(
    "other",
    [{"noise_multiplier": 0.5}, {"max_grad_norm": 2.0}, {"dataset": data(41)}, {"headroom": 2.0}],
)
def test_a_checkpoint_of_another_plan_is_refused(other: dict[str, Any], tmp_path: Path):
    path = saved(private().train(), tmp_path / "run.pt")
    loop = private(**other)
    with pytest.raises(InputError, match="same arguments"):
        loop.engine.load_checkpoint(path=path, module=loop.model)
    assert len(loop.engine.accountant) == 0


def test_checkpoints_need_a_private_model(tmp_path: Path):
    for method in (PrivacyEngine().save_checkpoint, PrivacyEngine().load_checkpoint):
        with pytest.raises(InputError, match="make_private first"):
            method(path=tmp_path / "x", module=mlp())


def test_a_journal_that_does_not_fit_its_position_is_refused():
    with pytest.raises(InputError, match="damaged"):
        EventCounter().go_to(3)


# ── models that couple records ───────────────────────────────────────────────────────────────────────


def coupled() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)).double()


def test_the_validator_finds_and_fixes_what_couples_records():
    model = coupled()
    assert not ModuleValidator.is_valid(model)
    assert "BatchNorm1d" in str(ModuleValidator.validate(model)[0])
    with pytest.raises(ValueError, match="guarantee does not hold"):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix(model)
    assert ModuleValidator.is_valid(fixed)
    assert isinstance(model[1], nn.BatchNorm1d)
    assert isinstance(PrivacyEngine.get_compatible_module(model)[1], nn.GroupNorm)
    assert ModuleValidator.is_valid(ModuleValidator.fix_and_validate(coupled()))


def test_the_engine_says_what_fits():
    engine, model = PrivacyEngine(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=BATCH)
    assert engine.is_compatible(module=model, optimizer=optimizer, data_loader=loader)
    assert engine.is_compatible(module=model)
    assert not engine.is_compatible(module=coupled(), optimizer=None, data_loader=None)
    assert not engine.is_compatible(module=mlp(), optimizer=optimizer, data_loader=loader)
    script = torch.jit.ScriptModule
    with contextlib.suppress(DeprecationWarning):
        assert not engine.is_compatible(module=nn.Sequential(script()))
    with pytest.raises(ValueError, match="guarantee"):
        engine.validate(module=coupled())


def test_help_is_readable():
    text = pydoc.plain(pydoc.render_doc(dpis.PrivacyEngine))
    for name in ("make_private", "target_epsilon", "n_public", "save_checkpoint", "get_epsilon"):
        assert name in text
    for name, method in inspect.getmembers(PrivacyEngine, inspect.isfunction):
        if name.startswith("_"):
            continue
        arguments = [a for a in inspect.signature(method).parameters if a != "self"]
        doc = inspect.getdoc(method) or ""
        assert doc, name
        if name.startswith("make") or "checkpoint" in name:
            assert all(f"    {a}:" in doc for a in arguments), name


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "dp-sgd-decay", "decay_rate": 0.3},
        {"contribution": "reject"},
        {"method": "dpis-adaptive", "contribution": "reject", "reserve_share": 0.5},
        {"accountant": "rdp", "equivalent_batch": 16.0},
        {"floor": 0.2, "kappa": "1:0.5"},
    ],
    ids=lambda asked: ", ".join(asked),
)
def test_what_the_table_offers_a_loop_keeps_its_budget(asked: dict[str, Any]) -> None:
    loop = private(epochs=2, n_public=200, dataset=data(200), **asked).train(2)
    assert loop.weights.isfinite().all()
    assert 0 < loop.engine.get_epsilon(DELTA) <= 2.0
