"""What a private step costs, in plain SGD steps: ours, Opacus and Opake, in one run.

    python benchmarks/per_example.py                                        every model and batch: hours
    python benchmarks/per_example.py --models bert-lora --batches 4 32      two rows
    python benchmarks/per_example.py --work step                            with noise and optimizer
    python benchmarks/per_example.py --first 16                             the first 16 steps of a run
    python benchmarks/per_example.py --memory --json >> kept.jsonl          one JSON object a cell

Engines take turns in one process. A cell is the median over rounds of the engine's time over that of
SGD in the same round, with the distance of its quartiles. Memory (``--memory``) is the most that a
process of its own had in memory above what it had before the first step. An engine that cannot run a
model says why in two words; ``--json`` has its sentence. ``*``: the engine's clipped sum is not ours.
``ATEN_CPU_CAPABILITY=avx2`` in the environment measures kernels for AVX2.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import resource
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from engines import ENGINES, WORK, Step, UnsupportedError, attempted, norm, prepared
from meters import (
    CLOCKS,
    available_bytes,
    describe_machine,
    forget_peak,
    in_turns,
    ratios,
    resident_bytes,
)
from workloads import WORKLOADS, Batch, Task

BATCHES = (1, 4, 8, 16, 32, 64, 256)
UNIT, OURS = "sgd", "dpis"
SAME = 1e-3
"""Norms of clipped sums that differ by less are the same."""


@dataclass(frozen=True)
class Cell:
    """One engine on one model at one batch size.

    Attributes:
        milliseconds: of a step, or of the first steps; CPU or wall.
        ratio: to SGD, the median; ``low`` and ``high`` are its quartiles.
        rounds: how many times it was compared.
        sum_norm: of the clipped sum.
        megabytes: the most above what was in memory before the first step.
        note: why there are no figures, in two words; ``reason`` is the sentence.
    """

    model: str
    batch: int
    work: str
    engine: str
    milliseconds: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    sum_norm: float | None = None
    megabytes: float | None = None
    note: str = ""
    reason: str = ""


Row = dict[str, Cell]


def measured(model: str, task: Task, size: int, work: str, chosen: argparse.Namespace) -> Row:
    """The cells of one model at one batch size, by engine."""
    torch.manual_seed(0)
    batch = task.batch(size)
    cells = {engine: Cell(model, size, work, engine) for engine in chosen.engines}
    steps: dict[str, Callable[[], object]] = {}
    for engine in chosen.engines:
        try:
            steps[engine], total = started(engine, work, task, batch, chosen.first)
        except UnsupportedError as error:
            cells[engine] = failed(cells[engine], error)
            continue
        if total is not None:
            cells[engine] = replace(cells[engine], sum_norm=norm(total))
        del total
        gc.collect()
    if UNIT not in steps:
        return cells
    steady = chosen.first is None
    times, failures = in_turns(steps, UNIT, chosen.seconds, CLOCKS[chosen.clock], steady)
    for engine, error in failures.items():
        cells[engine] = failed(cells[engine], UnsupportedError(error))
    if UNIT in failures:
        return cells
    for engine, (middle, low, high) in ratios(times, UNIT).items():
        cells[engine] = replace(
            cells[engine],
            milliseconds=round(1e3 * sorted(times[engine])[len(times[engine]) // 2], 3),
            ratio=round(middle, 3),
            low=round(low, 3),
            high=round(high, 3),
            rounds=len(times[engine]),
        )
    return cells


def failed(cell: Cell, error: UnsupportedError) -> Cell:
    return replace(cell, note=error.short, reason=str(error))


def started(
    engine: str, work: str, task: Task, batch: Batch, first: int | None
) -> tuple[Callable[[], object], list[torch.Tensor] | None]:
    """A step that ran once, with its sum; or a fresh start with its first steps, tried with one of them."""
    step: Step = prepared(engine, work, task, batch)
    total = attempted(step)
    if first is None:
        return step, total

    def fresh_start() -> None:
        begun = prepared(engine, work, task, batch)
        for _ in range(first):
            begun()

    return fresh_start, total


def peak_megabytes(model: str, size: int, work: str, engine: str, threads: int) -> float:
    """In a process of its own: the most that three steps have in memory, above what was there before."""
    torch.set_num_threads(threads)
    quiet()
    torch.manual_seed(0)
    task = WORKLOADS[model].make()
    step = WORK[work][engine](task, task.batch(size))
    before = resident_bytes()
    forget_peak()
    for _ in range(3):
        step()
    return round((resident_bytes("VmHWM") - before) / 1e6, 1)


def with_memory(row: Row, chosen: argparse.Namespace) -> Row:
    """The cells that have figures, with their memory where it suffices for a process of its own."""
    found = dict(row)
    for engine, cell in row.items():
        if cell.ratio is None:
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            task = process.submit(
                peak_megabytes, cell.model, cell.batch, cell.work, engine, chosen.threads
            )
            if task.exception() is None:
                found[engine] = replace(cell, megabytes=task.result())
    return found


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """Smaller batches first, so that the price of larger ones is known before they are begun."""
    for model in chosen.models:
        torch.manual_seed(0)
        task = WORKLOADS[model].make()
        for work in chosen.work:
            seconds_a_record = 0.0
            for size in sorted(chosen.batches):
                if seconds_a_record * size > chosen.longest:
                    reason = f"a step of SGD is expected to take {seconds_a_record * size:.0f} s"
                    blank = Cell(model, size, work, "", note="too long", reason=reason)
                    yield {engine: replace(blank, engine=engine) for engine in chosen.engines}
                    continue
                row = measured(model, copy.deepcopy(task), size, work, chosen)
                unit = row[UNIT].milliseconds
                if unit is not None:
                    seconds_a_record = unit / 1e3 / size / (chosen.first or 1)
                yield with_memory(row, chosen) if chosen.memory else row


def shown(cell: Cell, ours: Cell | None) -> str:
    """A cell as a person reads it."""
    if cell.ratio is None or cell.low is None or cell.high is None:
        return cell.note
    spread = f" ±{(cell.high - cell.low) / 2:.2f}".replace("0.", ".") if cell.rounds > 1 else ""
    text = f"{cell.ratio:.2f}{spread}"
    if cell.engine == UNIT:
        text = f"{cell.milliseconds:.4g} ms"
    elif ours is not None and ours.sum_norm is not None and cell.sum_norm is not None:
        text += "*" * (abs(cell.sum_norm - ours.sum_norm) > SAME * ours.sum_norm)
    return text if cell.megabytes is None else f"{text}, {cell.megabytes:.0f} MB"


def against_best_peer(row: Row) -> str:
    """How many times the time of the fastest peer ours takes; bold where that is more."""
    ours = row[OURS].ratio if OURS in row else None
    peers = [cell.ratio for name, cell in row.items() if name not in (UNIT, OURS) and cell.ratio]
    if ours is None or not peers:
        return ""
    quotient = ours / min(peers)
    return f"**{quotient:.2f}**" if quotient > 1 else f"{quotient:.2f}"


def head(chosen: argparse.Namespace) -> str:
    """The first lines of a Markdown table, over what it was measured on."""
    work = f"first {chosen.first} steps" if chosen.first else " and ".join(chosen.work)
    names = ["model", "work", "batch", *chosen.engines, "ours / best peer"]
    return (
        f"{describe_machine(chosen.clock)}; {work}\n\n{line(names)}\n{line(['---'] * len(names))}"
    )


def body(row: Row) -> str:
    """A line of the table."""
    one = next(iter(row.values()))
    cells = [shown(cell, row.get(OURS)) for cell in row.values()]
    return line([one.model, one.work, str(one.batch), *cells, against_best_peer(row)])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--work", nargs="+", choices=WORK, default=["gradients"])
    parser.add_argument("--first", type=int, help="the first so many steps of a run")
    parser.add_argument("--seconds", type=float, default=3.0, help="for a cell")
    parser.add_argument("--longest", type=float, default=10.0, help="step of SGD, seconds")
    parser.add_argument("--gigabytes", type=float, help="that may be used; half of what is free")
    parser.add_argument("--memory", action="store_true", help="measure it too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object a cell")
    chosen = parser.parse_args(given)
    chosen.engines = [UNIT, *(engine for engine in chosen.engines if engine != UNIT)]
    if chosen.first:
        chosen.work = ["step"]
    return chosen


def quiet() -> None:
    """Opacus's hooks warn at every step."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def limit_memory(gigabytes: float | None) -> None:
    """A step that would need more fails, instead of the machine."""
    most = available_bytes() // 2 if gigabytes is None else int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    chosen: Any = arguments()
    torch.set_num_threads(chosen.threads)
    limit_memory(chosen.gigabytes)
    quiet()
    if not chosen.json:
        print(head(chosen), flush=True)
    for row in rows(chosen):
        lines = [json.dumps(asdict(cell)) for cell in row.values()] if chosen.json else [body(row)]
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
