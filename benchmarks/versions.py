"""Two versions of the package in one run: what a change costs.

    python benchmarks/versions.py BEFORE [AFTER]                 revisions of git; AFTER: this folder
    python benchmarks/versions.py HEAD~3 --models mlp --batches 8 64 --work step --seconds 60

A process for either version, each with its own copy of the package and the models and engines of this
folder, takes one step at a time, in turns (before, after, after, before, ...), so that both see the
same machine. One thread, CPU time; steps that compare with autograd (1, 2, 4, ...) do not count.
Two figures: the ratio of the fastest tenths, which other work on the machine disturbs least, and the
median of the ratios of neighbouring steps, with its standard error.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from engines import WORK, prepared
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent


def serve(model: str, batch: int, work: str) -> None:
    """Take a step for every line that comes in, and say how long it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = WORKLOADS[model].make()
    step = prepared("dpis", work, task, task.batch(batch))
    for _ in sys.stdin:
        start = time.process_time()
        step()
        print(time.process_time() - start, flush=True)


class Version:
    """One version of the package, ready to step."""

    def __init__(self, folder: Path, model: str, batch: int, work: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", model, str(batch), work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder / "src")},
        )

    def step(self) -> float:
        """Seconds of one step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """No more steps."""
        self._process.communicate()


def compare(folders: list[Path], model: str, batch: int, work: str, seconds: float) -> str:
    versions = [Version(folder, model, batch, work) for folder in folders]
    times: list[tuple[float, float]] = []
    steps, end = 0, time.monotonic() + seconds
    while len(times) < 21 or time.monotonic() < end:
        first = len(times) % 2
        taken = {which: versions[which].step() for which in (first, 1 - first)}
        steps += 1
        if steps & (steps - 1):
            times.append((taken[0], taken[1]))
    for version in versions:
        version.close()
    fast = [statistics.quantiles(own, n=10)[0] for own in zip(*times, strict=True)]
    ratios = sorted(after / before for before, after in times)
    spread = statistics.quantiles(ratios, n=4)
    error = 0.93 * (spread[2] - spread[0]) / len(ratios) ** 0.5  # of a median, were they normal
    return (
        f"{model:16}{work:10}{batch:6}{1e3 * fast[1]:9.2f} ms {fast[1] / fast[0]:9.3f} {spread[1]:9.3f} +- {error:.3f}"
        f"   ({len(ratios)} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--work", nargs="+", choices=WORK, default=["gradients"])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each line")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        model, batch, work = chosen.serve
        serve(model, int(batch), work)
        return
    if chosen.before is None:
        parser.error("a revision to compare with is needed, such as HEAD~1")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [HERE.parent, HERE.parent]
        for which, revision in enumerate((chosen.before, chosen.after)):
            if revision is not None:
                folders[which] = Path(scratch) / str(which)
                archive = subprocess.run(
                    ["git", "archive", revision, "src"],
                    cwd=HERE.parent,
                    stdout=subprocess.PIPE,
                    check=True,
                )
                folders[which].mkdir()
                subprocess.run(["tar", "x"], cwd=folders[which], input=archive.stdout, check=True)
        print(f"{'model':16}{'work':10}{'batch':>6}{'after':>12} {'fastest':>9} {'median':>9}")
        for one in itertools.product(chosen.models, chosen.batches, chosen.work):
            print(compare(folders, *one, chosen.seconds), flush=True)


if __name__ == "__main__":
    main()
