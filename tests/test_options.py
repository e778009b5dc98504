"""One option table: what is said through any door arrives, and is not said twice."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpis
from dpis.app.jobs import settings
from dpis.app.jobs import training as jobs
from dpis.dropin import request
from dpis.dropin.trainer_settings import TrainerSettings
from dpis.errors import InputError
from dpis.mechanism import Config
from dpis.options import Method, Options, Privacy, Training, knobs
from dpis.training import api
from tools import options_table

RECORDS, BATCH, EPOCHS = 64, 8, 3


# ── a value of every option that is not its default ──────────────────────────────────────────────────

OTHER: dict[str, Any] = {
    "epsilon": 2.5,
    "delta": 2e-5,
    "method": "dpis-adaptive",
    "n_public": RECORDS - 1,
    "release_n": True,
    "accountant": "rdp",
    "decay_rate": 0.02,
    "kappa": 0.5,
    "equivalent_batch": 12.0,
    "headroom": 2.0,
    "floor": 0.1,
    "contribution": "reject",
    "shards": 16,
    "reserve_share": 0.4,
    "rate_cap": 0.7,
    "norm_sum": "stale",
    "clip_norm": 0.3,
    "clip_ceiling": 1.7,
    "clip_lowest": 0.02,
    "clip_scale": 0.8,
}
NEEDS = {"release_n": {"n_public": RECORDS}}


def test_every_option_is_tried_with_another_value_than_its_default() -> None:
    assert OTHER.keys() == knobs(Privacy).keys()
    for field in fields(Privacy):
        assert OTHER[field.name] != field.default


def asked(name: str) -> dict[str, Any]:
    """The option and what it needs, on a method that uses it; noise is planned by RDP where it can be, for speed."""
    method = knobs(Privacy)[name].used_by[0].value
    quick = {} if method == Method.DPIS_ADAPTIVE else {"accountant": "rdp"}
    by_method = {} if name == "method" else {"method": method, **quick}
    return {"n_public": RECORDS, **by_method, **NEEDS.get(name, {}), name: OTHER[name]}


# ── the doors: from what is said to the mechanism's config ───────────────────────────────────────────


class Reached(Exception):  # noqa: N818
    """The config is there: nothing needs to be trained."""


def through_train(said: dict[str, Any], patch: pytest.MonkeyPatch) -> Config:
    """`dpis.train`: as single words where it has them, else in `Privacy`."""
    words = {name: said[name] for name in ("epsilon", "delta", "n_public") if name in said}
    privacy = Privacy(**{name: value for name, value in said.items() if name not in words})
    found: list[Config] = []

    def opened(out: Any, resume: bool, config: Config, *_: Any) -> Any:
        found.append(config)
        raise Reached

    patch.setattr(api, "_open", opened)
    with pytest.raises(Reached):
        dpis.train(
            nn.Linear(4, 2), data(), nn.CrossEntropyLoss(), **words, privacy=privacy,
            batch_size=BATCH, epochs=EPOCHS,
        )  # fmt: skip
    return found[0]


def through_the_command_line(said: dict[str, Any], patch: pytest.MonkeyPatch) -> Config:
    """`dpis train`, as a person types it."""
    from typer.main import get_command

    from dpis.app.entry import app

    found: list[Config] = []

    def opened(self: Any, resume: Any, config: Config, source: Any, population: int) -> Any:
        found.append(config)
        raise Reached

    patch.setattr(jobs._Job, "_open", opened)
    more = ["--model", "linear", "--lr", "1"]
    with pytest.raises(Reached):
        get_command(app).main(["train", *more, *flags_of(said)], standalone_mode=False)
    return found[0]


def through_a_plan(said: dict[str, Any], patch: pytest.MonkeyPatch) -> Config:
    """`dpis plan`: what it shows is the plan of a run with the same options."""
    from typer.main import get_command

    from dpis.app.commands import plan_tables
    from dpis.app.entry import app

    found: list[Config] = []

    def made(config: Config) -> Any:
        found.append(config)
        raise Reached

    patch.setattr(plan_tables, "make_plan", made)
    with pytest.raises(Reached):
        get_command(app).main(["plan", *flags_of(said)], standalone_mode=False)
    return found[0]


def flags_of(said: dict[str, Any]) -> list[str]:
    flags = ["--batch-size", str(BATCH), "--epochs", str(EPOCHS)]
    for name, value in said.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def through_the_engine(said: dict[str, Any], patch: pytest.MonkeyPatch) -> Config:
    """`make_private_with_epsilon`, with Opacus's names where it has them."""
    theirs = {request.IN_OPACUS.get(name, name): value for name, value in said.items()}
    usual = {"target_epsilon": 3.0, "target_delta": 1e-5, "max_grad_norm": 1.0}
    engine = dpis.PrivacyEngine()
    engine.make_private_with_epsilon(**loop(), epochs=EPOCHS, **{**usual, **theirs})
    return config_of(engine)


def through_given_noise(said: dict[str, Any], patch: pytest.MonkeyPatch) -> Config:
    """`make_private`, where the options stand in `Privacy`."""
    said = {name: value for name, value in said.items() if name != "accountant"}
    clip_norm = said.pop("clip_norm", 1.0)
    engine = dpis.PrivacyEngine()
    engine.make_private(
        **loop(), noise_multiplier=1.0, max_grad_norm=clip_norm, privacy=Privacy(**said)
    )
    return config_of(engine)


def through_a_trainer(said: dict[str, Any], patch: pytest.MonkeyPatch) -> Config:
    """What the callback of Lightning and the trainer of Hugging Face do."""
    engine, made = dpis.PrivacyEngine(), loop()
    TrainerSettings(privacy=Privacy(**{"epsilon": 3.0, **said})).make_private(
        engine, made["module"], made["optimizer"], made["data_loader"], EPOCHS
    )
    return config_of(engine)


def data() -> TensorDataset:
    return TensorDataset(torch.zeros(RECORDS, 4), torch.zeros(RECORDS).long())


def loop() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=BATCH)
    return {"module": model, "optimizer": optimizer, "data_loader": loader}


def config_of(engine: dpis.PrivacyEngine) -> Config:
    return engine._runs[-1].session.mechanism.plan.config


Door = Callable[[dict[str, Any], pytest.MonkeyPatch], Config]
NOT_IN_A_LOOP = set(request.ONLY_IN_TRAIN)
NOT_WITHOUT_A_HORIZON = NOT_IN_A_LOOP | {
    "accountant", "decay_rate", "delta", "epsilon", "method", "norm_sum", "rate_cap", "reserve_share",
}  # fmt: skip
DOORS: dict[str, tuple[Door, set[str]]] = {
    "dpis.train": (through_train, set()),
    "command line": (through_the_command_line, set()),
    "dpis plan": (through_a_plan, set()),
    "make_private_with_epsilon": (through_the_engine, NOT_IN_A_LOOP),
    "make_private": (through_given_noise, NOT_WITHOUT_A_HORIZON),
    "trainers": (through_a_trainer, NOT_IN_A_LOOP),
}
WAYS = [
    pytest.param(door, name, id=f"{where}: {name}")
    for where, (door, absent) in DOORS.items()
    for name in OTHER
    if name not in absent
]


def law_an_option_arrives(door: Door, name: str, patch: pytest.MonkeyPatch) -> None:
    """In the config that the plan, the sampler and the noise are made from; what was not said is as the table says."""
    said = asked(name)
    config = door(said, patch)
    assert str(getattr(config, name)) == str(OTHER[name])
    assert (config.batch_size, config.epochs) in ((BATCH, EPOCHS), (BATCH, 1))
    for field in fields(Privacy):
        if field.name not in {*said, "clip_norm", "norm_sum"}:
            assert getattr(config, field.name) == field.default, field.name


@pytest.mark.filterwarnings("ignore:the number of records")
@pytest.mark.parametrize(("door", "name"), WAYS)
def test_an_option_arrives(door: Door, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law_an_option_arrives(door, name, monkeypatch)


@pytest.mark.parametrize("where", DOORS)
def test_a_lost_option_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the floor is left to its default on the way from any door to the config."""
    settle = Config.settle.__func__  # type: ignore[attr-defined]

    def forgets(cls: Any, privacy: Privacy, **given: Any) -> Config:
        return settle(cls, replace(privacy, floor=Privacy.floor), **given)

    monkeypatch.setattr(Config, "settle", classmethod(forgets))
    with pytest.raises(AssertionError):
        law_an_option_arrives(DOORS[where][0], "floor", monkeypatch)


@pytest.mark.parametrize("where", ["dpis.train", "command line"])
def test_the_clip_norm_adapts_by_a_word(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"n_public": RECORDS, "accountant": "rdp", "clip_norm": "auto"}
    clipping = DOORS[where][0](said, monkeypatch).clipping
    assert clipping is not None
    assert clipping.scale == 1.0
    assert clipping.ceiling == pytest.approx(400 * clipping.lowest)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────


def test_options_of_training_arrive_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are read back from what the job is made of."""
    from dpis.app.jobs.job_options import JobOptions

    said = {"epochs": 7, "batch_size": 9, "lr": 0.5, "optimizer": "adam", "ema": 0.9}
    said |= {"augment": "shift", "augmentations": 3, "physical_batch": 11, "device": "cpu"}
    said |= {"diagnostics": True, "max_rows_per_user": 2, "keep_checkpoint": True}
    said |= {"check_data": True}
    assert said.keys() == {n for n, one in knobs(Training).items() if not one.python_only}
    options = JobOptions.from_json(JobOptions.from_json(said).as_json())
    assert {name: getattr(options, name) for name in said} == said
    assert options.said == said.keys()
    assert settings.average_decay(options) == 0.9


def test_options_of_training_arrive_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the task and its records: every field of `Training` is looked at by somebody."""
    tasks: list[Any] = []
    keep: list[Any] = []

    class Trainer:
        def __init__(
            self, run: Any, task: Any, *, reporter: Any, keep_checkpoint: bool, check_data: bool
        ) -> None:
            tasks.append(task)
            keep.extend([run, reporter, keep_checkpoint, check_data])

        def train(self) -> None:
            return None

    opened: list[Any] = []
    monkeypatch.setattr(api, "Trainer", Trainer)
    monkeypatch.setattr(api, "_open", lambda *given: opened.append(given))
    stop, reporter = dpis.EarlyStop(metric="zero"), api.Silent()

    def collate(items: Any) -> Any:
        return torch.utils.data.default_collate(items)

    said: dict[str, Any] = {
        "scheduler": lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5),
        "scheduler_interval": "step",
        "optimizer": "adam",
        "ema": 0.9,
        "early_stop": stop,
        "metrics": {"zero": lambda output, target: output[:, 0]},
        "augment": lambda batch, generator: batch,
        "augmentations": 3,
        "views": 1,
        "user_ids": tuple(range(RECORDS)),
        "max_rows_per_user": 2,
        "collate_fn": collate,
        "batch_shaped": True,
        "physical_batch": 11,
        "device": "cpu",
        "diagnostics": True,
        "keep_checkpoint": True,
        "check_data": True,
        "progress": reporter,
    }
    assert said.keys() | {"epochs", "batch_size", "lr", "objective"} == knobs(Training).keys()
    dpis.train(
        nn.Linear(4, 2), data(), nn.CrossEntropyLoss(), held_out=data(), n_public=RECORDS, lr=0.25,
        epochs=EPOCHS, batch_size=BATCH, training=Training(**said), resume=True,
    )  # fmt: skip
    task, records = tasks[0], tasks[0].records
    for name in ("scheduler_interval", "early_stop", "physical_batch"):
        assert getattr(task, name) == said[name]
    for name in (
        "augment", "augmentations", "views", "user_ids", "max_rows_per_user", "collate_fn",
        "batch_shaped",
    ):  # fmt: skip
        assert getattr(records, name) == said[name], name
    assert type(task.optimizer) is torch.optim.Adam
    assert task.optimizer.param_groups[0]["initial_lr"] == 0.25
    assert task.scheduler.gamma == 0.5
    assert task.average.decay == 0.9
    assert task.held_out.metrics == said["metrics"]
    assert keep[1:] == [reporter, True, True]
    _, _, config, _, _, diagnostics, *_ = opened[0]
    assert (config.epochs, config.batch_size, diagnostics) == (EPOCHS, BATCH, True)


# ── said once, and said so that it counts ────────────────────────────────────────────────────────────


def test_what_is_said_twice_and_differently_is_refused() -> None:
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    for word, table in (
        ({"epsilon": 1.0}, {"privacy": Privacy(epsilon=3.0)}),  # the default, but said
        ({"n_public": 10}, {"privacy": Privacy(n_public=20)}),
        ({"epochs": 1}, {"training": Training(epochs=2)}),
    ):
        with pytest.raises(InputError, match=f"{next(iter(word))} is said twice") as error:
            dpis.train(model, data(), loss, **word, **table)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"floor": 0.0}, "floor must be above 0 and at most 1, found 0.0"),
        ({"headroom": 0.5}, "headroom must be at least 1, found 0.5"),
        ({"headroom": float("nan")}, "headroom must be at least 1, found nan"),
        ({"clip_norm": float("inf")}, "clip_norm must be a finite number above 0, or 'auto'"),
        ({"clip_norm": "some"}, "clip_norm must be a finite number above 0, or 'auto'"),
        ({"method": "dp"}, "method must be one of dpis, dpis-adaptive, dp-sgd"),
        ({"shards": 48}, "shards must be a power of two, at least 1 and at most 65536, found 48"),
        ({"shards": 0}, "shards must be a power of two"),
        ({"shards": 2**17}, "shards must be a power of two"),
        ({"contribution": "all"}, "contribution must be one of weight, reject"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Privacy(**wrong)


def test_what_was_said_is_known_and_survives_copies() -> None:
    import copy
    import pickle

    privacy = Privacy(epsilon=3.0, headroom=float("inf"))
    assert privacy.said == {"epsilon", "headroom"}
    assert copy.deepcopy(privacy).said == pickle.loads(pickle.dumps(privacy)).said == privacy.said
    assert privacy.adding(delta=None, floor=0.2).said == {"epsilon", "headroom", "floor"}
    assert replace(privacy, floor=0.2).said == {"epsilon", "headroom", "floor"}
    replace(Privacy(method="dp-sgd"), epsilon=1.0).refuse_unused(Method.DP_SGD)


# ── the table itself ─────────────────────────────────────────────────────────────────────────────────


def test_every_option_says_what_it_is() -> None:
    from dpis.app.jobs.job_options import JobOptions

    for table in (Privacy, Training, JobOptions):
        assert {field.name for field in fields(table)} == knobs(table).keys()
        for one in knobs(table).values():
            assert one.help.endswith(".")
            assert one.group
    assert issubclass(Config, Privacy)
    assert issubclass(Privacy, Options)


def test_the_page_of_options_is_fresh() -> None:
    """`python tools/options_table.py` writes it."""
    assert options_table.PAGE.read_text() == options_table.page()


def test_the_table_and_the_help_load_no_torch() -> None:
    code = (
        "import sys, dpis.options, dpis.app.entry as e; e.main(['train', '--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for heading in ("Guarantee:", "Sampling:", "Clipping:", "Training:", "Your own file:"):
        assert heading in done.stdout.decode()


def test_no_function_of_a_door_has_more_than_fifteen_arguments() -> None:
    import inspect

    for door in (
        dpis.train,
        dpis.PrivacyEngine.make_private,
        dpis.PrivacyEngine.make_private_with_epsilon,
    ):
        assert len(inspect.signature(door).parameters) <= 15 + ("self" in str(door))


# ── values ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"n_public": 60.0}, 60),
        ({"epsilon": 2}, 2.0),
        ({"epsilon": np.float32(2)}, 2.0),
        ({"headroom": 5}, 5.0),
        ({"delta": "1e-6"}, 1e-6),
    ],
    ids=str,
)
def test_equal_values_are_one(said: dict[str, Any], found: float) -> None:
    """Plans are remembered by their settings: 60 and 60.0 must not be two, nor True one of them."""
    (value,) = (getattr(Privacy(**said), name) for name in said)
    assert (value, type(value)) == (found, type(found))


@pytest.mark.parametrize(
    "said",
    [
        {"epsilon": True}, {"epsilon": None}, {"delta": "small"}, {"n_public": 60.5}, {"n_public": "many"},
        {"release_n": "no"}, {"release_n": 1}, {"rate_cap": None}, {"method": None}, {"headroom": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_value_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must"):
        Privacy(**said)


@pytest.mark.parametrize(
    "said", [{"diagnostics": "False"}, {"batch_shaped": "no"}, {"epochs": 2.5}]
)
def test_what_is_no_truth_value_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must"):
        Training(**said)


@pytest.mark.parametrize("missing", ["target_epsilon", "target_delta"])
def test_a_target_is_said(missing: str) -> None:
    targets = {"target_epsilon": 3.0, "target_delta": 1e-5, missing: None}
    with pytest.raises(InputError, match=missing):
        dpis.PrivacyEngine().make_private_with_epsilon(
            **loop(), **targets, epochs=EPOCHS, max_grad_norm=1.0, n_public=RECORDS
        )


def test_a_trainer_wants_a_budget_or_a_noise() -> None:
    with pytest.raises(InputError, match="found neither"):
        TrainerSettings(privacy=Privacy(headroom=3.0))
