"""The loop trains, by every method and with what torch offers beside it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

from dpis.training import EarlyStop
from tests.training.toys import Each, assert_verifies, fit, ledger, linear, mlp, points, weights

EASY = {
    "dataset": points(256),
    "n_public": 256,
    "epsilon": 8.0,
    "epochs": 2,
    "batch_size": 32,
    "lr": 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive", "dp-sgd", "dp-sgd-decay", "sgd"])
def test_every_method_learns(tmp_path: Path, method: str) -> None:
    spoken = {n: v for n, v in EASY.items() if method != "sgd" or n != "epsilon"}
    result = fit(tmp_path / "run", method=method, held_out=points(500, seed=9), **spoken)
    assert result.metrics["accuracy"] > 0.75
    if method == "sgd":
        assert result.claim is None
        assert not (result.folder / "ledger.jsonl").exists()
    else:
        assert (result.claim.epsilon, result.claim.delta) == (8.0, 1e-5)
        assert len([e for e in ledger(result.folder).entries if e.label == "gradient"]) == 16


@pytest.mark.parametrize("contribution", ["weight", "reject"])
@pytest.mark.parametrize("norm_sum", ["full-pass", "stale"])
def test_forms_of_the_adaptive_method(tmp_path: Path, contribution: str, norm_sum: str) -> None:
    result = fit(
        tmp_path / "run",
        method="dpis-adaptive",
        contribution=contribution,
        norm_sum=norm_sum,
        held_out=points(500, seed=9),
        **EASY,
    )
    assert result.metrics["accuracy"] > 0.7


OPTIMIZERS = {
    "sgd": "sgd",
    "adam": "adam",
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_with_the_noisy_gradient(tmp_path: Path, name: str) -> None:
    easy = {name: value for name, value in EASY.items() if name != "lr"}
    named = {"lr": 0.2} if isinstance(OPTIMIZERS[name], str) else {}
    result = fit(
        tmp_path / "run",
        optimizer=OPTIMIZERS[name],
        held_out=points(500, seed=9),
        **easy,
        **named,
    )
    assert result.metrics["accuracy"] > 0.75


def _rates(tmp_path: Path, **settings: object) -> list[float]:
    """The learning rate after every step."""
    model, rates = linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    each = Each(lambda _: rates.append(optimizer.param_groups[0]["lr"]))
    fit(tmp_path / "run", model, optimizer=optimizer, progress=each, **settings)
    return rates


def test_a_scheduler_steps_by_step(tmp_path: Path) -> None:
    rates = _rates(tmp_path, scheduler=lambda o: ExponentialLR(o, 0.5), scheduler_interval="step")
    assert rates == pytest.approx([0.5**t for t in range(1, 9)])


def test_a_scheduler_steps_by_epoch(tmp_path: Path) -> None:
    rates = _rates(tmp_path, scheduler=lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)))
    assert rates == pytest.approx([1.0] * 4 + [0.5] * 4)


def test_a_plateau_is_one_of_a_held_out_metric(tmp_path: Path) -> None:
    def constant(output: Tensor, target: Tensor) -> Tensor:
        return torch.zeros(len(target))

    rates = _rates(
        tmp_path,
        epochs=3,
        scheduler=lambda o: ReduceLROnPlateau(o, patience=0, factor=0.1),
        held_out=points(10),
        metrics={"constant": constant},
    )
    assert rates == pytest.approx([1.0] * 8 + [0.1] * 4)


def test_the_average_of_the_weights_is_released(tmp_path: Path) -> None:
    model, seen = mlp(), []
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def look(_: object) -> None:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    result = fit(tmp_path / "run", model, ema=0.6, progress=Each(look), held_out=points(50))
    expected = start
    for t, now in enumerate(seen, start=1):
        d = min(0.6, (1 + t) / (10 + t))
        expected = {name: d * expected[name] + (1 - d) * now[name] for name in now}
    found = weights(result.folder)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
        assert not torch.equal(found[name], seen[-1][name])
        assert torch.equal(model.state_dict()[name], found[name])  # the module is what was released
    with torch.no_grad():
        model.load_state_dict(found)
        inputs, target = points(50).tensors
        right = (model.eval()(inputs).argmax(1) == target).double().mean()
    assert result.metrics["accuracy"] == pytest.approx(float(right))


@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive"])
def test_the_clip_norm_adapts_within_its_bounds(tmp_path: Path, method: str) -> None:
    clipping = {"clip_ceiling": 2.0, "clip_scale": 0.8, "clip_lowest": 0.3}
    result = fit(tmp_path / "run", method=method, epochs=3, **clipping)
    norms = [epoch["clip_norm"] for epoch in result.summary.history]
    assert norms[0] == 1.0
    assert len(set(norms)) == 3
    assert all(0.3 <= norm <= 2.0 for norm in norms)
    if method == "dpis-adaptive":
        assert_verifies(result.folder)


@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive"])
def test_a_count_is_released_once(tmp_path: Path, method: str) -> None:
    result = fit(tmp_path / "run", method=method, release_n=True)
    labels = [entry.label for entry in ledger(result.folder).entries]
    assert labels[0] == "count"
    assert labels.count("count") == 1
    if method == "dpis-adaptive":
        assert_verifies(result.folder)


@pytest.mark.slow
def test_an_early_stop_keeps_the_claim(tmp_path: Path) -> None:
    result = fit(
        tmp_path / "run",
        epochs=5,
        held_out=points(20),
        metrics={"constant": lambda output, target: torch.ones(len(target))},
        early_stop=EarlyStop(metric="constant", patience=2),
    )
    assert result.epochs == 3
    assert result.summary.stopped_early
    book = ledger(result.folder)
    planned = sum(run.count for run in book.header.planned)
    assert len(book.entries) == 3 * 4 < planned == 5 * 4
    assert book.header.claim.epsilon == 4.0 == result.summary.claim["epsilon"]
    assert_verifies(result.folder)


def law_the_claim_is_the_plans_wherever_a_run_stops(folder: Path) -> None:
    """Also where it stopped by what it saw: then only the plan's claim is true."""
    for epochs, stop in ((2, None), (3, EarlyStop(metric="constant", patience=1))):
        result = fit(
            folder / f"{epochs}",
            epochs=epochs,
            held_out=points(5),
            metrics={"constant": lambda output, target: torch.ones(len(target))},
            early_stop=stop,
        )
        assert result.epochs == 2
        assert result.summary.stopped_early == (stop is not None)
        assert result.claim == ledger(result.folder).header.claim
        assert result.claim.epsilon == 4.0 == result.summary.claim["epsilon"]


def test_the_claim_is_the_plans_wherever_a_run_stops(tmp_path: Path) -> None:
    law_the_claim_is_the_plans_wherever_a_run_stops(tmp_path)


def test_an_early_stop_may_want_less(tmp_path: Path) -> None:
    tried = 0.0  # before the first epoch, and of no account
    values = iter([tried, 3.0, 2.0, 1.0, 1.5, 1.2, 0.1])
    result = fit(
        tmp_path / "run",
        epochs=6,
        held_out=points(1),
        metrics={"error": lambda output, target: torch.tensor([next(values)])},
        early_stop=EarlyStop(metric="error", patience=2, larger_is_better=False),
    )
    assert result.epochs == 5


def test_a_metric_that_is_no_number_is_null(tmp_path: Path) -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        return torch.full((len(target),), math.nan)

    result = fit(tmp_path / "run", held_out=points(5), metrics={"broken": broken})
    assert '"broken": null' in (result.folder / "summary.json").read_text()


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = weights(fit(tmp_path / "run", model, ema=0.5).folder)
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["3.weight"], before["3.weight"])


def test_an_optimizer_may_have_several_groups(tmp_path: Path) -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters()}]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = weights(fit(tmp_path / "run", model, optimizer=torch.optim.SGD(groups, lr=0.1)).folder)
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["3.weight"], before["3.weight"])


def test_a_layer_in_evaluation_mode_stays_there(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(4)
    norm.running_mean += 1.0
    model = nn.Sequential(norm.eval(), linear())
    found = weights(fit(tmp_path / "run", model).folder)
    assert torch.equal(found["0.running_mean"], torch.ones(4))
    assert int(found["0.num_batches_tracked"]) == 0


def test_a_model_in_evaluation_mode_is_trained_with_dropout(tmp_path: Path) -> None:
    asleep = fit(tmp_path / "a", mlp(dropout=0.5).eval())
    awake = fit(tmp_path / "b", mlp(dropout=0.5))
    assert (asleep.folder / "model.safetensors").read_bytes() == (
        awake.folder / "model.safetensors"
    ).read_bytes()
