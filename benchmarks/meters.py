"""Time and memory of steps that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""On a machine with other work, one thread and its own CPU time tell more than the wall clock."""

TURN = 0.02
"""A turn of short steps takes so many seconds: what ran before then leaves no trace in the caches."""


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


class Player:
    """One engine's steps, in turns.

    Args:
        step: takes one step; it was taken once already.
        clock: tells the time.
        steady: take steps whose number is a power of two, and do not count them: at these ours
            compares itself with autograd.
    """

    def __init__(
        self, step: Callable[[], object], clock: Callable[[], float], steady: bool
    ) -> None:
        self._step, self._clock, self._steady = step, clock, steady
        self._steps = 1
        self.seconds = 0.0

    def turn(self) -> float:
        """The median time of a step, over one turn."""
        counted: list[float] = []
        begun = time.perf_counter()
        while not counted or time.perf_counter() - begun < TURN:
            start = self._clock()
            self._step()
            taken = self._clock() - start
            self._steps += 1
            if not self._steady or self._steps & (self._steps - 1):
                counted.append(taken)
        self.seconds += time.perf_counter() - begun
        return statistics.median(counted)


def in_turns(
    steps: Mapping[str, Callable[[], object]],
    unit: str,
    seconds: float,
    clock: Callable[[], float],
    steady: bool = True,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Times of every step, in rounds; the unit takes part in all of them.

    Args:
        steps: by name; each was taken once already.
        unit: the name of the step that others are compared with.
        seconds: a step leaves when its turns have taken so long; thrice that before the third round.
        clock: tells the time.
        steady: see `Player`.

    Returns:
        By name, a time for each round, from the first round on; and what was raised by those that failed.
    """
    players = {name: Player(step, clock, steady) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    failures: dict[str, Exception] = {}
    playing = list(players)
    while playing:
        for name in dict.fromkeys([unit, *playing]):
            try:
                times[name].append(players[name].turn())
            except Exception as error:
                failures[name] = error.with_traceback(None)  # which holds the tensors of its frames
                playing.remove(name)
                del times[name]
        if unit in failures:
            break
        allowed = seconds if len(times[unit]) >= 3 else 3 * seconds
        playing = [name for name in playing if players[name].seconds < allowed]
    return times, failures


def ratios(times: Mapping[str, list[float]], unit: str) -> dict[str, tuple[float, float, float]]:
    """Quartiles of the quotients of each step's time and the unit's in the same round, median first."""
    found = {}
    for name, own in times.items():
        quotients = [mine / of_unit for mine, of_unit in zip(own, times[unit], strict=False)]
        low, middle, high = (
            statistics.quantiles(quotients, n=4, method="inclusive")
            if len(quotients) > 1
            else quotients * 3
        )
        found[name] = (middle, low, high)
    return found


def resident_bytes(which: str = "VmRSS") -> int:
    """What this process has in memory now; with ``VmHWM`` the most since the last `forget_peak`."""
    return _bytes_of("/proc/self/status", which)


def available_bytes() -> int:
    """What the machine could still give (Linux)."""
    return _bytes_of("/proc/meminfo", "MemAvailable")


def _bytes_of(file: str, which: str) -> int:
    lines = Path(file).read_text().splitlines()
    line = next(line for line in lines if line.startswith(which))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    """From here on ``VmHWM`` counts anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def describe_machine(clock: str) -> str:
    """What the figures were measured on, and how."""
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"torch {torch.__version__}, {capability}, {threads} thread{'s'[: threads != 1]}, "
        f"{clock} time"
    )
