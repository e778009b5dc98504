"""What is run: every cell is a `dpis train` that a person could type."""

import json
import shlex
from pathlib import Path

import pytest
import typer

from dpis.app.entry import app
from dpis.app.jobs.job_options import JobOptions
from dpis.errors import InputError
from reproduction.__main__ import main
from reproduction.published import TABLE_3_EPSILONS
from reproduction.recipes import PAPER, RECIPES, RECORDS, TABLE_3
from reproduction.results import load_rows
from reproduction.table_cells import (
    TABLES,
    WORDS,
    CellChoice,
    about_seconds,
    cells_of,
    for_validation,
    in_todays_words,
    key_of,
)

RESULTS = Path(__file__).parents[2] / "results"
TRAIN = typer.main.get_command(app).commands["train"]


def every_cell():
    return [cell for table in TABLES for cell in cells_of(table, CellChoice())]


def parsed(command):
    """What `dpis train` understands of it."""
    context = TRAIN.make_context("train", shlex.split(command)[2:])
    unsaid = (None, False)
    return {
        name: value
        for name, value in context.params.items()
        if not any(value is nothing for nothing in unsaid) and value not in ((), [])
    }


def test_every_command_says_exactly_the_options_of_its_cell():
    for cell in every_cell():
        said = parsed(cell.command)
        assert JobOptions.from_json({**said, "out": "out"}) == cell.job(Path("out"))
        words = {WORDS.get(k, k) for k, v in cell.options.items() if v is not False}
        assert set(said) == words


def test_the_commands_of_rows_can_be_typed_today():
    for row in load_rows(RESULTS, with_tuning=True):
        said = parsed(in_todays_words(row["command"]))
        asked = {WORDS.get(name, name): value for name, value in row["options"].items()}
        assert {name: str(value) for name, value in said.items()} == {
            name: str(value) for name, value in asked.items() if value is not False
        }


def test_options_are_accepted_and_the_keys_tell_runs_apart():
    cells = every_cell()
    for cell in cells:
        cell.job(Path("out"))
        json.dumps(cell.json_options, allow_nan=False)
    by_key = {}
    for cell in cells:
        by_key.setdefault(cell.key, set()).add((cell.dataset, cell.method, cell.epsilon, cell.seed))
    assert all(len(same) == 1 for same in by_key.values())


def test_table_3_has_every_method_of_the_paper_at_every_epsilon():
    cells = cells_of(
        "table3", CellChoice(datasets=["fmnist"], recipes=["paper"], accountants=["rdp"])
    )
    methods = {"dp-sgd", "dp-sgd-ts", "dp-sgd-decay", "dp-sgd-hf", "dpis-adaptive"}
    assert {(c.method, c.epsilon) for c in cells if c.epsilon} == {
        (method, epsilon) for method in methods for epsilon in TABLE_3_EPSILONS
    }
    assert [c.epsilon for c in cells if c.method == "sgd"] == [None]


@pytest.mark.parametrize("epsilons", [[1.0, 7.0], [float("nan")], [float("inf")], [-1.0]])
def test_an_epsilon_that_a_table_does_not_have_is_refused(epsilons):
    with pytest.raises(InputError, match=r"one of 0.5, 1, 2, 3, 4 in table3, found"):
        cells_of("table3", CellChoice(epsilons=epsilons))
    with pytest.raises(InputError, match=r"epsilon must be one of 1 in table5, found 3"):
        cells_of("table5", CellChoice(epsilons=[3.0]))


def test_what_has_no_epsilon_is_not_among_those_of_one_unless_named():
    asked = cells_of("table3", CellChoice(epsilons=[1.0]))
    assert {cell.epsilon for cell in asked} == {1.0}
    named = cells_of("table3", CellChoice(epsilons=[1.0], methods=["sgd", "dpis"]))
    assert {cell.epsilon for cell in named} == {None, 1.0}


def test_a_seed_named_twice_counts_once_and_none_is_negative():
    once = cells_of("table3", CellChoice(seeds=[0]))
    assert cells_of("table3", CellChoice(seeds=[0, 0])) == once
    with pytest.raises(InputError, match="from 0 on, found -1"):
        CellChoice(seeds=[0, -1])


@pytest.mark.parametrize("minutes", ["-5", "nan"])
def test_a_time_that_is_none_is_refused(capsys, minutes):
    assert main(["table3", "--budget-minutes", minutes, "--list"]) == 2
    assert (
        f"--budget-minutes must be a number from 0 on, found {minutes}" in capsys.readouterr().err
    )


def test_the_papers_row_has_the_papers_settings():
    for dataset, a_e, k in (
        ("mnist", 0.8, 5),
        ("fmnist", 1, 5),
        ("cifar10", 0.8, 5),
        ("imdb", 0.8, 3),
    ):
        (cell,) = cells_of(
            "table3",
            CellChoice(
                datasets=[dataset], recipes=["paper"], methods=["dpis-adaptive"], epsilons=[1.0]
            ),
        )
        assert (cell.options["a_e"], cell.options["k"]) == (a_e, k)
        assert cell.options["contribution"] == "reject"
        assert "norm_sum" not in cell.options  # a full pass is the default


def test_rdp_rows_charge_the_count_to_every_method_and_counts_are_declared():
    for cell in every_cell():
        if cell.epsilon is None:
            assert "epsilon" not in cell.options
        else:
            assert cell.options["n_public"] == RECORDS[cell.dataset]
            assert cell.options.get("release_n", False) == (cell.accountant == "rdp")


def test_the_ablation_differs_from_dpis_in_its_sampling_alone():
    for dataset in TABLE_3:
        dpis, uniform = (
            cells_of(
                "table3",
                CellChoice(
                    datasets=[dataset], recipes=[r], methods=["dpis-adaptive"], epsilons=[1.0]
                ),
            )[0]
            for r in ("paper", "same-schedule-uniform")
        )
        differing = {
            name
            for name in {*dpis.options, *uniform.options}
            if dpis.options.get(name) != uniform.options.get(name)
        }
        assert differing == {"k", "contribution"}
        assert uniform.options["k"] == float("inf")


def test_cells_shared_by_two_tables_are_one_run():
    (row,) = cells_of(
        "table3",
        CellChoice(datasets=["mnist"], recipes=["paper"], methods=["dpis-adaptive"], epsilons=[1]),
    )
    for table in ("table4", "table5", "table6"):
        assert row.key in {cell.key for cell in cells_of(table, CellChoice(datasets=["mnist"]))}


def test_cheap_cells_come_first():
    costs = [about_seconds(cell) for cell in cells_of("table3", CellChoice())]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1] / 10


def test_validation_holds_training_records_out():
    (cell,) = cells_of(
        "table3",
        CellChoice(
            datasets=["fmnist"],
            recipes=["paper"],
            methods=["dp-sgd-ts"],
            epsilons=[1],
            accountants=["rdp"],
        ),
    )
    tried = for_validation(cell, ["lr=8", "epochs=3"])
    assert (tried.options["lr"], tried.options["epochs"]) == (8.0, 3)
    assert tried.options["eval_share"] == 0.1
    assert tried.options["n_public"] == 54_000
    assert tried.key != cell.key
    for broken in ("lr", "lr=fast", "model", "model="):
        with pytest.raises(InputError, match="--set must be OPTION=VALUE"):
            for_validation(cell, [broken])
    for option, value in (("clip_norm", "0.2"), ("augmentations", 4), ("optimizer", "adam")):
        assert for_validation(cell, [f"{option}={value}"]).options[option] == value
    for unknown in ("learning_rate=9", "seed=7", "epsilon=8", "diagnostics=0", "bounds=a"):
        with pytest.raises(InputError, match="can be searched over"):
            for_validation(cell, [unknown])


@pytest.mark.parametrize(
    "asked",
    [{"datasets": ["svhn"]}, {"methods": ["dpsur"]}, {"recipes": ["x"]}, {"accountants": ["zcdp"]}],
)
def test_unknown_names_are_refused_with_those_there_are(asked):
    with pytest.raises(InputError, match="must be one of"):
        CellChoice(**asked)


def test_a_choice_without_cells_is_refused():
    with pytest.raises(InputError, match="has no such cells"):
        cells_of("table3", CellChoice(datasets=["imdb"], methods=["dp-sgd-hf"]))


def test_key_does_not_depend_on_the_order_of_options():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_every_recipe_beyond_the_paper_says_what_it_is():
    for recipes in TABLE_3.values():
        for recipe in recipes:
            assert recipe.name == PAPER or RECIPES[recipe.name]
