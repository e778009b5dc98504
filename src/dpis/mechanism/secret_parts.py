"""What every rank of a group keeps of its own, in a folder beside the checkpoint: `torch.distributed.checkpoint`.

A folder is written anew for every checkpoint, and counts from the moment when the checkpoint file names it: with the
checksum of each of its files, so that nothing is read that was not written whole. Only its owner may look into it.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dpis.accounting.ledger_writer import sync_folder
from dpis.errors import InputError
from dpis.group import Group
from dpis.runs.checkpoint import DamagedCheckpointError

METADATA = ".metadata"
SECRET_FOLDER = 0o700


def save_parts(folder: Path, own: Mapping[str, Tensor], group: Group) -> dict[str, str]:
    """Write the tensors of all ranks, each under a name of its own; on the disk when this returns.

    Returns:
        The sha256 of every file, by its name; the same on every rank.
    """
    with group.together():
        if group.leads:
            shutil.rmtree(folder, ignore_errors=True)  # of a group that was killed while it wrote
            folder.mkdir(mode=SECRET_FOLDER)
    with group.together():
        if not folder.is_dir():
            raise InputError(
                f"the folder of a run must be on storage that all processes share: rank {group.rank} does not see "
                f"{folder}. Give an --out that every machine sees under the same path"
            )
    with group.together():  # whose own messages nobody can break into
        save(dict(own), storage_writer=FileSystemWriter(folder))
    with group.together():
        written = folder.iterdir() if group.leads else ()
        sums = {path.name: _sha256(path) for path in written}
        if group.leads:
            sync_folder(folder)
    merged = group.gathered(sums)
    return merged[0]


class Parts(Mapping[str, Tensor]):
    """The tensors that `save_parts` was given on all ranks, read when they are asked for.

    Args:
        folder: that they are in.
        sha256: of its files, as `save_parts` returned them.

    Raises:
        DamagedCheckpointError: a file is missing or is not what was written.
    """

    def __init__(self, folder: Path, sha256: Mapping[str, str]) -> None:
        for name, checksum in sha256.items():
            path = folder / name
            if not path.is_file() or _sha256(path) != checksum:
                raise DamagedCheckpointError(path)
        self._reader = FileSystemReader(folder)
        stored = self._reader.read_metadata().state_dict_metadata
        self._stored = {
            k: one for k, one in stored.items() if isinstance(one, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        size, dtype = self.kind(name)
        room = {name: torch.empty(size, dtype=dtype)}
        self.read_into(room)
        return room[name]

    def kind(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """The size of all of it, and the type of its numbers."""
        stored = self._stored[name]
        return stored.size, stored.properties.dtype

    def read_into(self, room: dict[str, Tensor]) -> None:
        """Fill these tensors; of one that is sharded, the rows of this rank alone are read."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # which is what is meant
            load(room, storage_reader=self._reader, no_dist=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
