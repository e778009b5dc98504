"""Features with every group of channels centred and scaled, record by record."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dpis.errors import InputError


def group_normalise(features: Tensor, groups: int) -> Tensor:
    """Each record's ``groups`` equal groups of channels, centred to mean 0 and scaled to variance 1.

    A record's result depends on that record alone, so this costs no privacy. 27 groups suit the 81
    channels of scattered grey images.

    Args:
        features: ``[records, channels, ...]``.
        groups: Divides the number of channels.

    Reference: Wu and He, Group Normalization, ECCV 2018.
    """
    if features.ndim < 2 or groups < 1 or features.shape[1] % groups:
        raise InputError(
            f"groups must divide the channels of features [records, channels, ...]; found {groups} groups"
            f" and shape {list(features.shape)}"
        )
    return functional.group_norm(features, groups)
