"""A private step on one and on several processes of this machine: ours, and Opacus under DistributedDataParallel.

    python benchmarks/distributed.py --models scatter-cnn transformer

Every system has its processes, one thread each, connected by gloo; they wait while another system has its turn. The
data set is one batch and the sampling rate 1, so that all systems compute the same records in a step, and a step is
whole: drawing, gradients, sum over processes, noise, optimizer. Printed are milliseconds of the wall clock (median over
turns of the slowest process), the speed-up of two processes over one of the same system, megabytes that one process
sent a step (of the loopback device), and the most memory a process had. Two processes need two idle cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import CLIP_NORM, loader_of, loop, optimizer_of
from meters import describe_machine, resident_bytes
from workloads import WORKLOADS, Task

BATCHES = {
    "scatter-cnn": 512,
    "transformer": 32,
    "mlp": 512,
    "bert-lora": 32,
    "scatter-linear": 512,
}
STEPS = 3
"""Of a turn."""


@dataclass(frozen=True)
class System:
    """Who takes the step, on how many processes."""

    name: str
    processes: int


SYSTEMS = (
    System("dpis", 1),
    System("dpis", 2),
    System("dpis ddp", 2),
    System("dpis fsdp", 2),
    System("opacus hooks", 1),
    System("opacus hooks", 2),
    System("opacus ghost", 1),
    System("opacus ghost", 2),
)


# ── in a process ─────────────────────────────────────────────────────────────────────────────────────


def dpis_loop(task: Task, batch: Any, wrapper: str) -> Any:
    from dpis import PrivacyEngine

    model = task.model
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif wrapper == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for child in model.children():
            for block in child if isinstance(child, torch.nn.ModuleList) else ():
                fully_shard(block)
        fully_shard(model)
    parts = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer_of(model),
        data_loader=loader_of(batch),
        noise_multiplier=1.0,
        max_grad_norm=CLIP_NORM,
        method="dp-sgd",
        n_public=len(batch[1]),
    )
    return loop(*parts, task.loss)


def opacus_loop(task: Task, batch: Any, mode: str) -> Any:
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(task.model)
    if dist.get_world_size() > 1:
        model = DifferentiallyPrivateDistributedDataParallel(model)
    model, optimizer, *loss, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer_of(model),
        data_loader=loader_of(batch),
        criterion=task.loss,
        noise_multiplier=1.0,
        max_grad_norm=CLIP_NORM,
        grad_sample_mode=mode,
    )
    return loop(model, optimizer, loader, loss[0] if loss else task.loss)


def process(pipe: Any, store: str, rank: int, system: System, model: str, size: int) -> None:
    """Answers every word it is sent; 'step' by the seconds of a turn."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=system.processes
    )
    torch.manual_seed(0)
    task = WORKLOADS[model].make()
    batch = task.batch(size)
    kind, _, how = system.name.partition(" ")
    try:
        step = (dpis_loop if kind == "dpis" else opacus_loop)(task, batch, how)
        for _ in range(2):
            step()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
        return
    pipe.send(None)
    while pipe.recv() == "step":
        dist.barrier()
        sent, begun = sent_bytes(), time.perf_counter()
        for _ in range(STEPS):
            step()
        seconds = (time.perf_counter() - begun) / STEPS
        dist.barrier()
        sent = (sent_bytes() - sent) / STEPS / system.processes
        pipe.send((seconds, sent, resident_bytes("VmHWM")))


def sent_bytes() -> int:
    """Over the loopback device, by all processes."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, figures = line.partition(":")
        if device.strip() == "lo":
            return int(figures.split()[8])
    return 0


# ── who asks them ────────────────────────────────────────────────────────────────────────────────────


class Team:
    """The processes of a system."""

    def __init__(self, system: System, model: str, size: int, folder: str) -> None:
        self.system, self.turns = system, list[tuple[float, float, float]]()
        context = multiprocessing.get_context("spawn")
        store = os.path.join(folder, f"{model}-{system.name}-{system.processes}".replace(" ", "-"))
        self._pipes = []
        for rank in range(system.processes):
            here, there = context.Pipe()
            arguments = there, store, rank, system, model, size
            context.Process(target=process, args=arguments, daemon=True).start()
            self._pipes.append(here)
        self.refusal = max((pipe.recv() for pipe in self._pipes), key=bool)

    def turn(self) -> None:
        """A few steps."""
        for pipe in self._pipes:
            pipe.send("step")
        told = [pipe.recv() for pipe in self._pipes]
        self.turns.append(tuple(max(of_ranks) for of_ranks in zip(*told, strict=True)))

    def end(self) -> None:
        """Let them go."""
        for pipe in self._pipes:
            pipe.send("end")

    @property
    def figures(self) -> tuple[float, float, float]:
        """Milliseconds, megabytes sent, megabytes held."""
        seconds, sent, held = zip(*self.turns, strict=True)
        return 1e3 * statistics.median(seconds), statistics.median(sent) / 1e6, max(held) / 1e6


def compare(model: str, size: int, turns: int, chosen: list[str]) -> list[dict[str, Any]]:
    """Rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        teams = [
            Team(system, model, size, folder)
            for system in SYSTEMS
            if not chosen or system.name in chosen
        ]
        running = [team for team in teams if team.refusal is None]
        for _ in range(turns):
            for team in running:
                team.turn()
        rows = []
        for team in teams:
            row: dict[str, Any] = {"model": model, "batch": size, "system": team.system.name}
            row["processes"] = team.system.processes
            if team.refusal is not None:
                rows.append(row | {"refused": team.refusal})
                continue
            milliseconds, sent, held = team.figures
            row |= {"ms": milliseconds, "MB sent": sent, "MB held": held}
            first = next(
                (t for t in running if t.system == System(base_of(team.system.name), 1)), None
            )
            if first is not None and team.system.processes > 1:
                row["speed-up"] = first.figures[0] / milliseconds
            rows.append(row)
        for team in running:
            team.end()
        return rows


def base_of(name: str) -> str:
    """The system on one process that a wrapper is compared with."""
    return "dpis" if name.startswith("dpis") else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["scatter-cnn", "transformer"])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--systems", nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=None, help="records of a step")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(describe_machine("wall"), file=sys.stderr)
    for model in given.models:
        for row in compare(model, given.batch or BATCHES[model], given.turns, given.systems):
            if given.json:
                print(json.dumps(row), flush=True)
                continue
            if "refused" in row:
                print(f"{model:14} {row['system']:14} {row['processes']}  {row['refused']}")
                continue
            faster = f"{row['speed-up']:5.2f}x" if "speed-up" in row else "      "
            print(
                f"{model:14} {row['system']:14} {row['processes']}  {row['ms']:8.1f} ms {faster} "
                f"{row['MB sent']:8.2f} MB sent {row['MB held']:8.0f} MB held",
                flush=True,
            )


if __name__ == "__main__":
    main()
