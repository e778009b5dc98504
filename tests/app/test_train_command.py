"""`dpis train`, `evaluate`, `predict` from the outside: what a person types, sees and gets."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpis.accounting import verify_ledger
from dpis.app.entry import main
from dpis.models.kinds import Inputs

QUICK = ["--accountant", "rdp", "--epochs", "2", "--batch-size", "50", "--device", "cpu"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A CSV with numbers, a category, missing values, users and two targets."""
    path = tmp_path_factory.mktemp("table") / "people.csv"
    generator = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "income", "colour", "who", "sick", "score"])
        for row in range(400):
            age, income = generator.uniform(0, 100), generator.normal(3e4, 5e3)
            colour = generator.choice(["red", "blue"])
            sick = "yes" if age + 20 * (colour == "red") > 60 else "no"
            shown_age = "" if row % 50 == 0 else f"{age:.1f}"
            writer.writerow(
                [shown_age, f"{income:.0f}", colour, row % 100, sick, f"{age / 10:.2f}"]
            )
    return path


DECLARED = [
    "--bounds",
    "age=0:100",
    "--bounds",
    "income=0:100000",
    "--categories",
    "colour=red,blue",
]


def declared(table, *more):
    return ["train", str(table), *DECLARED, *QUICK, *more]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def error_of(capsys, arguments):
    """The one line a bad command leaves; exit code 2, no traceback, no run folder."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("dpis: error: ")
    assert not Path("runs").exists()
    return lines[0]


# ── a run from end to end ────────────────────────────────────────────────────────────────────────────


def test_a_table_is_trained_on_verified_evaluated_and_predicted_with(table, tmp_path, capsys):
    drop = ["--drop", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    out = str(tmp_path / "run")
    assert main(declared(table, *drop, "--epsilon", "8", "--lr", "2", "--out", out, "--json")) == 0
    found = last_line(capsys)
    assert {"method", "epsilon", "delta", "test_accuracy", "wall_seconds", "run_dir"} <= set(found)
    assert "gradient_evaluations" not in found
    assert found["epsilon"] == 8.0
    assert verify_ledger(Path(out) / "ledger.jsonl", Path(out) / "model.safetensors").holds

    assert main(["evaluate", out, str(table), "--json"]) == 0
    assert last_line(capsys)["accuracy"] > 0.7

    assert main(["predict", out, str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prediction"
    assert len(lines) == 401
    assert set(lines[1:]) <= {"yes", "no"}


def test_a_regression_speaks_in_the_units_of_its_target(table, tmp_path, capsys):
    drop = ["--drop", "who", "--drop", "sick", "--target", "score", "--bounds", "score=0:10"]
    out = str(tmp_path / "run")
    assert main(declared(table, *drop, "--epsilon", "50", "--out", out, "--json")) == 0
    found = last_line(capsys)
    assert found["test_accuracy"] is None
    assert found["test_squared_error"] > 0
    assert main(["predict", out, str(table), "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)
    assert len(predictions) == 400
    assert max(predictions) > 1.5  # not in -1..1


@pytest.mark.slow
def test_undeclared_bounds_are_released_and_charged(table, tmp_path, capsys):
    flags = [
        "--categories",
        "colour=red,blue",
        "--drop",
        "who",
        "--drop",
        "score",
        "--target",
        "sick",
    ]
    classes = ["--classes", "from-data", "--release-scale", "--epsilon", "8"]
    out = tmp_path / "run"
    assert main(["train", str(table), *flags, *classes, *QUICK, "--out", str(out), "--json"]) == 0
    verdict = verify_ledger(out / "ledger.jsonl")
    assert [entry.label for entry in verdict.ledger.entries][:2] == ["scale", "gradient"]
    assert verdict.holds


def test_users_are_protected_as_a_whole(table, tmp_path, capsys):
    flags = ["--user-column", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    out = tmp_path / "run"
    small = ["--batch-size", "10", "--out", str(out), "--json"]
    assert main([*declared(table, *flags), *small]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["claim"]["protects"] == "one user with all of their rows"
    assert summary["claim"]["n_public"] <= 100


def test_the_summary_tells_a_newcomer_what_is_promised(table, tmp_path, capsys):
    drop = ["--drop", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    assert main(declared(table, *drop, "--seed", "1", "--diagnostics")) == 0
    shown = capsys.readouterr().out
    for part in (
        "Accuracy",
        "Guarantee",
        "Not covered",
        "NOT FOR RELEASE",
        "Gradients computed",
        "runs/1",
    ):
        assert part in shown, part
    assert str(table) not in (Path("runs/1") / "summary.json").read_text()


@pytest.mark.slow
def test_images_of_the_users_own_are_scattered(tmp_path, capsys):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 200)
    images = generator.integers(0, 60, (200, 12, 12), dtype=np.uint8)
    images[labels == 1, 3:9, 3:9] += 150
    np.savez(tmp_path / "images.npz", x=images, y=labels)
    out = tmp_path / "run"
    command = [
        "train",
        "images.npz",
        "--classes",
        "2",
        *QUICK,
        "--epsilon",
        "100",
        "--out",
        str(out),
        "--json",
    ]
    assert main(command) == 0
    assert last_line(capsys)["test_accuracy"] > 0.8
    assert json.loads((out / "summary.json").read_text())["recipe"]["model"] == "scatter-linear"
    program = (
        "import sys, numpy as np; sys.modules['dpis'] = None; import model; "
        "x = np.load('../images.npz')['x'][:50]; "
        "import json; print(json.dumps(model.decode(model.load()(model.preprocess(x)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=out, capture_output=True, text=True, check=True
    )
    assert main(["predict", str(out), "images.npz", "--json"]) == 0
    assert json.loads(done.stdout) == json.loads(capsys.readouterr().out)[:50]


def test_sgd_says_that_it_is_not_private(table, capsys):
    drop = ["--drop", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    quick = ["--epochs", "1", "--batch-size", "50", "--method", "sgd"]
    assert main(["train", str(table), *DECLARED, *drop, *quick]) == 0
    assert "NOT PRIVATE" in capsys.readouterr().out
    assert not Path("runs/1/ledger.jsonl").exists()


def test_a_model_of_the_users_own(table, tmp_path, capsys):
    (tmp_path / "my_model.py").write_text(
        "from torch import nn\n\n\ndef make(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    )
    drop = ["--drop", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    assert main(declared(table, *drop, "--model", "my_model:make", "--json")) == 0
    assert main(["evaluate", "runs/1", str(table)]) == 0


@pytest.mark.parametrize(
    ("declared_count", "noted"), [("160", True), ("300", False), ("900", True)]
)
def test_a_declared_number_that_is_far_off_is_noted_on_the_terminal(
    table, capsys, declared_count, noted
):
    drop = ["--drop", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    assert main(declared(table, *drop, "--n-public", declared_count, "--out", "run")) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (f"records to train on, --n-public says {declared_count}" in said) == noted
    assert "n-public says" not in Path("run/summary.json").read_text()


# ── interrupted and resumed ──────────────────────────────────────────────────────────────────────────


def test_a_job_is_resumed_by_its_folder_alone(table, tmp_path, capsys, monkeypatch):
    from dpis.training.trainer import Trainer

    drop = [
        "--drop",
        "who",
        "--drop",
        "score",
        "--target",
        "sick",
        "--classes",
        "no,yes",
        "--seed",
        "3",
    ]
    assert main(declared(table, *drop, "--out", "whole")) == 0
    taken = 0
    step = Trainer._step

    def interrupted(trainer):
        nonlocal taken
        taken += 1
        if taken == 9:
            raise RuntimeError("the lights went out")
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        with pytest.raises(RuntimeError):
            main(declared(table, *drop, "--out", "broken"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["train", "--resume", "../broken"]) == 0
    for name in ("model.safetensors", "ledger.jsonl", "summary.json", "model.py"):
        assert Path("../whole", name).read_bytes() == Path("../broken", name).read_bytes(), name
    assert not Path("../broken/checkpoint.secret").exists()


def test_resume_takes_nothing_else(capsys):
    assert "leave out --epsilon" in error_of(capsys, ["train", "--resume", "x", "--epsilon", "2"])
    assert "nothing to resume" in error_of(capsys, ["train", "--resume", "x"])


# ── bad input: one clear line, exit code 2, nothing written ──────────────────────────────────────────


def bad_commands(table):
    target = ["--target", "sick", "--classes", "no,yes", "--drop", "who", "--drop", "score"]
    return {
        "a missing file": (["train", "absent.csv", "--target", "y"], "absent.csv"),
        "an unknown name": (["train", "imagenet"], "imagenet"),
        "a data set that is not here": (["train", "mnist"], "DPIS_DATA"),
        "no target": (["train", str(table)], "--target"),
        "a target that is not there": (["train", str(table), "--target", "y"], "no column 'y'"),
        "an undeclared column": (
            ["train", str(table), "--target", "sick", "--classes", "no,yes"],
            "nothing is known about",
        ),
        "a label out of range": (
            declared(table, *target[:2], "--classes", "a,b", *target[4:]),
            "none of the 2 classes",
        ),
        "epsilon of zero": (declared(table, *target, "--epsilon", "0"), "--epsilon must be"),
        "delta of one": (
            declared(table, *target, "--delta", "1"),
            "--delta must be above 0 and below 1",
        ),
        "a batch larger than the data": (
            declared(table, *target, "--n-public", "40"),
            "larger than n_public",
        ),
        "an unknown method": (
            declared(table, *target, "--method", "magic"),
            "--method must be one of",
        ),
        "an unknown model": (declared(table, *target, "--model", "vit"), "--model must be one of"),
        "a model that cannot be imported": (
            declared(table, *target, "--model", "nowhere:make"),
            "cannot import",
        ),
        "scatter of a table": (declared(table, *target, "--model", "scatter-cnn"), "needs images"),
        "kappa and B": (
            declared(table, *target, "--kappa", ".5", "--equivalent-batch", "99"),
            "both given",
        ),
        "an unknown optimizer": (declared(table, *target, "--optimizer", "lion"), "--optimizer"),
        "an unknown device": (declared(table, *target, "--device", "abacus"), "abacus"),
        "a clip norm of words": (declared(table, *target, "--clip-norm", "big"), "--clip-norm"),
        "adaptive clipping of dp-sgd": (
            declared(table, *target, "--method", "dp-sgd", "--clip-norm", "auto"),
            "keeps no norms",
        ),
        "an option that is not one": (["train", "--espilon", "1"], "espilon"),
        "a folder in use": (declared(table, *target, "--out", "."), "not empty"),
        "release of n without a guess": (declared(table, *target, "--release-n"), "n_public"),
        "columns of a named set": (["train", "--target", "label"], "needs none"),
        "a learning rate of nan": (declared(table, *target, "--lr", "nan"), "--lr must be"),
        "a learning rate beyond float32": (
            declared(table, *target, "--lr", "1e39"),
            "at most 1e+06",
        ),
        "a learning rate that ruins": (declared(table, *target, "--lr", "1e38"), "--lr must be"),
        "a model that is none": (declared(table, *target, "--model", "os:system"), "TypeError"),
        "an option without effect": (
            declared(table, *target, "--method", "dp-sgd", "--headroom", "2"),
            "--headroom has no effect on dp-sgd",
        ),
        "the training file to measure on": (
            declared(table, *target, "--eval-data", str(table)),
            "--eval-data is the training file",
        ),
        "rows of users without users": (
            declared(table, *target, "--max-rows-per-user", "3"),
            "give --user-column",
        ),
        "ema of 2": (declared(table, *target, "--ema", "2"), "--ema must be"),
    }


@pytest.mark.parametrize("case", sorted(bad_commands(Path("x.csv"))))
def test_bad_input_is_one_clear_line(case, table, capsys):
    arguments, said = bad_commands(table)[case]
    Path("here").write_text("something")
    assert said in error_of(capsys, arguments)


def test_features_that_are_not_numbers_are_refused(capsys):
    features = torch.zeros(100, 3)
    features[7, 1] = torch.nan
    torch.save({"x": features, "y": torch.arange(100) % 2}, "data.pt")
    assert "not finite" in error_of(capsys, ["train", "data.pt", "--classes", "2"])


def test_a_folder_that_cannot_be_written(table, capsys):
    Path("file").write_text("not a folder")
    target = ["--target", "sick", "--classes", "no,yes", "--drop", "who", "--drop", "score"]
    assert "cannot use" in error_of(capsys, declared(table, *target, "--out", "file/run"))


def test_runs_without_a_model_cannot_be_used(capsys):
    assert "no finished run" in error_of(capsys, ["evaluate", "nowhere"])
    assert "no finished run" in error_of(capsys, ["predict", "nowhere", "x.csv"])


def test_a_run_whose_summary_is_broken_cannot_be_used(table, capsys):
    drop = ["--drop", "who", "--drop", "score", "--target", "sick", "--classes", "no,yes"]
    assert main(declared(table, *drop, "--out", "run")) == 0
    capsys.readouterr()
    for broken in ("{", "{}", "[]"):
        Path("run/summary.json").write_text(broken)
        assert "not a run's summary" in error_of(capsys, ["evaluate", "run", str(table)])
        assert "not a run's summary" in error_of(capsys, ["predict", "run", str(table)])
        assert "not a run's summary" in error_of(capsys, ["report", "run"])


def test_a_model_is_measured_on_records_of_its_own_shape(capsys, monkeypatch):
    images = np.random.default_rng(0).integers(0, 255, (200, 12, 12), dtype=np.uint8)
    np.savez("images.npz", x=images, y=np.arange(200) % 2)
    assert (
        main(["train", "images.npz", "--classes", "2", "--model", "linear", *QUICK, "--out", "run"])
        == 0
    )
    capsys.readouterr()

    def named(*shape):
        pixels = torch.zeros(4, *shape, dtype=torch.uint8)
        return SimpleNamespace(
            classes=("0", "1"), test_images=pixels, test_labels=torch.zeros(4).long()
        )

    for shape in ((28, 28), (3, 12, 12)):
        monkeypatch.setattr("dpis.app.jobs.finished_run.load", lambda _, shape=shape: named(*shape))
        said = error_of(capsys, ["evaluate", "run", "mnist"])
        assert f"trained on records of the shape [12, 12], mnist has {list(shape)}" in said
    monkeypatch.setattr("dpis.app.jobs.finished_run.load", lambda _: named(1, 12, 12))
    assert main(["evaluate", "run", "mnist"]) == 0


# ── what travels with a model ────────────────────────────────────────────────────────────────────────


def test_the_plain_preprocessing_says_what_the_package_says(tmp_path):
    from dpis.app.jobs.pipeline import Pipeline
    from dpis.files.reading import encode_features, open_records
    from dpis.files.schema import Schema

    cells = ["3.0", " 3 ", "3", "007", "NA", "inf", "-inf", "", "nan", "1e400", "-7", "red", "250"]
    rows = [[cell, cell, "a"] for cell in cells]
    path = tmp_path / "odd.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["size", "grade", "y"], *rows])
    schema = Schema.from_flags(
        target="y", bounds=["size=-5:100"], categories=["grade=3,7,red"], classes="a,b"
    )
    made = open_records(path, schema=schema).encode()
    scope = {"torch": torch}
    exec(Pipeline(made.preprocessing, Inputs.AS_THEY_ARE).source(), scope)
    found = scope["preprocess"]([{"size": c, "grade": c} for c in cells])
    assert torch.equal(found, encode_features(path, made.preprocessing))
    assert scope["decode"](torch.tensor([[0.0, 1.0]])) == ["b"]
    assert scope["preprocess"]([{}]).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]]


def test_a_model_file_cannot_run_code():
    from dpis.errors import InputError
    from dpis.training.model_file import build

    for evil in (
        "torch.os.system('x')",
        "nn.Linear.__init__",
        "nn.modules.linear.torch.os.system('x')",
    ):
        with pytest.raises(InputError):
            build(evil)


def test_what_was_confirmed_public_is_said(table, capsys):
    flags = [
        "--categories",
        "colour=from-data",
        "--drop",
        "who",
        "--drop",
        "score",
        "--target",
        "sick",
    ]
    bounds = ["--bounds", "age=0:100", "--bounds", "income=0:100000", "--classes", "from-data"]
    assert main(["train", str(table), *flags, *bounds, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "categories of colour are public" in shown
    assert "classes of sick are public" in shown
