import pytest

from reproduction.recipes import OURS, TABLE_3
from reproduction.rows import Measured, measured, mixed, runs_of
from reproduction.tables import Comparison, sections, signed, verdict
from tests.app.page.made_up import row


def line_of(section, name, block=0, table=0):
    lines = section.blocks[block].tables[table].lines
    return next(line for line in lines if line.name == name)


def of_dataset(section, title, block):
    return next(table for table in section.blocks[block].tables if table.title == title)


@pytest.mark.parametrize(
    ("values", "expected", "spread"),
    [
        ([0.5], Measured(50.0, 1, None), ""),
        ([0.5, 0.52], Measured(51.0, 2, 2.0), "range 2.00"),
        ([0.5, 0.51, 0.52], Measured(51.0, 3, 1.0), "std 1.00"),
    ],
)
def test_mean_and_spread_are_computed_from_rows(values, expected, spread):
    found = measured([row(seed=i, test_accuracy=v) for i, v in enumerate(values)])
    assert found.mean == pytest.approx(expected.mean)
    assert found.seeds == expected.seeds
    assert found.spread == (None if expected.spread is None else pytest.approx(expected.spread))
    assert found.spread_text == spread


def test_a_difference_has_the_sign_that_is_shown():
    def difference(mean, paper):
        return Comparison(Measured(mean, 1, None), paper).difference

    assert signed(difference(86.6, 86.6)) == "+0.00"
    assert signed(difference(86.597, 86.6)) == "+0.00"  # what is shown decides
    assert signed(difference(86.5, 86.6)) == "−0.10"
    assert signed(difference(86.64, 86.6)) == "+0.04"
    assert Comparison(None, 86.6).difference is None


def test_without_rows_every_published_cell_is_there_and_not_run():
    for section in sections([]):
        for block in section.blocks:
            for table in block.tables:
                for line in table.lines:
                    shown = [cell for cell in line.cells if cell.published is not None]
                    assert shown
                    assert all(cell.ours is None for cell in shown)
                    if not line.reference:
                        assert {cell.absent for cell in shown} <= {"not run", "RDP only"}


def test_the_two_accounts_are_never_averaged():
    rows = [row(accountant="rdp", test_accuracy=0.8), row(accountant="pld", test_accuracy=0.9)]
    table_3 = sections(rows)[0]
    for block, mean in ((0, 80.0), (1, 90.0)):
        line = line_of(table_3, "DP-SGD", block, table=1)
        assert line.cells[1].ours == Measured(pytest.approx(mean), 1, None)


def test_recipes_beyond_the_paper_have_their_own_lines_before_dpsur():
    rows = [row(method="dp-sgd-hf", recipe="linear"), row(method="dpis", accountant="rdp")]
    table = of_dataset(sections(rows)[0], "Fashion-MNIST", 0)
    names = [line.name for line in table.lines]
    assert names[-3:] == ["DP-SGD-HF, linear", "DPIS, noise fixed beforehand", "DPSUR"]
    assert [line.beyond for line in table.lines[-3:]] == [True, True, False]
    assert all(line.cells[1].published is None for line in table.lines[-3:-1])
    assert line_of(sections(rows)[0], "DP-SGD-HF", 0, 1).cells[1].ours is None


def test_unverified_rows_and_impossible_accuracies_do_not_count():
    bad = [
        row(verified=False),
        row(verified=None),
        row(test_accuracy=None),
        row(test_accuracy=86.6),
        row(options={"eval_share": 0.1}),  # measured on held-out training records
    ]
    assert line_of(sections(bad)[0], "DP-SGD", 0, 1).cells[1].ours is None


def test_sgd_needs_no_ledger_and_stands_in_both_blocks():
    rows = [row(method="sgd", epsilon=None, accountant=None, claim=None, verified=False)]
    for block in (0, 1):
        assert line_of(sections(rows)[0], "non-private", block, 1).cells[-1].ours.mean == 50.0


def test_tables_4_to_6_find_their_cells_by_options():
    fields = {"method": "dpis-adaptive", "test_accuracy": 0.87}
    rows = [
        row(
            table="table4",
            recipe="adaptive-clipping",
            options={"clip_norm": "1", "c_star": 4.0},
            **fields,
        ),
        row(table="table4", recipe="fixed-clipping", options={"clip_norm": "0.1"}, **fields),
        row(table="table5", options={"a_e": 0.6}, **fields),
        row(table="table6", options={}, **fields),  # the default k is 5
    ]
    _, four, five, six, _ = sections(rows)
    by_kind = {(line.name, line.detail): line for line in four.blocks[0].tables[0].lines}
    for kind in ("adaptive clip norm", "fixed clip norm"):
        assert by_kind["Fashion-MNIST", kind].cells[1].ours is not None
    assert len(by_kind) == 8
    assert [cell.ours is not None for cell in line_of(five, "Fashion-MNIST").cells] == [
        False,
        True,
        False,
        False,
    ]
    assert [cell.ours is not None for cell in line_of(six, "Fashion-MNIST").cells] == [
        False,
        False,
        True,
        False,
    ]


def test_values_that_the_paper_has_not_are_shown_too():
    rows = [
        row(epsilon=8.0),
        row(dataset="fmnist-sample"),
        row(table="table6", options={"k": "inf"}),
    ]
    three, _, _, six, _ = sections(rows)
    assert "ε\u00a0=\u00a08" in of_dataset(three, "Fashion-MNIST", 0).heads
    assert of_dataset(three, "fmnist-sample", 0)
    assert "k = inf" in six.blocks[0].tables[0].heads


def test_a_mean_is_over_seeds_of_one_setting():
    twice = [row(seed=1, test_accuracy=0.5), row(seed=1, test_accuracy=0.5)]
    assert measured(twice) == Measured(50.0, 1, None)
    older = row(seed=1, test_accuracy=0.2, options={"lr": 1.0})
    newer = row(seed=2, test_accuracy=0.8, options={"lr": 2.0})
    assert measured([older, newer]) == Measured(pytest.approx(80.0), 1, None)


def test_rows_that_do_not_belong_together_are_named():
    assert mixed([row(seed=1), row(seed=2)]) == []
    assert "a seed stands there twice" in mixed([row(seed=1), row(seed=1)])[0]
    settings = mixed([row(seed=1, options={"lr": 1.0}), row(seed=2, options={"lr": 2.0})])
    assert "2 different settings" in settings[0]
    varied = [row(table="table5", options={"a_e": a_e}) for a_e in (0.0, 0.6)]
    assert mixed(varied) == []


def test_a_run_in_two_tables_was_run_once():
    options = {"seed": 1, "method": "dpis-adaptive"}
    rows = [
        row(options=options),
        row(table="table5", options=options),
        row(options={**options, "seed": 2}),
    ]
    assert len(runs_of(rows)) == 2


def test_a_verdict_counts_cells_and_names_those_below():
    rows = [
        row(method="dp-sgd", accountant="rdp", test_accuracy=0.99),
        row(method="dp-sgd-hf", accountant="rdp", test_accuracy=0.80),
        row(method="dp-sgd-hf", accountant="rdp", test_accuracy=0.80, epsilon=3.0),
        row(method="dpis", recipe="linear", accountant="rdp", test_accuracy=0.10),
        row(method="sgd", epsilon=None, test_accuracy=0.90),
    ]
    assert verdict(sections(rows)[0]) == (
        "1 of 3 private cells and 0 of 1 non-private cells that were run are at or above the paper's. "
        "Below: Fashion-MNIST, DP-SGD-HF, RDP: ε\u00a0=\u00a01 (−6.00), ε\u00a0=\u00a03 (−8.30); "
        "Fashion-MNIST, non-private (−0.90)."
    )
    assert verdict(sections([])[0]) == ""


def test_lines_of_one_name_are_counted_apart():
    """Table 4 has two lines for a data set: none may hide the other."""
    one = {"table": "table4", "method": "dpis-adaptive", "accountant": "rdp"}
    rows = [
        row(**one, recipe="adaptive-clipping", test_accuracy=0.1, options={"c_star": 0.4}),
        row(**one, recipe="fixed-clipping", test_accuracy=0.99),
    ]
    said = verdict(sections(rows)[1])
    assert said.startswith("1 of 2 private cells that were run are at or above the paper's.")
    assert "Below: Fashion-MNIST (adaptive clip norm), RDP: ε\u00a0=\u00a01 (−76.50)." in said


def test_our_recipes_stand_beside_the_highest_published_figures():
    """One recipe a data set, of predeclared DPIS under PLD: no other row may lend it a better figure."""
    mine = {"dataset": "fmnist", "method": "dpis", "recipe": "linear", "accountant": "pld"}
    rows = [
        row(**mine, epsilon=1.0, test_accuracy=0.884),
        row(**mine, epsilon=4.0, test_accuracy=0.9),
        row(**{**mine, "recipe": "ema"}, epsilon=2.0, test_accuracy=0.99),
        row(**{**mine, "accountant": "rdp"}, epsilon=2.0, test_accuracy=0.99),
        row(**{**mine, "method": "dp-sgd"}, epsilon=2.0, test_accuracy=0.99),
    ]
    ours = sections(rows)[-1]
    cells = line_of(ours, "Fashion-MNIST").cells
    assert [cell.ours and round(cell.ours.mean, 2) for cell in cells] == [
        None,
        88.4,
        None,
        None,
        90.0,
    ]
    assert cells[1].published_text == "DPSUR 88.38"
    assert verdict(ours) == (
        "1 of 2 private cells that were run are at or above DPSUR's. "
        "Below: Fashion-MNIST, PLD: ε\u00a0=\u00a04 (−0.18)."
    )


def test_every_data_set_has_a_recipe_of_ours():
    assert set(OURS) == set(TABLE_3)
    for dataset, name in OURS.items():
        assert any((r.name, r.method) == (name, "dpis") for r in TABLE_3[dataset])
