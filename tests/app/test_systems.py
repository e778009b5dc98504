"""What the paper's systems are called, and what their options do to the guarantee."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpis.accounting import verify_ledger
from dpis.app.entry import main
from dpis.app.jobs import training
from dpis.app.jobs.job_options import JobOptions
from dpis.app.jobs.pipeline import Pipeline
from dpis.errors import InputError
from dpis.features import channels
from dpis.features.colours import Colours
from dpis.files.preprocessing import ArrayPreprocessing
from dpis.files.targets import ClassTarget
from dpis.models.kinds import Inputs
from dpis.training.model_file import load_card
from dpis.training.trainer import Trainer

QUICK = ["--accountant", "rdp", "--epochs", "1", "--batch-size", "100", "--device", "cpu"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "pictures.npz"
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 300)
    images = generator.integers(0, 100, (300, 16, 16)) + 100 * labels[:, None, None]
    np.savez(path, x=images.astype(np.uint8), y=labels)
    return str(path)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """In colour: red or blue by class, of one brightness."""
    path = tmp_path_factory.mktemp("photographs") / "photographs.npz"
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 300)
    images = generator.integers(0, 100, (300, 3, 16, 16))
    images[:, 0] += 100 * labels[:, None, None]
    images[:, 2] += 100 * (1 - labels)[:, None, None]
    np.savez(path, x=images.astype(np.uint8), y=labels)
    return str(path)


def train(pictures, *more):
    return main(["train", pictures, "--classes", "2", "--out", "run", *QUICK, *more])


def events(label):
    with open("run/ledger.jsonl") as file:
        return [line for line in map(json.loads, file) if line.get("label") == label]


def summary():
    with open("run/summary.json") as file:
        return json.load(file)


@pytest.mark.slow
def test_hand_made_features_are_dp_sgd_on_the_scatter_cnn(pictures, capsys):
    assert train(pictures, "--method", "dp-sgd-hf", "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["method"] == "dp-sgd-hf"
    assert summary()["method"] == "dp-sgd"
    assert summary()["recipe"]["model"] == "scatter-cnn"


def test_tempered_sigmoids_are_dp_sgd_on_the_cnn_with_tanh(pictures):
    assert train(pictures, "--method", "dp-sgd-ts") == 0
    assert "nn.Tanh" in str(load_card_of_run().architecture)
    assert summary()["recipe"]["system"] == "dp-sgd-ts"


def load_card_of_run():
    return load_card(Path("run/model.safetensors"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--method", "dp-sgd-hf", "--model", "cnn"], "dp-sgd-hf is dp-sgd on one of scatter-cnn"),
        (["--method", "dp-sgd-ts", "--model", "cnn-relu"], "use --method dp-sgd"),
        (["--method", "dp-sgd-xy"], "method must be one of dpis, dpis-adaptive"),
        (["--model", "rnn"], "takes texts"),
        (["--model", "cnn", "--normalise", "channel"], "has no effect on cnn"),
        (["--normalise", "batch"], "must be one of group, channel"),
        (["--normalise", "channel", "--epsilon", "0"], "epsilon must be a finite number above 0"),
        (["--augment", "shift"], "needs --augmentations, from 2 to 9"),
        (["--augment", "flip", "--augmentations", "3"], "from 2 to 2"),
        (
            ["--model", "cnn", "--augment", "flip", "--augmentations", "0"],
            "must be a whole number of at least 1",
        ),
        (["--augmentations", "2"], "without --augment"),
        (["--model", "cnn", "--augment", "shift,blur"], "must name some of shift, flip"),
        (["--colours", "cmyk"], "must be one of rgb, opponent"),
        (["--colours", "opponent"], "[3, height, width], found [16, 16]"),
        (["--colours", "rgb", "--model", "cnn"], "has no effect on cnn"),
    ],
)
def test_what_does_not_go_together_is_refused(pictures, capsys, options, complaint, tmp_path):
    assert train(pictures, *options) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_channel_statistics_are_paid_for_and_stored(pictures):
    assert train(pictures, "--model", "scatter-linear", "--normalise", "channel") == 0
    assert verify_ledger(Path("run/ledger.jsonl")).holds
    assert len(events(channels.MEAN)) == len(events(channels.SQUARE)) == 1
    scale = load_card_of_run().preprocessing["channel_scale"]
    assert len(scale["mean"]) == 81
    assert any(scale["mean"])  # not the rehearsal's
    assert main(["predict", "run", pictures]) == 0


def test_planted_channel_statistics_without_noise_show(pictures, monkeypatch):
    """Rule 17: the stored scale is the released one, so it differs from the exact one by noise of the right size."""
    exact = {}

    def watched(features):
        exact["sums"] = channels.channel_sums(features)
        return exact["sums"]

    monkeypatch.setattr(training, "channel_sums", watched)
    assert train(pictures, "--model", "scatter-linear", "--normalise", "channel") == 0
    scale = load_card_of_run().preprocessing["channel_scale"]
    n_public = summary()["claim"]["n_public"]
    gains = channels.channel_gains(81)
    noise = torch.tensor(scale["mean"]).double() * gains * n_public - exact["sums"][0]
    paid = channels.channel_releases(summary()["claim"]["epsilon"])[0].noise_multiplier
    spread = float(noise.std()) / (paid * channels.LONGEST_MEAN)
    assert 0.7 < spread < 1.4  # 81 draws: six standard deviations either way


@pytest.mark.slow
@pytest.mark.parametrize("normalise", ["group", "channel"])
def test_scattered_views_train_and_predict(pictures, normalise):
    options = ["--augment", "shift,flip", "--augmentations", "3", "--normalise", normalise]
    assert train(pictures, "--model", "scatter-linear", *options) == 0
    assert verify_ledger(Path("run/ledger.jsonl")).holds
    assert summary()["claim"]["protects"] == "one record"
    assert main(["predict", "run", pictures]) == 0


@pytest.mark.parametrize(
    "more",
    [[], ["--normalise", "channel"], ["--augment", "flip", "--augmentations", "2"]],
    ids=["group", "channel", "views"],
)
def test_the_colours_a_model_is_trained_on_come_with_it(photographs, monkeypatch, more):
    """What was trained on, what predicts and the model's own file in plain PyTorch scatter the same planes."""
    trained = {}

    def watched(job, inputs, encoded, changes):
        trained["images"], trained["inputs"] = encoded.features, inputs
        return records(job, inputs, encoded, changes)

    records = training._Job._records
    monkeypatch.setattr(training._Job, "_records", watched)
    assert train(photographs, "--model", "scatter-linear", "--colours", "opponent", *more) == 0
    assert summary()["recipe"]["colours"] == "opponent"
    pipeline = Pipeline.from_json(load_card_of_run().preprocessing)
    assert pipeline.colours is Colours.OPPONENT
    images = trained["images"][:9]
    inputs = trained["inputs"][:9]
    if "--augment" in more:
        torch.testing.assert_close(inputs[:, 1], pipeline.inputs(images.flip(-1)))
        inputs = inputs[:, 0]
    torch.testing.assert_close(inputs, pipeline.inputs(images))
    assert not torch.allclose(inputs, replace(pipeline, colours=Colours.RGB).inputs(images))
    plain = {}
    exec(Path("run/model.py").read_text(), plain)
    torch.testing.assert_close(plain["preprocess"]((255 * images).round().byte()), inputs)


def test_a_pipeline_is_read_as_it_was_written():
    target = ClassTarget("y", ("a", "b"))
    arrays = ArrayPreprocessing((3, 16, 16), divide_by_255=True, target=target)
    pipeline = Pipeline(arrays, Inputs.SCATTERED, colours=Colours.OPPONENT)
    saved = pipeline.to_json()
    assert Pipeline.from_json(saved) == pipeline
    with pytest.raises(InputError, match="sharpened"):
        Pipeline.from_json(saved | {"sharpened": True})
    for changed in ({"colours": "lab"}, {"inputs": "pyramid"}):
        with pytest.raises(InputError, match="use the version of dpis"):
            Pipeline.from_json(saved | changed)
    del saved["colours"]  # as files were before there was a choice
    assert Pipeline.from_json(saved).colours is Colours.RGB


def test_an_option_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="no option colour "):
        JobOptions.from_json({"dataset": "cifar10", "colour": "opponent"})


def test_images_with_their_channels_last_are_refused(tmp_path, capsys):
    images = np.zeros((60, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / "last.npz", x=images, y=np.arange(60) % 2)
    for options in (
        ["--model", "cnn", "--augment", "shift"],
        ["--model", "scatter-linear", "--colours", "opponent"],
    ):
        assert train("last.npz", *options) == 2
        assert "move the last axis to the front" in capsys.readouterr().err


def test_channel_bounds_are_for_bytes(tmp_path, capsys):
    images = np.random.default_rng(0).uniform(0, 255, (60, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "floats.npz", x=images, y=np.arange(60) % 2)
    assert train("floats.npz", "--model", "scatter-linear", "--normalise", "channel") == 2
    assert "uint8" in capsys.readouterr().err


def test_the_summary_says_which_learning_rate_and_average_were_used(pictures):
    assert train(pictures, "--model", "scatter-linear") == 0
    assert summary()["recipe"]["lr"] > 0
    assert summary()["recipe"]["ema"] == 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--model", "scatter-linear", "--normalise", "channel", "--release-n", "--n-public", "270"],
        ["--model", "cnn", "--augment", "shift,flip", "--augmentations", "2"],
        ["--model", "scatter-cnn", "--augment", "shift,flip", "--augmentations", "3"],
        ["--model", "mlp", "--method", "dpis-adaptive", "--headroom", "inf", "--n-public", "270"],
    ],
    ids=["channel-statistics", "augmentation", "views", "uniform-under-the-schedule"],
)
def test_a_resumed_job_repeats_its_releases_and_views_bit_for_bit(pictures, monkeypatch, options):
    """Rule 21: statistics released before training, and random views, come out of the key again and are paid once."""
    quick = QUICK[2:] if "dpis-adaptive" in options else QUICK  # which has an account of its own
    asked = ["train", pictures, "--classes", "2", *quick, "--seed", "5", *options]
    assert main([*asked, "--out", "whole"]) == 0
    step, taken = Trainer._step, []

    def interrupted(trainer):
        taken.append(trainer)
        if len(taken) == 2:
            raise RuntimeError("the lights went out")
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        with pytest.raises(RuntimeError):
            main([*asked, "--out", "broken"])
    assert main(["train", "--resume", "broken"]) == 0
    for name in ("model.safetensors", "ledger.jsonl", "summary.json"):
        assert Path("whole", name).read_bytes() == Path("broken", name).read_bytes(), name
