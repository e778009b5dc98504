"""What a person reads when training is done."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from dpis.app.jobs.training import JobResult
from dpis.app.page import sentences


def outcome_as_json(job: JobResult) -> dict[str, Any]:
    """One object; what is private only if diagnostics were asked for."""
    result, metrics = job.result, job.result.metrics
    values: dict[str, Any] = {
        "method": job.options.method,
        "epsilon": None if result.claim is None else result.claim.epsilon,
        "delta": None if result.claim is None else result.claim.delta,
        "test_accuracy": metrics.get("accuracy"),
        "wall_seconds": round(job.wall_seconds, 2),
        "run_dir": str(result.folder),
        "not_for_release": list(result.summary.not_for_release),
    }
    if "squared_error" in metrics:
        values["test_squared_error"] = metrics["squared_error"]
    if result.diagnostics is not None:
        values["gradient_evaluations"] = result.diagnostics.gradient_evaluations
    return values


def print_outcome(job: JobResult, console: Console) -> None:
    """Accuracy, the guarantee in words, what it does not cover, where the files are."""

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    result = job.result
    quality = sentences.quality(result.metrics, scaled=True)
    say(f"[bold]{quality}[/bold] on {escape(job.measured_on)}, in {_duration(job.wall_seconds)}.")
    say()
    for line in _guarantee(job):
        say(line)
    if result.diagnostics is not None:
        say(f"Gradients computed: {result.diagnostics.gradient_evaluations:,} (private).")
    say()
    folder = escape(str(result.folder))
    say(f"Files in {folder}:")
    say("  model.safetensors  the weights; model.py loads them with plain PyTorch")
    if result.claim is not None:
        say(f"  ledger.jsonl       every release; check it: dpis verify {folder}/ledger.jsonl")
    say("  summary.json       settings, claim and results")
    say(f"See it as a page: dpis report {folder}")
    say(f"Use it: dpis predict {folder} FILE")


def _guarantee(job: JobResult) -> list[str]:
    result = job.result
    if result.claim is None:
        return [sentences.NOT_PRIVATE]
    claim = result.summary.claim or {}
    who = claim.get("protects", "one record")
    lines = [
        f"Guarantee: {sentences.guarantee(result.claim.epsilon, result.claim.delta, who)}",
        "Not covered:",
    ]
    lines += [f"  - {escape(note)}" for note in result.summary.notes]
    if result.summary.not_for_release:
        why = sentences.why_not_for_release(result.summary.not_for_release)
        lines.append(f"[bold]NOT FOR RELEASE[/bold]: {why}")
    return lines


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
