"""A row says what its ledger says: whatever was changed in it is found."""

import copy
import lzma
from pathlib import Path

import pytest

from dpis.accounting import verify_ledger
from reproduction.ledgers import contradiction
from reproduction.results import ledger_path, load_rows

RESULTS = Path(__file__).parents[2] / "results"
KINDS = {"pld": ("dpis", "pld"), "rdp": ("dp-sgd-hf", "rdp"), "adaptive": ("dpis-adaptive", "rdp")}


@pytest.fixture(scope="module", params=KINDS)
def row_and_verdict(request, tmp_path_factory):
    row = next(
        row
        for row in load_rows(RESULTS)
        if (row["method"], row["accountant"]) == KINDS[request.param]
    )
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    path.write_bytes(lzma.decompress(ledger_path(RESULTS, row).read_bytes()))
    return row, verify_ledger(path)


def test_a_row_as_it_was_written_agrees(row_and_verdict):
    assert contradiction(*row_and_verdict) is None


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("row", "epsilon", 0.9),
        ("row", "accountant", "other"),
        ("row", "method", "dp-sgd-ts"),
        ("row", "seed", 77),
        ("claim", "epsilon", 0.9),
        ("claim", "n_public", 7),
        ("claim", "n_public_source", "dataset-length"),
        ("claim", "adjacency", "zero-out"),
        ("claim", "mode", "other"),
        ("claim", "protects", "one user with all of their rows"),
        ("options", "epsilon", 0.9),
        ("options", "dataset", "cifar10"),
    ],
)
def test_whatever_was_changed_is_found(row_and_verdict, part, name, value):
    row, verdict = copy.deepcopy(row_and_verdict[0]), row_and_verdict[1]
    (row if part == "row" else row[part])[name] = value
    assert contradiction(row, verdict)


def test_a_given_number_of_records_stands_in_the_options_too(row_and_verdict):
    row, verdict = copy.deepcopy(row_and_verdict[0]), row_and_verdict[1]
    row["options"]["n_public"] = 7
    given = row["claim"]["n_public_source"] == "given"
    assert (contradiction(row, verdict) is not None) == given


def test_an_accountant_changed_wherever_it_is_named_shows_by_the_noise(row_and_verdict):
    row, verdict = copy.deepcopy(row_and_verdict[0]), row_and_verdict[1]
    other = {"pld": "rdp", "rdp": "pld"}[row["accountant"]]
    row["accountant"] = row["options"]["accountant"] = other
    assert repr(other) in contradiction(row, verdict)
