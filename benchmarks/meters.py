"""Time and memory of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""On a machine with other work, one thread and its own CPU time tell more than the wall clock."""


def median_milliseconds(
    steps: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The median time of every step, the steps taking turns, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):  # the first two warm up
        for name, step in steps.items():
            start = clock()
            step()
            if repeat >= 2:
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_bytes(step: Callable[[], object]) -> int:
    """The most that torch's allocator held during a step, above what it held before.

    Counts every tensor, those inside kernels included; not the scratch memory that BLAS and oneDNN
    allocate themselves.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def describe_machine(clock: str) -> str:
    """What the figures were measured on, and how."""
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {threads} thread{'s'[: threads != 1]}, {clock} time"
