"""Texts by name: words or bags from public vectors, trained, measured, predicted."""

import json

import numpy as np
import pytest
import torch

from dpis.accounting import verify_ledger
from dpis.app.entry import main
from dpis.datasets.glove import WordVectors
from dpis.datasets.named import TextDataset

pytestmark = pytest.mark.slow

WORDS = ("the", "good", "fine", "bad", "awful", "film")


def reviews(count, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    said = [("good", "fine") if label else ("bad", "awful") for label in labels]
    texts = tuple(
        f"The film is {generator.choice(words)}, {generator.choice(words)}!" for words in said
    )
    return texts, torch.from_numpy(labels)


@pytest.fixture(autouse=True)
def _made_up(monkeypatch):
    vectors = torch.randn(len(WORDS), 100, generator=torch.Generator().manual_seed(0))
    glove = WordVectors(WORDS, vectors, torch.arange(len(WORDS)))
    data = TextDataset("imdb", *reviews(600, 0), *reviews(100, 1), ("negative", "positive"), "none")
    for module in ("app.jobs.pipeline", "models.kinds"):
        monkeypatch.setattr(f"dpis.{module}.load_glove", lambda vocabulary=None: glove)
    for module in ("app.jobs.sources", "app.jobs.finished_run"):
        monkeypatch.setattr(f"dpis.{module}.load", lambda name: data)


def train(*more):
    quick = [
        "--epochs",
        "3",
        "--batch-size",
        "100",
        "--accountant",
        "rdp",
        "--seed",
        "1",
        "--epsilon",
        "8",
    ]
    return main(["train", "imdb", "--out", "run", *quick, *more])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--model", "bag-mlp"],
        pytest.param(["--model", "rnn", "--optimizer", "adam", "--lr", "0.02"]),
        pytest.param(["--method", "dp-sgd-ts", "--optimizer", "adam", "--lr", "0.02"]),
    ],
)
def test_a_text_model_learns_is_measured_and_predicts(tmp_path, capsys, options):
    assert train("--json", *options) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["test_accuracy"] > 0.8
    assert verify_ledger(tmp_path / "run/ledger.jsonl").holds
    assert main(["evaluate", "run", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["accuracy"] == pytest.approx(said["test_accuracy"])
    (tmp_path / "new.txt").write_bytes("a fine,\u2028\x0c good film\r\nawful and\x85bad\n".encode())
    assert main(["predict", "run", "new.txt"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["positive", "negative"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model", "mlp"], "takes numbers"),
        (["--model", "scatter-linear"], "takes numbers"),
        (["--method", "dp-sgd-hf"], "dp-sgd-hf has no model for imdb"),
        (["--augment", "shift"], "changes pixels"),
        (["--normalise", "group"], "has no effect on bag-linear"),
        (["--target", "label"], "is for a file of your own"),
    ],
)
def test_what_does_not_fit_texts_is_refused(tmp_path, capsys, options, complaint):
    assert train(*options) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_validation_is_held_out_of_training_by_coins(tmp_path, capsys):
    assert train("--eval-share", "0.25", "--json") == 0
    capsys.readouterr()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["recipe"]["measured_on"] == "about 25% of the training records of imdb"
    assert 400 < summary["claim"]["n_public"] < 500


def test_files_that_are_no_texts_are_refused(tmp_path, capsys):
    assert train() == 0
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00\x01")
    for name, complaint in (("bytes.txt", "cannot read"), ("none.txt", "cannot read")):
        assert main(["predict", "run", name]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["evaluate", "run", "bytes.txt"]) == 2
    assert "by name" in capsys.readouterr().err
