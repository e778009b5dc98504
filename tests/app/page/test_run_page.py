import hashlib
import json

import pytest

from dpis.accounting import Adjacency, CountSource
from dpis.app import main
from tests.accounting.test_verify import MODEL, predeclared_header, write_run

from .html_checks import check_page
from .made_up import adaptive_history
from .test_charts import HOSTILE

SUMMARY = {
    "method": "dpis",
    "claim": {"epsilon": 1.0, "delta": 1e-5, "protects": "one record", "n_public": 40_000},
    "not_for_release": [],
    "metrics": {"accuracy": 0.8123},
    "notes": ["Held-out records are not protected.", "The claim is that of the whole plan."],
    "config": {"method": "dpis", "epsilon": 1.0, "batch_size": 2000, "clip_norm": 0.1, "a_e": 0.8},
    "recipe": {"data": "some data", "measured_on": "2,000 test images"},
    "history": adaptive_history(1.0, (1.0, 0.5)),
    "stopped_early": False,
    "model_sha256": hashlib.sha256(MODEL).hexdigest(),
    "versions": {"dpis": "0.1.0"},
}


def make_run(folder, summary=None, header=None, **ledger):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(MODEL)
    (folder / "summary.json").write_text(json.dumps(SUMMARY if summary is None else summary))
    write_run(folder / "ledger.jsonl", predeclared_header() if header is None else header, **ledger)
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def report(run, capsys, *flags):
    code = main(["report", str(run), *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def shown(run, capsys, *, code=0):
    assert report(run, capsys)[0] == code
    return " ".join(" ".join(check_page((run / "report.html").read_text()).text).split())


def test_a_page_says_what_came_out_and_what_is_guaranteed(run, capsys):
    page = shown(run, capsys)
    for part in (
        "Accuracy 81.2 %",
        "Measured on 2,000 test images",
        "The ledger verifies.",
        "(epsilon = 1, delta = 1e-05) differential privacy. Whether or not one record was in",
        "2.72 times as likely",
        "Held-out records are not protected.",
        "40,000 (declared beforehand)",
        "every noise level was fixed before the data was touched",
        "Norm utilisation kappa",
        "clip norm 0.1",
        "dpis verify ledger.jsonl --model model.safetensors",
    ):
        assert part in page, part
    assert "NOT FOR RELEASE" not in page
    assert "a_E" not in page  # of no use to this method


def test_the_page_is_written_where_it_was_asked_for(run, tmp_path, capsys):
    code, out, _ = report(run, capsys, "--out", str(tmp_path / "p.html"))
    assert (code, out) == (0, f"wrote {tmp_path / 'p.html'}\n")
    assert not (run / "report.html").exists()
    first = (tmp_path / "p.html").read_bytes()
    report(run, capsys, "--out", str(tmp_path / "p.html"))
    assert (tmp_path / "p.html").read_bytes() == first  # no times, nothing that changes


def test_marks_come_from_the_ledger_also_where_the_summary_is_silent(tmp_path, capsys):
    run = make_run(tmp_path / "run", header=predeclared_header(seeded=True, diagnostics=True))
    page = shown(run, capsys)
    assert (
        "NOT FOR RELEASE: its randomness came from a known seed and it showed private values"
        in page
    )


@pytest.mark.parametrize(("recipe", "scaled"), [({}, False), (SUMMARY["recipe"], True)])
def test_only_targets_that_were_scaled_are_said_to_be(tmp_path, capsys, recipe, scaled):
    summary = {**SUMMARY, "metrics": {"squared_error": 9.0}, "recipe": recipe}
    page = shown(make_run(tmp_path / "run", summary), capsys)
    assert "Root mean squared error 3.0000" in page
    assert ("(target scaled to -1..1)" in page) is scaled


@pytest.mark.slow
def test_what_is_private_is_shown_with_diagnostics_alone_and_marked(tmp_path, capsys):
    summary = {**SUMMARY, "gradient_evaluations": 123_456}
    assert "123,456" not in shown(make_run(tmp_path / "a", summary), capsys)
    header = predeclared_header(diagnostics=True)
    page = shown(make_run(tmp_path / "b", summary, header), capsys)
    assert "Private, not for release: 123,456 gradients were computed" in page


def test_what_the_page_does_not_know_is_left_out(tmp_path, capsys):
    private = {"training_loss": 0.777, "raw_norm_sum": 777.0, "step_seconds": 7.77}
    summary = {
        **SUMMARY,
        **private,
        "diagnostics": private,
        "metrics": {**SUMMARY["metrics"], **private},
    }
    summary["history"] = [{**epoch, **private} for epoch in SUMMARY["history"]]
    page = shown(make_run(tmp_path / "run", summary), capsys)
    assert "777" not in page
    assert "7.77" not in page


def test_the_number_of_records_and_its_source_are_the_ledgers(tmp_path, capsys):
    header = predeclared_header(
        n_public_source=CountSource.DATASET_LENGTH, adjacency=Adjacency.ZERO_OUT
    )
    page = shown(make_run(tmp_path / "run", header=header), capsys)
    assert "40,000 (read from the data, treated as public)" in page
    assert "zero-out of one record" in page


def test_sgd_is_called_not_private(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(MODEL)
    config = {"method": "sgd", "epsilon": 1.0, "clip_norm": 1.0, "epochs": 2}
    summary = {**SUMMARY, "method": "sgd", "claim": None, "config": config}
    summary["history"] = [{"epoch": 1, "kappa": 1.0, "clip_norm": None, "noise_multiplier": 0.0}]
    (folder / "summary.json").write_text(json.dumps(summary))
    page = shown(folder, capsys)
    assert "NOT PRIVATE" in page
    assert "verifies" not in page
    assert "epsilon" not in page


# ── a claim that does not hold: the page says so, exit code 1 ────────────────────────────────────────


def fails(run, capsys, part):
    code, out, err = report(run, capsys)
    assert (code, err) == (1, "")
    assert part in out
    page = (run / "report.html").read_text()
    check_page(page)
    assert '<div class="box bad" role="note"><p><strong>The claim does NOT hold.' in page
    assert "times as likely" not in page
    assert "verifies" not in page


def test_a_changed_ledger(run, capsys):
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"index":3', b'"index":4'))
    fails(run, capsys, "line 5")


def test_an_unfinished_ledger(tmp_path, capsys):
    fails(make_run(tmp_path / "run", finish=False), capsys, "unfinished")


def test_another_model(run, capsys):
    (run / "model.safetensors").write_bytes(b"another")
    fails(run, capsys, "not the model")


@pytest.mark.parametrize("claim", [{"epsilon": 0.1, "delta": 1e-5}, None])
def test_a_summary_that_claims_something_else(tmp_path, capsys, claim):
    fails(
        make_run(tmp_path / "run", {**SUMMARY, "claim": claim}),
        capsys,
        "summary.json does not claim",
    )


# ── bad input: one line, exit code 2, nothing written ────────────────────────────────────────────────


def refused(run, capsys, part, *flags):
    code, out, err = report(run, capsys, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("dpis: error: ")
    assert err.count("\n") == 1
    assert part in err
    assert not (run / "report.html").exists()


def test_no_folder(tmp_path, capsys):
    refused(tmp_path / "none", capsys, "is no folder")


def test_no_run(tmp_path, capsys):
    refused(tmp_path, capsys, "holds no finished run")


def test_an_unfinished_run(run, capsys):
    (run / "summary.json").unlink()
    (run / "checkpoint.secret").write_bytes(b"")
    refused(run, capsys, "dpis train --resume")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "[" * 100_000,
        "{}",
        json.dumps({**SUMMARY, "claim": {}}),
        json.dumps({**SUMMARY, "claim": {"epsilon": "1", "delta": 1}}),
        json.dumps({**SUMMARY, "metrics": {"accuracy": "high"}}),
        json.dumps({**SUMMARY, "history": [3]}),
        json.dumps({**SUMMARY, "history": [{"epoch": 1, "kappa": "x"}]}),
        json.dumps({**SUMMARY, "history": [{"epoch": 1, "kappa": float("nan")}]}),
        json.dumps({**SUMMARY, "versions": []}),
    ],
)
def test_a_broken_summary(run, capsys, text):
    (run / "summary.json").write_text(text)
    refused(run, capsys, "is not a run's summary")


def test_a_summary_that_is_no_text(run, capsys):
    (run / "summary.json").write_bytes(b"\xff\xfe\x00")
    refused(run, capsys, "is not a run's summary")


@pytest.mark.parametrize("text", [b"", b"hello\n", b"\xff\n"])
def test_a_file_that_is_no_ledger(run, capsys, text):
    (run / "ledger.jsonl").write_bytes(text)
    refused(run, capsys, "ledger")


def test_a_missing_ledger(run, capsys):
    (run / "ledger.jsonl").unlink()
    refused(run, capsys, "cannot read")


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "ledger.jsonl", ""])
@pytest.mark.slow
def test_the_page_never_replaces_a_file_of_the_run(run, capsys, name):
    before = (run / "ledger.jsonl").read_bytes()
    refused(run, capsys, "cannot be the page", "--out", str(run / name))
    assert (run / "ledger.jsonl").read_bytes() == before


def test_a_folder_that_is_not_there(run, tmp_path, capsys):
    refused(run, capsys, "cannot write", "--out", str(tmp_path / "no" / "p.html"))


def test_hostile_names_stay_text(tmp_path, capsys):
    summary = {
        **SUMMARY,
        "method": HOSTILE,
        "notes": [HOSTILE],
        "not_for_release": [HOSTILE],
        "config": {"method": HOSTILE, HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]},
        "recipe": {"data": HOSTILE, "measured_on": HOSTILE},
        "versions": {HOSTILE: HOSTILE},
    }
    assert "alert(1)" in shown(make_run(tmp_path / "run", summary), capsys)
