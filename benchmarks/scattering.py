"""Scattering of 28 x 28 images: ours against kymatio, in one run.

    python benchmarks/scattering.py             a table
    python benchmarks/scattering.py --json      one JSON object a row

kymatio 0.3 needs an environment of its own, with SciPy below 1.17 (`pip install kymatio==0.3.0 'scipy<1.15'`); without
it only our own rows are shown. It is measured at three batch sizes, and ratios are to the fastest of
them. Times are medians of interleaved repetitions; ratios hold for the machine as it was in that run.
``difference`` is the greatest, in any feature, from kymatio's (from our module's, without kymatio).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from meters import CLOCKS, describe_machine, median_milliseconds
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dpis.datasets.sample import load_sample
from dpis.features import Scattering, scatter_features

KYMATIO_BATCHES = (64, 256, 1024)


@dataclass(frozen=True)
class Row:
    """One way to compute the features. ``speedup``: how many times as fast as kymatio at its best."""

    way: str
    microseconds_per_image: float
    speedup: float | None
    difference: float


def ways(images: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each returns the features of all images, ``[N, 81, 7, 7]``."""
    module, scaled = Scattering(), images[:, None] / 255
    found: dict[str, Callable[[], Tensor]] = {
        "dpis scatter_features": lambda: scatter_features(images, cache=False),
        "dpis module": lambda: module(scaled),
    }
    try:
        from kymatio.torch import Scattering2D
    except ImportError:
        return found
    reference = Scattering2D(J=2, shape=(28, 28))

    def batched(size: int) -> Tensor:
        return torch.cat([reference(batch)[:, 0] for batch in scaled.split(size)])

    for size in KYMATIO_BATCHES:
        found[f"kymatio, batches of {size}"] = lambda size=size: batched(size)
    return found


def measure(images: Tensor, repeats: int, clock: str) -> list[Row]:
    steps = ways(images)
    features = {name: step() for name, step in steps.items()}
    reference = features[list(features)[-1]]
    times = median_milliseconds(steps, repeats, CLOCKS[clock])
    theirs = [taken for name, taken in times.items() if name.startswith("kymatio")]
    return [
        Row(
            way=name,
            microseconds_per_image=round(1e3 * taken / len(images), 1),
            speedup=round(min(theirs) / taken, 2) if theirs else None,
            difference=float((features[name] - reference).abs().max()),
        )
        for name, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=2048, help="how many, up to 10,000")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    images = load_sample().train_images[: arguments.images]
    rows = measure(images, arguments.repeats, arguments.clock)
    if arguments.json:
        for row in rows:
            print(json.dumps(asdict(row) | {"machine": describe_machine(arguments.clock)}))
        return
    table = Table("way", "µs an image", "times as fast as kymatio", "difference")
    for row in rows:
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
        table.add_row(
            row.way, f"{row.microseconds_per_image:.0f}", speedup, f"{row.difference:.1e}"
        )
    Console().print(describe_machine(arguments.clock), table)


if __name__ == "__main__":
    main()
