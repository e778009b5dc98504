"""A training job under attack."""

from __future__ import annotations

import tempfile

from dpis.app.jobs.job_options import JobOptions
from dpis.app.jobs.training import start_job
from dpis.auditing.canaries import Canaries
from dpis.auditing.findings import Findings
from dpis.training.progress import Reporter


def audit_job(
    options: JobOptions, canaries: int, reporter: Reporter, *, compare: bool = True
) -> Findings:
    """Train as the options say, with canaries among the records; leaves `audit.json` in the run's folder.

    Args:
        options: of the run.
        canaries: how many are planted, each with a fair coin.
        reporter: who is told how it goes.
        compare: train without canaries, too, to say what they cost. That model is thrown away.
    """
    planted = Canaries(canaries)
    audited = start_job(options, reporter, audit=planted).result
    accuracy = None
    if compare and "accuracy" in audited.metrics:
        with tempfile.TemporaryDirectory() as folder:
            elsewhere = JobOptions.from_json({**options.as_json(), "out": f"{folder}/run"})
            plain = start_job(elsewhere, reporter).result
        accuracy = audited.metrics["accuracy"], plain.metrics["accuracy"]
    return planted.written(audited.folder, accuracy)
