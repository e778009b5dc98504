"""Inputs for which kymatio's features are recorded in kymatio.npz.

To record them again, in an environment of their own (kymatio 0.3 does not import with SciPy >= 1.17):

    pip install kymatio==0.3.0 'scipy<1.15' torch==2.13.0 . && python -m tests.features.kymatio_cases
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpis.datasets.sample import load_sample

RECORDED = Path(__file__).parent / "kymatio.npz"


@dataclass(frozen=True)
class Case:
    name: str
    images: Tensor
    scales: int = 2
    angles: int = 8


def noise(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(7).random(shape, dtype=np.float32))


def cases() -> list[Case]:
    clothes = load_sample().test_images[:1, None] / 255
    return [
        Case("clothes-28x28", clothes),
        Case("noise-28x28", noise(1, 1, 28, 28)),
        Case("noise-32x32x3", noise(1, 3, 32, 32)),
        Case("uneven-sides-26x35-J3-L4", noise(1, 1, 26, 35), scales=3, angles=4),
        Case("odd-angles-16x16-J1-L5", noise(1, 2, 16, 16), scales=1, angles=5),
    ]


def record() -> None:
    from kymatio.torch import Scattering2D

    features = {}
    for case in cases():
        transform = Scattering2D(case.scales, tuple(case.images.shape[-2:]), L=case.angles)
        features[case.name] = transform(case.images).flatten(1, 2).numpy()
    np.savez_compressed(RECORDED, **features)


if __name__ == "__main__":
    record()
