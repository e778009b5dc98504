"""`dpis train`: one command from data to a private model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dpis.errors import InputError

Text = str | None
Number = float | None
Count = int | None


def train(
    context: typer.Context,
    dataset: Annotated[
        Text,
        typer.Argument(
            metavar="DATASET",
            help="mnist, fmnist, cifar10, imdb, or a file of your own: .csv, .npz, .pt. "
            "[default: a sample of Fashion-MNIST]",
        ),
    ] = None,
    method: Annotated[
        Text,
        typer.Option(
            help="dpis, dpis-adaptive, dp-sgd, dp-sgd-decay, dp-sgd-ts (tanh), dp-sgd-hf (scatter features), or sgd "
            "(not private). [default: dpis]"
        ),
    ] = None,
    epsilon: Annotated[
        Number, typer.Option(help="Of the guarantee; smaller is stronger. [default: 3]")
    ] = None,
    delta: Annotated[
        Number, typer.Option(help="Of the guarantee; well below 1/records. [default: 1e-5]")
    ] = None,
    epochs: Annotated[Count, typer.Option(help="Passes over the data. [default: 40]")] = None,
    batch_size: Annotated[
        Count,
        typer.Option(
            help="b; an epoch has floor(n_public / b) steps. [default: n_public / 5, at most 8192]"
        ),
    ] = None,
    kappa: Annotated[
        Text,
        typer.Option(
            metavar="VALUE|A:B|LIST", help="Norm utilisation in (0, 1], B = b / kappa. [default: 1]"
        ),
    ] = None,
    equivalent_batch: Annotated[
        Number,
        typer.Option(help="B instead of kappa: the DP-SGD batch with the same privacy and noise."),
    ] = None,
    k: Annotated[
        Number,
        typer.Option("--k", help="Headroom: norms may grow so much between visits. [default: 5]"),
    ] = None,
    g_l: Annotated[
        Number, typer.Option("--g-l", help="Least norm, in units of the clip norm. [default: 0.05]")
    ] = None,
    contribution: Annotated[
        Text,
        typer.Option(metavar="weight|reject", help="What a drawn record adds. [default: weight]"),
    ] = None,
    a_e: Annotated[
        Number,
        typer.Option(
            "--a-e", help="dpis-adaptive: epochs that reserve as if kappa were 1. [default: 0.8]"
        ),
    ] = None,
    norm_sum: Annotated[
        Text,
        typer.Option(
            metavar="full-pass|stale",
            help="dpis-adaptive: how the norm sum is computed. [default: full-pass]",
        ),
    ] = None,
    c_star: Annotated[
        Number,
        typer.Option("--c-star", help="Adaptive clipping: upper bound. [default: 4 * clip norm]"),
    ] = None,
    lambda_: Annotated[
        Number,
        typer.Option("--lambda", help="Adaptive clipping: C = lambda * mean norm. [default: 1]"),
    ] = None,
    c_min: Annotated[
        Number,
        typer.Option("--c-min", help="Adaptive clipping: lower bound. [default: clip norm / 100]"),
    ] = None,
    clip_norm: Annotated[
        Text,
        typer.Option(
            metavar="VALUE|auto",
            help="C; auto adapts it by an accounted release. [default: by model]",
        ),
    ] = None,
    lr: Annotated[
        Number, typer.Option("--lr", help="Learning rate. [default: by model and noise]")
    ] = None,
    optimizer: Annotated[
        Text, typer.Option(metavar="sgd|adam", help="sgd has momentum 0.9. [default: sgd]")
    ] = None,
    model: Annotated[
        Text,
        typer.Option(
            help="scatter-linear, scatter-cnn, cnn (tanh), cnn-relu, mlp, linear; for texts "
            "bag-linear, bag-mlp, rnn, rnn-tanh; or package.module:factory. [default: by the data]"
        ),
    ] = None,
    normalise: Annotated[
        Text,
        typer.Option(
            metavar="group|channel",
            help="Scatter features: by record, or by an accounted release, which suits colour images. "
            "[default: group]",
        ),
    ] = None,
    colours: Annotated[
        Text,
        typer.Option(
            metavar="rgb|opponent",
            help="Scatter features of colour images: of red, green, blue, or of brightness and two "
            "differences. [default: rgb]",
        ),
    ] = None,
    augment: Annotated[
        Text,
        typer.Option(
            metavar="shift,flip",
            help="Change images: pixels at random, by up to 2; before scattering by 1, in fixed ways.",
        ),
    ] = None,
    augmentations: Annotated[
        Count,
        typer.Option(
            help="Views of a record in a step, averaged; scatter models need 2 or more. [default: 1]"
        ),
    ] = None,
    ema: Annotated[
        Number,
        typer.Option(
            help="Release a moving average of the weights; 0: the last ones. [default: 0.95]"
        ),
    ] = None,
    decay_rate: Annotated[
        Number, typer.Option(help="dp-sgd-decay: noise falls as exp(-rate*epoch). [default: 0.005]")
    ] = None,
    accountant: Annotated[
        Text, typer.Option(metavar="pld|rdp", help="Of predeclared methods. [default: pld]")
    ] = None,
    n_public: Annotated[
        Count,
        typer.Option(
            help="A public number of training records (users). [default: counted, and then public]"
        ),
    ] = None,
    release_n: Annotated[
        bool, typer.Option("--release-n", help="Release a noisy number of records too.")
    ] = False,
    physical_batch: Annotated[
        Count, typer.Option(help="Records computed at once. [default: what fits the caches]")
    ] = None,
    target: Annotated[Text, typer.Option(help="CSV: the column to learn.")] = None,
    classes: Annotated[
        Text,
        typer.Option(
            metavar="A,B,C|10|from-data",
            help="The classes; from-data confirms that they are public.",
        ),
    ] = None,
    schema: Annotated[
        Text, typer.Option(help="CSV: bounds, categories, classes in a .json or .toml file.")
    ] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option(metavar="COL=LOW:HIGH", help="CSV: a numeric column. May be repeated."),
    ] = None,
    categories: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COL=A,B|from-data", help="CSV: a categorical column. May be repeated."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="COL", help="CSV: leave a column out. May be repeated."),
    ] = None,
    release_scale: Annotated[
        bool,
        typer.Option(
            "--release-scale", help="CSV: pay for a private release of undeclared bounds."
        ),
    ] = False,
    delimiter: Annotated[
        Text, typer.Option(help="CSV: between cells. [default: as the header shows]")
    ] = None,
    user_column: Annotated[
        Text, typer.Option(help="Protect users, not rows: the column that names them.")
    ] = None,
    max_rows_per_user: Annotated[
        Count, typer.Option(help="Rows of a user in one step. [default: 8]")
    ] = None,
    eval_data: Annotated[Text, typer.Option(help="Your file to measure the model on.")] = None,
    eval_share: Annotated[
        Number,
        typer.Option(
            help="Hold this share of the training records out by coins, to measure on. "
            "[default: 0.1 of your file; of a data set by name its test set is used instead]"
        ),
    ] = None,
    seed: Annotated[
        Count, typer.Option(help="Repeatable, for research: the model is then not for release.")
    ] = None,
    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics", help="Show private values: the model is then not for release."
        ),
    ] = False,
    device: Annotated[Text, typer.Option(help="auto, cpu, cuda. [default: auto]")] = None,
    out: Annotated[
        Text, typer.Option(help="Folder of the run, new or empty. [default: runs/1, runs/2, ...]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run; alone.")
    ] = None,
    keep_checkpoint: Annotated[
        bool, typer.Option("--keep-checkpoint", help="Keep the secret checkpoint after completion.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> None:
    """Train a private model: without arguments, DPIS on a sample of Fashion-MNIST."""
    asked = {name: value for name, value in context.params.items() if _was_said(value)}
    for about_output in ("resume", "keep_checkpoint", "as_json"):
        asked.pop(about_output, None)
    if resume is not None and asked:
        flags = ", ".join(sorted("--" + name.rstrip("_").replace("_", "-") for name in asked))
        raise InputError(f"--resume goes on with what the run was started with: leave out {flags}")
    _run(asked, resume, keep_checkpoint, as_json)


def _was_said(value: object) -> bool:
    return value is not None and value is not False and value not in ((), [])


def _run(asked: dict[str, Any], resume: Path | None, keep_checkpoint: bool, as_json: bool) -> None:
    from dpis.app.commands.outcome import (  # torch: only when it is needed
        outcome_as_json,
        print_outcome,
    )
    from dpis.app.jobs import JobOptions, resume_job, start_job
    from dpis.training.progress import ProgressBar

    console = Console(stderr=True)
    reporter = ProgressBar(console)
    if resume is not None:
        job = resume_job(resume, reporter, keep_checkpoint=keep_checkpoint)
    else:
        job = start_job(JobOptions.from_json(asked), reporter, keep_checkpoint=keep_checkpoint)
    if as_json:
        typer.echo(json.dumps(outcome_as_json(job)))
    else:
        print_outcome(job, Console())
