"""What a drawn record adds to the sum: a vector ``v_i = w_i · grad_i`` of norm at most one.

For ``n_i = ||grad_i||``, importance ``g_hat_i`` and clip norm ``C``, both ways have the mean
``clip(grad_i, g_hat_i) / g_hat_i``, so that a record drawn with probability ``π · g_hat_i / C`` adds
``(π / C) · clip(grad_i, g_hat_i)`` on average, whatever the estimate was:

    weight    v_i = clip(grad_i, g_hat_i) / g_hat_i
    reject    v_i = grad_i / n_i   with probability  min(n_i, g_hat_i) / g_hat_i,  else 0

``reject`` is the paper's. ``weight`` needs no coin and has the lower variance; privacy is the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.errors import InputError

LEAST_NORM = 1e-8
"""In units of the clip norm. The direction of a shorter gradient is mostly rounding: it adds nothing."""


def acceptance(norms: Tensor, importance: Tensor) -> Tensor:
    """``p_i = min(n_i, g_hat_i) / g_hat_i``, the probability that ``reject`` keeps a record; 0 for NaN."""
    probabilities = torch.minimum(norms.double(), importance.double()) / importance.double()
    return probabilities.nan_to_num(nan=0.0)


def contribution_weights(
    norms: Tensor,
    importance: Tensor,
    *,
    clip_norm: float,
    how: str = "weight",
    uniforms: Tensor | npt.NDArray[np.float64] | None = None,
) -> Tensor:
    """The weights ``w_i`` with ``v_i = w_i · grad_i``; ``w_i · n_i <= 1`` up to one rounding.

    Args:
        norms: ``n_i``. A record whose norm is not finite, or below ``1e-8 · clip_norm``, gets weight 0.
        importance: ``g_hat_i`` in ``(0, clip_norm]``, as in the draw.
        clip_norm: ``C``.
        how: "weight" or "reject".
        uniforms: a fresh number in (0, 1) for every record; for "reject" only.

    Example:
        >>> contribution_weights(torch.tensor([0.5, 4.0]), torch.tensor([1.0, 1.0]), clip_norm=2.0)
        tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    norms, importance = norms.double(), importance.to(norms.device).double()
    if how == "weight" and uniforms is None:
        weights = 1.0 / torch.maximum(norms, importance)
    elif how == "reject" and uniforms is not None:
        coins = torch.as_tensor(uniforms, dtype=torch.float64, device=norms.device)
        weights = torch.where(coins < acceptance(norms, importance), 1.0 / norms, 0.0)
    elif how in ("weight", "reject"):
        raise InputError("'reject' needs one uniform number a record, and 'weight' takes none")
    else:
        raise InputError(f"a contribution is 'weight' or 'reject', found {how!r}")
    usable = norms.isfinite() & (norms >= LEAST_NORM * clip_norm)
    return torch.where(usable, weights, 0.0)
