"""Parquet, Arrow, Feather and Hugging Face folders mean what a CSV of the same table means, in memory or on disk."""

from __future__ import annotations

import datetime
import json
import stat
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet

from dpis import stored_rows
from dpis.errors import InputError
from dpis.files import columnar, packed_table
from dpis.files.packed_table import PackedTable
from dpis.files.reading import encode_evaluation, encode_features, open_records
from dpis.files.schema import Schema
from dpis.files.table_records import RawTable
from dpis.stored_rows import StoredRows, blocks_of
from tests.files.tables import DECLARED, FORMATS, ROWS, arrow_table, columns, write, write_parquet


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(columnar, "ROWS_AT_ONCE", 37)


@pytest.fixture(params=["in memory", "on disk"])
def on_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "on disk":
        monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
        monkeypatch.setattr(stored_rows, "MOST_ROWS", 50)
    return bool(request.param == "on disk")


def schema(**more: Any) -> Schema:
    return Schema.from_flags(**{**DECLARED, "drop": ["who"], **more})


def opened(path: Path, declared: Schema | None = None, **more: Any) -> RawTable:
    raw = open_records(path, schema=declared or schema(), **more)
    assert isinstance(raw, RawTable)
    return raw


def whole(features: Any) -> torch.Tensor:
    return torch.cat(list(blocks_of(features, 64)))


def error(path: Path, declared: Schema | None = None) -> str:
    with pytest.raises(InputError) as raised:
        opened(path, declared)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ── the same rows ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str, on_disk: bool) -> None:
    expected = opened(write("csv", tmp_path)).encode()
    raw = opened(write(kind, tmp_path))
    made = raw.encode()
    assert isinstance(raw.table, PackedTable) == isinstance(made.features, StoredRows)
    assert isinstance(raw.table, PackedTable) == (on_disk and kind != "csv")
    assert made.preprocessing == expected.preprocessing
    assert torch.equal(whole(made.features), expected.features)
    assert torch.equal(made.targets, expected.targets)
    others = encode_evaluation(tmp_path / FORMATS[kind][0], made.preprocessing)
    assert torch.equal(whole(others[0]), expected.features)
    alone = encode_features(tmp_path / FORMATS[kind][0], made.preprocessing)
    assert torch.equal(whole(alone), expected.features)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_has_the_same_users_sets_and_counts(
    tmp_path: Path, kind: str, on_disk: bool
) -> None:
    declared = Schema.from_flags(
        target="ok", classes="from-data", categories=["city=from-data"], user_column="who"
    )
    expected = opened(write("csv", tmp_path), declared, release_scale=True)
    raw = opened(write(kind, tmp_path), declared, release_scale=True)
    assert raw.target == expected.target
    assert raw.columns == expected.columns
    assert raw.user_ids is not None
    assert expected.user_ids is not None
    assert np.array_equal(raw.user_ids, expected.user_ids)
    rows = np.flatnonzero(np.arange(ROWS) % 3)
    assert torch.allclose(raw.bucket_counts(rows), expected.bucket_counts(rows), rtol=1e-12)
    assert raw.private_notes == expected.private_notes


def test_cells_of_every_plain_type_mean_what_they_would_in_text(tmp_path: Path) -> None:
    cells: dict[str, pa.Array] = {
        "small": pa.array([1, None, 3], pa.int8()),
        "yes": pa.array([True, None, False]),
        "half": pa.array([0.1, None, 2.0], pa.float32()),
        "money": pa.array([Decimal("1.50"), None, Decimal("2.00")], pa.decimal128(9, 2)),
        "text": pa.array(["1.5", None, "x"], pa.large_string()),
        "nothing": pa.nulls(3),
    }
    table = pa.table(
        {**cells, "day": pa.array([datetime.date(2020, 1, 2), None, None]), "y": ["a", "b", "a"]}
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    names = [*cells, "y"]
    numbers = next(columnar.open_columnar(tmp_path / "t.parquet").tables(list(cells), [])).numbers
    assert numbers["small"].tolist()[::2] == [1, 3]
    assert numbers["yes"].tolist()[::2] == [1, 0]
    assert numbers["money"].tolist()[::2] == [1.5, 2]
    assert numbers["text"].tolist()[0] == 1.5
    assert all(np.isnan(column[1]) for column in numbers.values())
    assert np.isnan(numbers["text"][2])
    texts = next(columnar.open_columnar(tmp_path / "t.parquet").tables([], [*names, "day"])).texts
    for name, expected in {
        "small": ("1", "", "3"), "yes": ("True", "", "False"), "half": ("0.1", "", "2"),
        "money": ("1.50", "", "2"), "text": ("1.5", "", "x"), "nothing": ("", "", ""),
        "day": ("2020-01-02", "", ""), "y": ("a", "b", "a"),
    }.items():  # fmt: skip
        column = texts[name]
        assert tuple(column.values[code] for code in column.codes) == expected, name


# ── on disk ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_packed_table_is_private_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    path = write_parquet(tmp_path / "t.parquet")
    packings: list[Path] = []
    pack = packed_table._pack

    def counted(file: Any, *given: Any) -> None:
        packings.append(file.path)
        pack(file, *given)

    monkeypatch.setattr(packed_table, "_pack", counted)
    first = whole(opened(path).encode().features)
    (kept,) = (tmp_path / "cache" / "tables").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert torch.equal(whole(opened(path).encode().features), first)
    assert len(packings) == 1
    assert torch.equal(whole(opened(path, anew=True).encode().features), first)
    assert len(packings) == 2
    kept.write_bytes(kept.read_bytes()[:-1])  # a damaged one is made again
    assert torch.equal(whole(opened(path).encode().features), first)
    assert len(packings) == 3
    changed = columns()
    changed["age"][7] = 3.5
    parquet.write_table(pa.table(changed), path)
    assert not torch.equal(whole(opened(path).encode().features), first)
    assert len(packings) == 4


def test_without_a_cache_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    monkeypatch.setenv("DPIS_CACHE", "off")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = write_parquet(tmp_path / "t.parquet")
    features = opened(path).encode().features
    assert isinstance(features, StoredRows)
    (passing,) = tmp_path.glob("dpis-*")
    assert len(whole(features)) == ROWS
    del features
    assert not passing.exists()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


def parquet_of(folder: Path, **replaced: Any) -> Path:
    table = arrow_table()
    for name, column in replaced.items():
        place = table.schema.get_field_index(name)
        table = (
            table.set_column(place, name, column)
            if place >= 0
            else table.append_column(name, column)
        )
    parquet.write_table(table, folder / "odd.parquet")
    return folder / "odd.parquet"


def test_files_that_are_damaged_or_something_else(tmp_path: Path) -> None:
    for kind in ("parquet", "feather", "stream"):
        path = write(kind, tmp_path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert "is damaged or not what its name says" in error(path), kind
        path.write_bytes(b"")
        assert "is damaged or not what its name says" in error(path), kind
        path.write_bytes(b"age,ok\n1,yes\n")
        assert "is damaged or not what its name says" in error(path), kind
        path.unlink()
        assert "there is no file" in error(path), kind


def test_columns_that_do_not_fit(tmp_path: Path) -> None:
    nested = pa.array([[1.0]] * ROWS)
    assert "column 'age' has the type list<" in error(parquet_of(tmp_path, age=nested))
    assert "cannot be read as a number" in error(parquet_of(tmp_path, age=nested))
    struct = pa.array([{"a": 1}] * ROWS)
    assert "cannot be read as a category: write it as one, or" in error(
        parquet_of(tmp_path, city=struct)
    )
    day = pa.array([datetime.date(2020, 1, 1)] * ROWS)
    assert "column 'age' has the type date32" in error(parquet_of(tmp_path, age=day))
    opened(parquet_of(tmp_path, seen=nested), schema(drop=["who", "seen"]))  # nobody asked
    assert "nothing is known about column 'seen'" in error(parquet_of(tmp_path, seen=nested))


def test_targets_and_users_that_cannot_be(tmp_path: Path) -> None:
    assert "has no column 'nothere' (--target)" in error(
        write_parquet(tmp_path / "t.parquet"), schema(target="nothere")
    )
    gaps = pa.array([None, *columns()["ok"][1:]])
    assert "1 record has a target 'ok' that is none of the 2 classes" in error(
        parquet_of(tmp_path, ok=gaps)
    )
    assert "in row 1 of" in error(parquet_of(tmp_path, ok=gaps))
    by_user = Schema.from_flags(**DECLARED, user_column="who")
    floats = pa.array([float(who) for who in columns()["who"]])
    assert "rounds long ids" in error(parquet_of(tmp_path, who=floats), by_user)
    nobody = pa.array([1, None, *columns()["who"][2:]])
    assert "1 of 240 rows have no user in 'who', the first is row 2 of" in error(
        parquet_of(tmp_path, who=nobody), by_user
    )


def test_tables_without_rows_or_with_odd_names(tmp_path: Path) -> None:
    parquet.write_table(arrow_table().slice(0, 0), tmp_path / "t.parquet")
    assert "has columns but no records" in error(tmp_path / "t.parquet")
    table = arrow_table()
    feather.write_feather(
        table.rename_columns(["age", "age ", *table.column_names[2:]]), tmp_path / "t.feather"
    )
    assert "is there twice: 'age'" in error(tmp_path / "t.feather")
    with pytest.raises(InputError, match="a delimiter stands between the cells of text"):
        open_records(tmp_path / "t.feather", schema=schema(), delimiter=";")


def test_folders_that_are_not_what_they_seem(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is a folder without .npy files" in error(tmp_path / "empty")
    hf = write("hugging face", tmp_path)
    (hf / "data-00001-of-00002.arrow").unlink()
    assert "cannot read" in error(hf)
    for state, said in (
        ("{}", "does not name its files"),
        ("[1]", "does not name its files"),
        ("not json", "does not name its files"),
        (json.dumps({"_data_files": []}), "flatten_indices()"),
        (json.dumps({"_data_files": [{"filename": "../t.arrow"}]}), "flatten_indices()"),
        (
            json.dumps(
                {"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "i"}]}
            ),
            "flatten_indices()",
        ),
    ):
        (hf / "state.json").write_text(state)
        assert said in error(hf)
    (hf / "dataset_dict.json").write_text("{}")
    (hf / "train").mkdir()
    assert "name one of them, as hf/train" in error(hf)
    (tmp_path / "t.parquet").mkdir()
    assert "is a folder without .npy files" in error(tmp_path / "t.parquet")
    assert "cannot hold the character NUL" in error(tmp_path / "a\0.parquet")


def test_without_pyarrow_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "t.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "pip install 'dpis[data]'" in error(path)


def test_a_file_that_changes_while_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    path = write_parquet(tmp_path / "t.parquet")
    pack = packed_table._pack

    def changes(file: Any, *given: Any) -> None:
        pack(file, *given)
        with open(path, "ab") as out:
            out.write(b"\0")

    monkeypatch.setattr(packed_table, "_pack", changes)
    assert "was changed while it was read" in error(path)
    assert list((tmp_path / "cache" / "tables").iterdir()) == []
