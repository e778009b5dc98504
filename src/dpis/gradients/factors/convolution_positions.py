"""Images as matrices: one line for each position, one column for each channel.

A product rounds differently where its matrices begin elsewhere relative to a vector register
(seen with MKL: 9 positions of 81 channels, records at odd multiples of 4 bytes). A record's norm
would then depend on its place in the batch. So the matrices of every record begin at a multiple of
``ALIGNMENT`` numbers: channels of zeros are added where their size does not bring this about.
"""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.nn.functional import pad

from dpis.gradients.aligned import ALIGNMENT


def positions(values: Tensor, rows: int, *, pad_channels: bool = False) -> Tensor:
    """``[records·rows, channels, *spatial]`` as ``[records, rows·positions, channels]``, aligned.

    A view wherever memory allows, and a copy in the order of memory elsewhere. Rows of one record
    lie end to end, as further positions.

    Args:
        values: The images.
        rows: How many consecutive images make one record.
        pad_channels: Make the number of channels a multiple of ``ALIGNMENT`` in any case.
    """
    size = rows * prod(values.shape[1:])
    missing = -values.shape[1] % ALIGNMENT if pad_channels or size % ALIGNMENT else 0
    if values.stride(1) == 1:
        channels_last = values.movedim(1, -1)
        if missing:
            channels_last = pad(channels_last, (0, missing))
        flat = channels_last.flatten(1, -2)
    else:
        channels_first = values.flatten(2)
        if missing:
            channels_first = pad(channels_first, (0, 0, 0, missing))
        flat = channels_first.transpose(1, 2)
    if rows > 1:
        flat = flat.reshape(-1, rows * flat.shape[1], flat.shape[2])
    return flat if _aligned(flat) else flat.clone()


def _aligned(flat: Tensor) -> bool:
    return flat.stride(0) % ALIGNMENT == 0 and flat.storage_offset() % ALIGNMENT == 0
