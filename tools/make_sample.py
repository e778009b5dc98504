#!/usr/bin/env python3
"""Make src/dpis/data/fmnist_sample.xz from the published Fashion-MNIST, byte for byte the same each time.

    DPIS_DATA=folder python tools/make_sample.py [OUTPUT]

The first 10,000 training images and the first 2,000 test images in their order, neither balanced nor
sorted, then their labels, one byte an entry. LZMA models images as they are better than their
differences: 4.50 MB against 4.62 MB and more for the four usual predictors (left, above, their mean,
median edge), pixel by pixel or image by image.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path

import torch

from dpis.datasets import named
from dpis.datasets.sample import FILE, TEST, TRAIN

FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << 24,
        "lc": 4,
        "lp": 0,
        "pb": 2,
    }
]


def main(output: Path) -> None:
    """Write the sample and print what its module must know."""
    whole = named.load("fmnist")
    parts = (
        whole.train_images[:TRAIN],
        whole.test_images[:TEST],
        whole.train_labels[:TRAIN].to(torch.uint8),
        whole.test_labels[:TEST].to(torch.uint8),
    )
    content = b"".join(part.numpy().tobytes() for part in parts)
    packed = lzma.compress(content, format=lzma.FORMAT_XZ, filters=FILTERS)
    output.write_bytes(packed)
    print(f"{output}: {len(packed)} bytes; SHA256 = {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "src" / "dpis" / "data" / FILE
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
