"""A training job under attack."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from dpis.app.jobs.job_options import JobOptions
from dpis.app.jobs.training import start_job
from dpis.auditing.canaries import Canaries
from dpis.auditing.findings import Findings
from dpis.auditing.model_audit import WorstCase
from dpis.errors import InputError
from dpis.training.progress import Reporter


def audit_job(
    options: JobOptions, planted: Canaries, reporter: Reporter, *, compare: bool = True
) -> Findings:
    """Train as the options say, with canaries among the records; leaves `audit.json` in the run's folder.

    Args:
        options: of the run.
        planted: the canaries, and their attack.
        reporter: who is told how it goes.
        compare: train without canaries, too, to say what they cost. That model is thrown away.
    """
    audited = start_job(options, reporter, audit=planted).result
    accuracy = None
    if compare and "accuracy" in audited.metrics:
        with tempfile.TemporaryDirectory() as folder:
            elsewhere = JobOptions.from_json({**options.as_json(), "out": f"{folder}/run"})
            plain = start_job(elsewhere, reporter).result
        accuracy = audited.metrics["accuracy"], plain.metrics["accuracy"]
    return planted.written(audited.folder, accuracy)


def worst_case(path: str) -> WorstCase:
    """What ``package.module:factory`` makes: a `WorstCase`, or model, batch and loss."""
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise InputError(f"--case takes package.module:factory, found {path!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(module_name), attribute)()
    except Exception as error:  # whatever a module of the user's own does
        raise InputError(f"{path} made no case: {type(error).__name__}: {error}") from error
    if isinstance(made, WorstCase):
        return made
    if not (isinstance(made, tuple) and len(made) == 3):
        raise InputError(f"{path} must return (model, batch, loss), found {type(made).__name__}")
    return WorstCase(*made)
