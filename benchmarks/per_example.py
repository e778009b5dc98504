"""What a private step costs, in plain SGD steps: ours against Opacus, in one run.

    python benchmarks/per_example.py                              a table
    python benchmarks/per_example.py --json --models scatter-cnn  one JSON object a row

Time: medians of interleaved repetitions; ratios hold for the machine as it was in that run. Memory:
the most that torch's allocator held during a step above what it held before (see meters.py).
``sum_norm`` is the norm of the clipped sum: equal for all engines that compute the same thing.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is talkative

import torch
from engines import ENGINES, UnsupportedError, norm, prepared
from meters import CLOCKS, describe_machine, median_milliseconds, peak_bytes
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Row:
    """One engine on one model; ``note`` says why there are no figures."""

    model: str
    engine: str
    milliseconds: float | None = None
    time_ratio_to_sgd: float | None = None
    memory_ratio_to_sgd: float | None = None
    sum_norm: float | None = None
    note: str = ""


def measure(workload: Workload, engines: list[str], repeats: int, clock: str) -> Iterator[Row]:
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch()
    steps, unsupported = {}, {}
    for engine in engines:
        try:
            steps[engine] = prepared(engine, model, batch)
        except UnsupportedError as error:
            unsupported[engine] = f"unsupported: {error}"
    sums = {engine: norm(step()) for engine, step in steps.items()}
    memory = {engine: peak_bytes(step) for engine, step in steps.items()}
    times = median_milliseconds(steps, repeats, CLOCKS[clock])
    for engine in engines:
        if engine in unsupported:
            yield Row(workload.name, engine, note=unsupported[engine])
            continue
        yield Row(
            workload.name,
            engine,
            milliseconds=round(times[engine], 3),
            time_ratio_to_sgd=round(times[engine] / times["sgd"], 3),
            memory_ratio_to_sgd=round(memory[engine] / memory["sgd"], 3),
            sum_norm=sums[engine],
        )


def show(rows: list[Row], clock: str) -> None:
    table = Table("model", "engine", caption=describe_machine(clock))
    for heading in ("ms", "time / SGD", "memory / SGD", "norm of the sum"):
        table.add_column(heading, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.model != row.model:
            table.add_section()
        if row.note:
            table.add_row(row.model, row.engine, "", "", "", row.note)
            continue
        figures = (row.milliseconds, row.time_ratio_to_sgd, row.memory_ratio_to_sgd)
        cells = [f"{figure:.2f}" for figure in figures if figure is not None]
        table.add_row(row.model, row.engine, *cells, f"{row.sum_norm:.6g}")
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parsed = parser.parse_args()
    parsed.engines = ["sgd", *(engine for engine in parsed.engines if engine != "sgd")]
    return parsed


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore")  # Opacus's hooks warn at every step
    rows = []
    for name in chosen.models:
        for row in measure(WORKLOADS[name], chosen.engines, chosen.repeats, chosen.clock):
            rows.append(row)
            if chosen.json:
                print(json.dumps(asdict(row)), flush=True)
    if not chosen.json:
        show(rows, chosen.clock)


if __name__ == "__main__":
    main()
