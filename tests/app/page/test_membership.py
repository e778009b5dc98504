"""What a page says of attacks: derived from the ledger for every run, measured where there was an audit."""

import dataclasses
import json

import pytest

from dpis.auditing import Findings
from dpis.auditing.findings import FILE
from tests.accounting.test_verify import predeclared_header

from .test_charts import HOSTILE
from .test_run_page import make_run, report, shown

FOUND = Findings(
    attack="white-box",
    epsilon=1.0,
    delta=1e-5,
    bound=0.5,
    bound_delta=1e-5,
    claim_at_bound_delta=1.0,
    curve_bound=0.7,
    estimate=0.9,
    ceiling=0.55,
    curve_ceiling=0.75,
    confidence=0.95,
    canaries=1000,
    guesses=200,
    right=150,
    advantage=0.2,
    true_positives=0.03,
    claim_curve=((0.01, 0.03), (1.0, 1.0)),
    attack_points=((0.01, 0.02), (0.1, 0.15)),
    accuracy=(0.8, 0.81),
)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_every_run_says_what_its_claim_leaves_to_an_attacker(run, capsys):
    page = shown(run, capsys)
    assert "Membership advantage (TPR - FPR), at most 0." in page
    assert "True positive rate at a false positive rate of 0.01, at most 0.0" in page
    assert "guessing" in page
    assert "audit" not in page.lower()


def test_an_audit_is_shown_beside_the_claim(run, capsys):
    FOUND.write(run / FILE)
    page = shown(run, capsys)
    for part in (
        "The claim survives the audit.",
        "1,000 canaries were planted",
        "Epsilon at least, with 95 % confidence 0.5",
        "150 of 200",
        "80.0 % with canaries, 81.0 % without",
        "the attack",
    ):
        assert part in page
    dataclasses.replace(FOUND, curve_bound=1.2).write(run / FILE)
    assert "The claim does NOT survive the audit." in shown(run, capsys)


def test_an_audited_run_is_not_for_release(tmp_path, capsys):
    header = dataclasses.replace(predeclared_header(), audited=True)
    page = shown(make_run(tmp_path / "marked", header=header), capsys)
    assert "NOT FOR RELEASE: canaries were planted among its records (audit)" in page


@pytest.mark.parametrize("value", [HOSTILE, [HOSTILE], {}])
def test_findings_that_are_none_are_refused(run, capsys, value):
    (run / FILE).write_text(json.dumps({**FOUND.to_json(), "bound": value}))
    code, _, err = report(run, capsys)
    assert code == 2
    assert "no findings of an audit" in err


def test_words_of_an_audit_are_shown_as_words(run, capsys):
    dataclasses.replace(FOUND, attack=HOSTILE, notes=(HOSTILE,)).write(run / FILE)
    shown(run, capsys)
