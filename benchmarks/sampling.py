"""What drawing records and making noise cost: time a step, bytes a record, shares of a step.

    python benchmarks/sampling.py                          two tables
    python benchmarks/sampling.py --json                   one JSON object a row
    python benchmarks/sampling.py --populations 1e7 --kappas 0.3 1
    python benchmarks/sampling.py --what sampling --populations 1e8 --kappas 1 --batch 4096 --clock cpu --threads 1

Sampling: a draw and the observation of the norms of all who were drawn, for norms spread
over two orders of magnitude that change by half from visit to visit. Bytes a record are all that numpy
holds after the sampler was built and used; the peak is the most it held from building to sorting all records anew.
Noise: `add_noise` as a share of the step of `RecordGradients` that it follows (norms, weights, sum),
both measured in turns in this run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from engines import prepared
from meters import CLOCKS, describe_machine, median_milliseconds
from rich.console import Console
from rich.table import Table
from torch import Tensor
from workloads import WORKLOADS, Workload, mlp

from dpis.noise import add_noise
from dpis.randomness import Key
from dpis.sampling import ImportanceSampler, Sampler, Shards, UniformSampler

BATCH = 512
HEADROOM = 2.0
MOST_MILLISECONDS, MOST_BYTES = 2.0, 15.0
PART = 1 << 20
KEY = Key.from_seed(0)


@dataclass(frozen=True)
class SamplingRow:
    """One sampler; the times are of one step."""

    sampler: str
    records: int
    kappa: float
    candidates: float
    draw_ms: float
    observe_ms: float
    step_ms: float
    step_ms_95: float
    sort_all_ms: float
    bytes_a_record: float
    peak_bytes_a_record: float
    within_limits: bool


@dataclass(frozen=True)
class NoiseRow:
    """One model; ``share`` is noise over the step without it."""

    model: str
    parameters: int
    step_ms: float
    noise_ms: float
    share: float
    limit: float
    within_limits: bool


def norms(records: int) -> Tensor:
    """Lognormal: one record in twenty at the clip norm, one in twenty at a hundredth of it."""
    generator = torch.Generator().manual_seed(0)
    return torch.exp(torch.randn(records, generator=generator) * 1.4 - 2.3)


def seen(sampler: Sampler, current: Tensor) -> None:
    """All records, some at a time: what the sampler holds is looked at, not what it is given."""
    for part in torch.arange(len(current)).split(PART):
        sampler.observe(part, current[part])


def measure_sampling(
    records: int, kappa: float, batch: int, steps: int, clock: str, by_importance: bool
) -> SamplingRow:
    now = CLOCKS[clock]
    current = norms(records)
    sampler: Sampler = UniformSampler(Shards.whole(records), 1.0)
    if by_importance:
        sampler = ImportanceSampler(Shards.whole(records), 1.0, headroom=HEADROOM)
        seen(sampler, current)
    start = now()
    sampler.set_clip_norm(1.0)
    sort_all = now() - start
    drawing, observing, candidates = [], [], []
    for step in range(steps + 5):  # the first five warm up
        change = torch.exp(0.5 * torch.randn(8 * batch))
        start = now()
        draw = sampler.draw(min(1.0, batch / kappa / records), KEY.coins("draw", step))
        drawn = now()
        found = current[draw.indices] * change[: len(draw)]
        looked_at = now()
        sampler.observe(draw.indices, found)
        done = now()
        if step >= 5:
            drawing.append(1e3 * (drawn - start))
            observing.append(1e3 * (done - looked_at))
            candidates.append(len(draw))
    whole = sorted(d + o for d, o in zip(drawing, observing, strict=True))
    held, peak = measure_memory(current, batch) if by_importance else (0.0, 0.0)
    return SamplingRow(
        sampler=f"importance, k={HEADROOM:g}" if by_importance else "uniform",
        records=records,
        kappa=kappa,
        candidates=round(statistics.mean(candidates), 1),
        draw_ms=round(statistics.median(drawing), 3),
        observe_ms=round(statistics.median(observing), 3),
        step_ms=round(statistics.median(whole), 3),
        step_ms_95=round(whole[int(0.95 * len(whole))], 3),
        sort_all_ms=round(1e3 * sort_all, 1),
        bytes_a_record=round(held, 3),
        peak_bytes_a_record=round(peak, 3),
        within_limits=statistics.median(whole) <= MOST_MILLISECONDS and peak <= MOST_BYTES,
    )


def measure_memory(current: Tensor, batch: int) -> tuple[float, float]:
    """Bytes a record that a used sampler holds, and the most it ever held."""
    records = len(current)
    tracemalloc.start()
    sampler = ImportanceSampler(Shards.whole(records), 1.0, headroom=HEADROOM)
    seen(sampler, current)
    for step in range(50):
        draw = sampler.draw(min(1.0, batch / records), KEY.coins("draw", step))
        sampler.observe(draw.indices, current[draw.indices])
    held, _ = tracemalloc.get_traced_memory()
    sampler.set_clip_norm(2.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / records, peak / records


NOISE_WORKLOADS = [
    (WORKLOADS["scatter-cnn"], 0.05),
    (Workload("mlp-1m", "784-720-600-10", lambda: mlp(784, 720, 600, 10)), 0.50),
]


def measure_noise(workload: Workload, limit: float, repeats: int, clock: str) -> NoiseRow:
    torch.manual_seed(0)
    task = workload.make()
    step = prepared("dpis", "gradients", task, task.batch(BATCH))
    sums = {name: torch.zeros_like(p) for name, p in task.model.named_parameters()}
    count, entries = iter(range(1 << 60)), sum(value.numel() for value in sums.values())
    times = median_milliseconds(
        {
            "step": step,
            "noise": lambda: add_noise(sums, 1.0, KEY.normals("noise", next(count), entries)),
        },
        repeats,
        CLOCKS[clock],
    )
    share = times["noise"] / times["step"]
    return NoiseRow(
        model=workload.name,
        parameters=sum(value.numel() for value in sums.values()),
        step_ms=round(times["step"], 3),
        noise_ms=round(times["noise"], 3),
        share=round(share, 4),
        limit=limit,
        within_limits=share <= limit,
    )


def rows(chosen: argparse.Namespace) -> Iterator[SamplingRow | NoiseRow]:
    how = chosen.batch, chosen.steps, chosen.clock
    for records in chosen.populations if "sampling" in chosen.what else ():
        yield measure_sampling(int(records), 1.0, *how, by_importance=False)
        for kappa in chosen.kappas:
            yield measure_sampling(int(records), kappa, *how, by_importance=True)
    for workload, limit in NOISE_WORKLOADS if "noise" in chosen.what else ():
        yield measure_noise(workload, limit, chosen.repeats, chosen.clock)


def show(measured: list[SamplingRow | NoiseRow], batch: int, clock: str) -> None:
    sampling = Table("sampler", title=f"Sampling, batch {batch}", caption=describe_machine(clock))
    for heading in ("records", "kappa", "candidates", "draw ms", "observe ms", "step ms", "95 %"):
        sampling.add_column(heading, justify="right")
    for heading in ("sort all ms", "bytes/record", "peak"):
        sampling.add_column(heading, justify="right")
    noise = Table("model", title="Noise", caption=describe_machine(clock))
    for heading in ("parameters", "step ms", "noise ms", "noise / step", "limit"):
        noise.add_column(heading, justify="right")
    for row in measured:
        if isinstance(row, SamplingRow):
            times = (row.draw_ms, row.observe_ms, row.step_ms, row.step_ms_95)
            cells = [f"{time:.2f}" for time in times] + [f"{row.sort_all_ms:.0f}"]
            counts = (f"{row.records:,}", f"{row.kappa:g}", f"{row.candidates:.0f}")
            sampling.add_row(
                row.sampler,
                *counts,
                *cells,
                f"{row.bytes_a_record:.2f}",
                f"{row.peak_bytes_a_record:.1f}",
            )
        else:
            cells = [f"{row.step_ms:.2f}", f"{row.noise_ms:.2f}", f"{row.share:.1%}"]
            noise.add_row(row.model, f"{row.parameters:,}", *cells, f"{row.limit:.0%}")
    console = Console()
    console.print(sampling, noise)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--populations", nargs="+", type=float, default=[1e5, 1e6, 1e7])
    parser.add_argument("--kappas", nargs="+", type=float, default=[0.3, 1.0])
    parser.add_argument(
        "--what", nargs="+", choices=["sampling", "noise"], default=["sampling", "noise"]
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="expected, of a drawn step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    measured = []
    for row in rows(chosen):
        measured.append(row)
        if chosen.json:
            print(json.dumps(asdict(row)), flush=True)
    if not chosen.json:
        show(measured, chosen.batch, chosen.clock)


if __name__ == "__main__":
    main()
