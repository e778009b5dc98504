"""Holding records out for evaluation: one independent coin a record, or a user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.users import codes_by_appearance


def split_by_coins(
    n: int,
    held_out_share: float,
    uniforms: NDArray[np.float64],
    user_ids: NDArray[np.generic] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and rows held out: a record is held out if its own coin falls below the share.

    A permutation would let one record's presence move another from one side to the other; coins do not. So the
    sizes are random: about ``held_out_share * n`` are held out. Held-out records are not protected.

    Args:
        n: how many rows there are.
        held_out_share: from 0 to 1.
        uniforms: coins in ``[0, 1)``: one a row, or one a user in the order of first appearance.
        user_ids: ``[n]``; all rows of a user go to the same side.
    """
    if not 0 <= held_out_share <= 1:
        raise InputError(f"the share held out must be from 0 to 1, found {held_out_share!r}")
    units = np.arange(n) if user_ids is None else codes_by_appearance(user_ids)
    if len(units) != n:
        raise InputError(f"user ids must be one a row: {n} rows, found {len(units)}")
    needed = int(units.max()) + 1 if n else 0
    if uniforms.shape != (needed,):
        who = "row" if user_ids is None else "user"
        raise InputError(f"{needed} coins are needed, one a {who}, found {uniforms.shape}")
    held_out = (uniforms < held_out_share)[units]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
