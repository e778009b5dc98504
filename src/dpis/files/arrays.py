"""Reading records from ``.npz``, ``.npy`` and ``.pt`` files. Nothing that would run code on loading is accepted."""

from __future__ import annotations

import math
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.schema import listed, shown
from dpis.files.users import number_users
from dpis.stored_rows import MappedRows, fits_in_memory

FEATURE_NAMES = ("x", "features", "images", "inputs", "data")
TARGET_NAMES = ("y", "targets", "labels", "target")
USER_IDS = "user_ids"

_UNREADABLE = (
    ValueError,  # NumPy: objects, broken headers
    RuntimeError,  # PyTorch: broken archives
    pickle.UnpicklingError,  # PyTorch: anything but tensors
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,
    MemoryError,  # a header that claims more than there is
)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Records as arrays whose first axis counts them."""

    source: str
    features: NDArray[np.generic]
    target_name: str
    targets: NDArray[np.generic] | None
    user_ids: NDArray[np.int64] | None
    stored: MappedRows | None = None
    """Where the features lie, if they are mapped from a file."""

    def __len__(self) -> int:
        return len(self.features)

    def required_targets(self) -> NDArray[np.generic]:
        """The targets, or an error that says that they are needed."""
        if self.targets is None:
            raise InputError(f"{self.source}: targets are needed, under {listed(TARGET_NAMES)}")
        return self.targets


def read_arrays(
    path: str | Path, *, target: str | None = None, user_column: str | None = None
) -> Arrays:
    """Features, targets (if there are any) and users (if there are any) of a file.

    Args:
        path: an ``.npz`` with named arrays, a ``.pt`` with a dict of tensors or a pair ``(x, y)``, a folder with an
            ``.npy`` for each array, or one ``.npy`` of features alone.
        target: the name of the targets, if it is none of `TARGET_NAMES`.
        user_column: the name of the users' array, if it is not ``user_ids``.
    """
    path = Path(path)
    named, mapped = _read_named(path)
    feature_name = _one_of(path, named, FEATURE_NAMES, "features")
    features = named[feature_name]
    target_name = target if target is not None else _one_of(path, named, TARGET_NAMES, None)
    if target is not None and target not in named:
        raise InputError(f"{path}: there is no target {target!r}, only {listed(named)}")
    user_name = USER_IDS if user_column is None else user_column
    if user_column is not None and user_column not in named:
        raise InputError(f"{path}: there are no users {user_column!r}, only {listed(named)}")
    if features.dtype.kind not in "buif":
        raise InputError(f"{path}: features must be numbers, found the type {features.dtype}")
    if features.ndim < 2:
        raise InputError(
            f"{path}: features must have a row a record, [records, ...], found the shape {features.shape}"
        )
    if features.size == 0:
        raise InputError(f"{path}: there are no records: features have the shape {features.shape}")
    targets = named.get(target_name) if target_name else None
    if targets is not None:
        targets = _decoded(_one_a_record(path, features, targets, "targets"))
    users = named.get(user_name)
    if users is not None:
        users = number_users(_one_a_record(path, features, users, "users"), f"{path}: ")
    return Arrays(
        source=str(path),
        features=features,
        target_name=target_name or "y",
        targets=targets,
        user_ids=users,
        stored=mapped.get(feature_name),
    )


Named = dict[str, NDArray[np.generic]]


def _read_named(path: Path) -> tuple[Named, dict[str, MappedRows]]:
    """Arrays by name, and of those that are too large to be read where they lie."""
    if path.is_dir():
        files = {file.stem: file for file in sorted(path.glob("*.npy"))}
        if not files:
            raise InputError(
                f"{path} is a folder without .npy files: a folder of arrays holds x.npy, y.npy and so on; one of a "
                "Hugging Face dataset state.json"
            )
        mapped = {name: _map_npy(file, file, 0) for name, file in files.items()}
    elif path.suffix.lower() == ".npy":
        mapped = {"x": _map_npy(path, path, 0)}
    elif path.suffix.lower() == ".npz":
        named, mapped = _read_npz(path)
        return {**named, **{name: rows.array for name, rows in mapped.items()}}, mapped
    else:
        return _read_pt(path), {}
    return {name: _whole_if_small(rows) for name, rows in mapped.items()}, mapped


def _whole_if_small(rows: MappedRows) -> NDArray[np.generic]:
    array: NDArray[np.generic] = rows.array
    return np.array(array) if fits_in_memory(array.nbytes) else array


def _read_npz(path: Path) -> tuple[Named, dict[str, MappedRows]]:
    """The small members, and where the large ones lie."""
    try:
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise InputError(
                    f"{path} holds one array, not named ones: save them with numpy.savez"
                )
            with found, zipfile.ZipFile(path) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                large = {n for n in found.files if not fits_in_memory(members[n].file_size)}
                named = {name: found[name] for name in found.files if name not in large}
                mapped = {name: _map_member(path, members[name]) for name in large}
                return named, mapped
    except InputError:
        raise
    except OSError as error:
        raise _cannot_read(path, error) from None
    except _UNREADABLE as error:
        raise InputError(
            f"{path} is not a plain .npz of numbers ({_line(error)}): save x and y with numpy.savez, without objects"
        ) from None


_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a member of a zip file: a mark, and how long its name and its extra field are."""


def _map_member(path: Path, info: zipfile.ZipInfo) -> MappedRows:
    """A member that lies in the archive as it is."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise InputError(
            f"{path}: {info.filename} is compressed and too large to be unpacked into memory "
            f"({info.file_size / 2**20:,.0f} MiB): save it with numpy.savez, not savez_compressed, or as .npy in a "
            "folder, so that it can be read by index"
        )
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        mark, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        if mark != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"no member at {info.header_offset}")
    return _map_npy(path, info.filename, info.header_offset + _LOCAL_HEADER.size + name + extra)


def _map_npy(path: Path, called: object, begin: int) -> MappedRows:
    """An array in NumPy's format that begins somewhere in a file."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, by_column, dtype = read_header(file)
            offset, size = file.tell(), file.seek(0, 2)
    except OSError as error:
        raise _cannot_read(path, error) from None
    except _UNREADABLE as error:
        raise InputError(
            f"{called} is not an array in NumPy's format ({_line(error)}): save it with numpy.save"
        ) from None
    if dtype.hasobject:
        raise InputError(f"{called} holds Python objects, which could run code: save plain numbers")
    rows = MappedRows(path, dtype, shape, offset, by_column)
    if not shape or 0 in shape:
        raise InputError(f"{called}: there are no records: its shape is {shape}")
    if size - offset < dtype.itemsize * math.prod(shape):
        raise InputError(
            f"{called} is cut short: {shape} of {dtype} take more than it has. Write it again"
        )
    return rows


def _read_pt(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd pickles, which are refused just below
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _cannot_read(path, error) from None
    except (*_UNREADABLE, AttributeError, TypeError, IndexError):
        raise InputError(
            f"{path} is not a file of plain tensors (pickled objects are refused, they could run code): save "
            "torch.save({'x': x, 'y': y}, path)"
        ) from None
    if isinstance(found, torch.Tensor):
        found = {"x": found}
    elif isinstance(found, tuple | list) and len(found) == 2:
        found = {"x": found[0], "y": found[1]}
    if not isinstance(found, Mapping):
        raise InputError(
            f"{path} must hold a dict of tensors or a pair (x, y), found {_kind(found)}"
        )
    return {str(name): _as_numpy(path, str(name), value) for name, value in found.items()}


def _as_numpy(path: Path, name: str, value: object) -> NDArray[np.generic]:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{path}: {name!r} must be a tensor, found {_kind(value)}")
    if value.layout != torch.strided or value.is_quantized or value.is_complex():
        raise InputError(f"{path}: {name!r} must be a dense tensor of real numbers")
    value = value.detach()
    if value.dtype.is_floating_point and value.dtype not in (torch.float32, torch.float64):
        value = value.to(torch.float32)  # NumPy has no bfloat16
    array: NDArray[np.generic] = value.contiguous().numpy()
    return array


def _one_of(
    path: Path, named: Mapping[str, object], names: tuple[str, ...], what: str | None
) -> str:
    found = [name for name in named if name.lower() in names]
    if len(found) > 1:
        raise InputError(f"{path}: {listed(found)} could all be meant, keep one of them")
    if not found and what is not None:
        raise InputError(f"{path}: {what} must be named {listed(names)}; found {listed(named)}")
    return found[0] if found else ""


def _one_a_record(
    path: Path, features: NDArray[np.generic], values: NDArray[np.generic], what: str
) -> NDArray[np.generic]:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (len(features),):
        raise InputError(
            f"{path}: {what} must be one a record, of the shape ({len(features)},), found {values.shape}"
        )
    return values


def _decoded(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Bytes as text."""
    if values.dtype.kind == "S":
        return np.char.decode(values.astype(np.bytes_), "utf-8", "replace")
    return values


def _cannot_read(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {path}: {error.strerror or _line(error)}")


def _line(error: BaseException) -> str:
    return shown(" ".join(str(error).split()), 80).strip("'\"")


def _kind(value: object) -> str:
    return type(value).__name__
