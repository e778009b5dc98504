"""The secret state of an unfinished run, tensors and all, in its checkpoint file."""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.group import Group
from dpis.mechanism.secret_parts import Parts, save_parts
from dpis.mechanism.sharded_state import taken_apart
from dpis.randomness import Key
from dpis.runs.checkpoint import (
    DamagedCheckpointError,
    read_checkpoint,
    sealed,
    unsealed,
    write_checkpoint,
)
from dpis.runs.folder import parts_beside, remove_parts_beside


def save_secret_state(place: Path | IO[bytes], state: dict[str, Any]) -> None:
    """Replace the checkpoint by one that holds this state; or write it into an open file, which its owner protects."""
    buffer = io.BytesIO()  # torch has an error of its own for a full disk
    torch.save(state, buffer)
    if isinstance(place, Path):
        write_checkpoint(place, buffer.getbuffer())
    else:
        place.write(sealed(buffer.getbuffer()))


def load_secret_state(place: Path | IO[bytes], *parts: str) -> dict[str, Any]:
    """The state that was saved last: tensors and plain values alone, nothing in the file is run.

    Args:
        place: the checkpoint file, or a file that is open at the beginning of what was written.
        parts: what it must hold.

    Raises:
        InputError: there is none, it is not one of ours, or it is of another kind.
    """
    path = place if isinstance(place, Path) else Path(str(getattr(place, "name", "the file")))
    content = io.BytesIO(
        read_checkpoint(path) if isinstance(place, Path) else unsealed(place.read(), path)
    )
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
    except Exception:  # torch and pickle have many for bytes that are not theirs
        raise DamagedCheckpointError(path) from None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(path)
    if not state.keys() >= set(parts):
        raise InputError(
            f"{path} is a checkpoint of another kind: a run of `dpis train` or `dpis.train` is resumed there, a loop "
            "by load_checkpoint of its PrivacyEngine. Nothing was changed"
        )
    return state


# ── of a group ───────────────────────────────────────────────────────────────────────────────────────

OWN, PARTS = "own", "parts"


def save_group_state(
    place: Path | IO[bytes],
    state: dict[str, Any],
    own: Mapping[str, Tensor],
    group: Group,
) -> None:
    """Replace the checkpoint of a group at once: a crash of any rank leaves the old one or the new.

    Args:
        place: as for `save_secret_state`; a group of several ranks needs a path.
        state: what all ranks have in common: that of rank 0 is kept. Of tensors that are sharded over the ranks each
            writes its rows.
        own: of this rank, each tensor under a name that no other rank uses.
        group: all ranks call this at the same place.
    """
    if group.size == 1:
        save_secret_state(place, {**state, OWN: dict(own)})
        return
    if not isinstance(place, Path):
        raise InputError(
            "several processes save into one folder, so a path is required, found an open file: give path=, on storage "
            "that all of them see"
        )
    folder = group.from_first(lambda: parts_beside(place, secrets.token_hex(4)))
    state, sharded = taken_apart(state)
    sha256 = save_parts(folder, {**own, **sharded}, group)

    def replace() -> None:
        save_secret_state(place, {**state, PARTS: {"folder": folder.name, "sha256": sha256}})
        remove_parts_beside(place, but=folder)

    group.from_first(replace)


def own_state(place: Path | IO[bytes], state: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """What all ranks had of their own when this state was saved, to be looked up by name.

    Args:
        place: where the state was loaded from.
        state: as `load_secret_state` returned it.
    """
    if OWN in state:
        own: dict[str, Tensor] = state[OWN]
        return own
    parts = state[PARTS]
    assert isinstance(place, Path)
    return Parts(place.with_name(parts["folder"]), parts["sha256"])


def shared_key(seed: int | None, group: Group) -> Key:
    """One key for all processes of a group: rank 0 takes it from the operating system, or from the seed."""
    group.require_same(seed, "seed")
    made = Key.fresh() if seed is None else Key.from_seed(seed)
    return Key(group.from_first(lambda: made.secret), seed)
