"""Settings were chosen on held-out training records: of what was tried there, none is better beyond chance."""

import math
from collections import defaultdict
from pathlib import Path

import pytest

from reproduction.ledgers import check_ledgers
from reproduction.pages import render_text
from reproduction.recipes import RECORDS
from reproduction.results import ledger_path, load_rows
from reproduction.table_cells import CellChoice, cells_of, for_validation, key_of

RESULTS = Path(__file__).parents[2] / "results"
ROWS = load_rows(RESULTS, with_tuning=True)
VALIDATED = 0.1
"""The share of the training records that accuracy was measured on."""
TRIED = [row for row in ROWS if "eval_share" in row["options"]]


def searches():
    """What was tried for one row of a table, at one epsilon, with one seed."""
    by_row = defaultdict(list)
    for row in TRIED:
        named = (
            row[name] for name in ("dataset", "method", "recipe", "accountant", "epsilon", "seed")
        )
        by_row[tuple(named)].append(row)
    return {which: rows for which, rows in by_row.items() if len(rows) > 1}


def test_nothing_was_chosen_on_test_records():
    for row in TRIED:
        assert "training records" in row["measured_on"]
        assert row["options"].get("n_public", 0) < 60_000  # without privacy nothing is declared


@pytest.mark.parametrize("which", searches())
def test_no_setting_tried_was_better_than_the_one_in_use_by_a_standard_error(which):
    """Within one, the cheaper may be kept."""
    dataset, method, recipe, accountant, epsilon, seed = which
    private = epsilon is not None
    accountants, epsilons = ([accountant], [epsilon]) if private else (None, None)
    choice = CellChoice([dataset], [method], [recipe], accountants, epsilons, [seed])
    (cell,) = cells_of("table3", choice)
    in_use = for_validation(cell, ()).key
    accuracy = {key_of(row["options"]): row["test_accuracy"] for row in searches()[which]}
    assert in_use in accuracy, "others were tried, and the setting in use was not"
    best = max(accuracy.values())
    error = math.sqrt(best * (1 - best) / (VALIDATED * RECORDS[dataset]))
    assert accuracy[in_use] >= best - error


def test_rows_are_unique():
    seen = [(row["table"], row["recipe"], key_of(row["options"])) for row in ROWS]
    assert len(set(seen)) == len(seen)


def test_the_tables_beside_the_rows_are_rendered_from_them():
    rows = load_rows(RESULTS)
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == render_text(rows) + "\n"


def test_every_private_row_comes_with_its_ledger():
    for row in ROWS:
        assert row["epsilon"] is None or ledger_path(RESULTS, row).exists()


@pytest.mark.slow
def test_every_ledger_in_the_repository_holds():
    count, problems = check_ledgers(RESULTS)
    assert count
    assert problems == []
