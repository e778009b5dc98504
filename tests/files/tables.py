"""One table in every format that is read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import feather, parquet

ROWS = 240
DECLARED = {
    "target": "ok",
    "classes": "no,yes",
    "bounds": ["age=0:100"],
    "categories": ["city=Paris,Lyon,Nice", "level=1,2,3"],
}


def columns() -> dict[str, list[Any]]:
    """Numbers with gaps, text with gaps, whole numbers as categories, several rows a person."""
    rng = np.random.default_rng(1)
    age, city = rng.uniform(0, 110, ROWS), rng.choice(["Paris", " Lyon", "Nice", "Rome"], ROWS)
    ok = np.where(age + 20 * (city == "Paris") > 60, "yes", "no")
    return {
        "age": [None if i % 17 == 3 else float(a) for i, a in enumerate(age)],
        "city": [None if i % 13 == 5 else str(c) for i, c in enumerate(city)],
        "level": rng.integers(1, 4, ROWS).tolist(),
        "who": rng.integers(0, 90, ROWS).tolist(),
        "ok": ok.tolist(),
    }


def arrow_table() -> pa.Table:
    return pa.table(columns())


def write_csv(path: Path) -> Path:
    named = columns()
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(named)
        writer.writerows(
            ["" if cell is None else cell for cell in row]
            for row in zip(*named.values(), strict=True)
        )
    return path


def write_parquet(path: Path) -> Path:
    parquet.write_table(arrow_table(), path, row_group_size=50)
    return path


def write_categories(path: Path) -> Path:
    """Text as dictionaries, with a name that no row has."""
    table = arrow_table()
    for name in ("city", "ok"):
        place = table.schema.get_field_index(name)
        coded = table.column(name).combine_chunks().dictionary_encode()
        names = pa.concat_arrays([coded.dictionary, pa.array(["nowhere"])])
        table = table.set_column(place, name, pa.DictionaryArray.from_arrays(coded.indices, names))
    parquet.write_table(table, path)
    return path


def write_feather(path: Path) -> Path:
    feather.write_feather(arrow_table(), path, compression="lz4")
    return path


def write_stream(path: Path) -> Path:
    table = arrow_table()
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, 50)
    return path


def write_hugging_face(path: Path) -> Path:
    """As `datasets` does, in two files."""
    path.mkdir()
    table = arrow_table()
    names = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for name, start in zip(names, (0, 100), strict=True):
        part = table.slice(start, 100 if start == 0 else None)
        with (
            pa.OSFile(str(path / name), "wb") as out,
            pa.ipc.new_stream(out, part.schema) as writer,
        ):
            writer.write_table(part, 30)
    files = [{"filename": name} for name in names]
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    return path


FORMATS: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    "csv": ("t.csv", write_csv),
    "parquet": ("t.parquet", write_parquet),
    "dictionaries": ("t2.parquet", write_categories),
    "feather": ("t.feather", write_feather),
    "stream": ("t.arrow", write_stream),
    "hugging face": ("hf", write_hugging_face),
}


def write(kind: str, folder: Path) -> Path:
    """The table in one of `FORMATS`."""
    name, writer = FORMATS[kind]
    return writer(folder / name)
