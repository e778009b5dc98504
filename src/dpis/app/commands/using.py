"""`dpis evaluate` and `dpis predict`: what to do with a finished model."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
Delimiter = Annotated[str | None, typer.Option(help="CSV: between cells.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]


def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A data set by name, or a file with targets. [default: the test part of what it was trained on]",
        ),
    ] = None,
    delimiter: Delimiter = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How good is a finished model on this data?"""
    from dpis.app.jobs.finished_run import evaluate_run

    metrics = evaluate_run(run, data, device, delimiter)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    for name, value in metrics.items():
        shown = f"{100 * value:.2f} %" if name == "accuracy" else f"{value:.6g}"
        typer.echo(f"{name.replace('_', ' ')} {shown}")


def predict(
    run: RunArgument,
    data: Annotated[
        str, typer.Argument(metavar="FILE", help=".csv, .npz or .pt, as it was trained on.")
    ],
    delimiter: Delimiter = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Write there instead of printing.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON list instead of a column.")
    ] = False,
) -> None:
    """Predict with a finished model: one line a record, in the order of the file."""
    from dpis.app.jobs.finished_run import predict_file
    from dpis.runs.folder import write_whole

    predictions = predict_file(run, data, device, delimiter)
    text = json.dumps(predictions) + "\n" if as_json else _column(predictions)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text.encode())


def _column(predictions: list[str] | list[float]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["prediction"])
    writer.writerows([prediction] for prediction in predictions)
    return buffer.getvalue()
