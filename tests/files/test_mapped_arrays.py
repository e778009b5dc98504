"""Arrays that are read where they lie: a folder of .npy, members of an .npz."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpis import stored_rows
from dpis.errors import InputError
from dpis.files.array_records import RawArrays
from dpis.files.reading import encode_evaluation, encode_features, open_records
from dpis.files.schema import Schema
from dpis.stored_rows import StoredRows, blocks_of

N = 90
SCHEMA = Schema.from_flags(classes="3")


def arrays(dtype: str = "f4") -> dict[str, np.ndarray]:
    x = (np.arange(N * 12).reshape(N, 3, 4) % 251).astype(dtype)
    return {"x": x, "y": np.arange(N) % 3, "user_ids": np.arange(N) // 2}


def as_folder(path: Path, named: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    for name, array in named.items():
        np.save(path / f"{name}.npy", array)
    return path


def as_npz(path: Path, named: dict[str, np.ndarray]) -> Path:
    np.savez(path.with_suffix(".npz"), **named)
    return path.with_suffix(".npz")


def as_plain_zip(path: Path, named: dict[str, np.ndarray]) -> Path:
    """With an extra field and a comment before the numbers, as other programs write."""
    folder = as_folder(path, named)
    with zipfile.ZipFile(path.with_suffix(".npz"), "w") as archive:
        for name in named:
            info = zipfile.ZipInfo(f"{name}.npy")
            info.extra = b"\x99\x99\x04\x00abcd"
            archive.writestr(info, (folder / f"{name}.npy").read_bytes())
    return path.with_suffix(".npz")


WAYS: list[Callable[[Path, dict[str, np.ndarray]], Path]] = [as_folder, as_npz, as_plain_zip]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stored_rows, "KEPT_IN_MEMORY", 8 * N + 200
    )  # labels in memory, features not
    monkeypatch.setattr(stored_rows, "MOST_ROWS", 17)


def without_users(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in named.items() if name != "user_ids"}


def error(path: Path, schema: Schema = SCHEMA) -> str:
    with pytest.raises(InputError) as raised:
        _ = open_records(path, schema=schema).private_notes
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["f4", ">f8", "u1", "i2", "F"])
def test_the_same_rows_as_in_memory(
    tmp_path: Path, way: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = without_users(arrays("f4" if dtype == "F" else dtype))
    if dtype == "F":
        named["x"] = np.asfortranarray(named["x"])
    path = way(tmp_path / "data", named)
    expected = open_records(path, schema=SCHEMA).encode()
    assert isinstance(expected.features, torch.Tensor)
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 8 * N + 200)
    monkeypatch.setattr(stored_rows, "MOST_ROWS", 17)
    raw = open_records(path, schema=SCHEMA)
    assert raw.private_notes == ()
    assert raw.image_shape == (3, 4)
    made = raw.encode()
    assert isinstance(made.features, StoredRows)
    assert made.preprocessing == expected.preprocessing
    assert torch.equal(made.targets, expected.targets)
    for features in (
        made.features,
        encode_features(path, made.preprocessing),
        encode_evaluation(path, made.preprocessing)[0],
    ):
        assert torch.equal(torch.cat(list(blocks_of(features, 50))), expected.features)


@pytest.mark.usefixtures("on_disk")
def test_users_of_arrays_on_disk(tmp_path: Path) -> None:
    path = as_folder(tmp_path / "data", arrays())
    raw = open_records(path, schema=Schema.from_flags(classes="3", user_column="user_ids"))
    assert isinstance(raw, RawArrays)
    assert raw.user_ids is not None
    assert raw.user_ids.tolist() == arrays()["user_ids"].tolist()


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_not_finite_are_found_before_training(tmp_path: Path, way: Any) -> None:
    named = without_users(arrays())
    named["x"][40, 1, 2] = np.inf
    path = way(tmp_path / "data", named)
    assert "1 record has features that are not finite in float32, the first is record 41" in error(
        path
    )
    features = open_records(path, schema=SCHEMA).encode().features
    with pytest.raises(InputError, match="not finite"):
        features.fetch(np.array([3, 40]))  # type: ignore[union-attr]


@pytest.mark.usefixtures("on_disk")
def test_large_members_that_are_compressed(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", **without_users(arrays()))
    said = error(tmp_path / "data.npz")
    assert "x.npy is compressed and too large" in said
    assert "numpy.savez, not savez_compressed" in said


@pytest.mark.usefixtures("on_disk")
def test_members_that_are_cut_short_or_hold_objects(tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "data", without_users(arrays()))
    content = (folder / "x.npy").read_bytes()
    for broken, said in (
        (content[:-1], "x.npy is cut short"),
        (content[:50], "is not an array in NumPy's format"),
        (b"", "is not an array in NumPy's format"),
        (b"\x93NUMPY\x07\x00" + content[8:], "is not an array in NumPy's format"),
    ):
        (folder / "x.npy").write_bytes(broken)
        assert said in error(folder)
    np.save(folder / "x.npy", np.array([[None]] * N), allow_pickle=True)
    assert "holds Python objects, which could run code" in error(folder)
    np.save(folder / "x.npy", np.zeros((0, 3)))
    assert "there are no records" in error(folder)
    np.save(folder / "x.npy", arrays()["x"][:-1])
    assert "targets must be one a record, of the shape (89,), found (90,)" in error(folder)
    (folder / "y.npy").unlink()
    np.save(folder / "x.npy", arrays()["x"])
    assert "targets are needed" in error(folder)
    np.save(folder / "x.npy", arrays("c8")["x"])
    np.save(folder / "y.npy", arrays()["y"])
    assert "features must be numbers, found the type complex64" in error(folder)


def test_one_array_alone_is_for_predicting(tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "data", without_users(arrays()))
    made = open_records(folder, schema=SCHEMA).encode()
    assert torch.equal(encode_features(folder / "x.npy", made.preprocessing), made.features)  # type: ignore[arg-type]
    assert "targets are needed" in error(folder / "x.npy")
