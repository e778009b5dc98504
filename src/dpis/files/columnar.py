"""Reading Parquet, Arrow and Feather files and folders of Hugging Face datasets: batches of columns, a few at a time.

Cells mean what they would mean in a CSV file of the same table: a model comes out the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.schema import listed, shown
from dpis.files.table import Table, TextCoder, TextColumn, parsed_numbers

if TYPE_CHECKING:
    import pyarrow

PARQUET_SUFFIXES = (".parquet", ".pq")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")
COLUMNAR_SUFFIXES = PARQUET_SUFFIXES + ARROW_SUFFIXES

HUGGING_FACE_STATE = "state.json"
HUGGING_FACE_PARTS = "dataset_dict.json"
"""What `datasets` writes into a folder beside the rows: of one dataset, of several parts."""

ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class ColumnarFile:
    """A table whose columns have types.

    Attributes:
        path: as the user named it.
        files: what holds the rows.
        names: of the columns.
        types: theirs.
        open_batches: reads some columns, in the order of the rows.
        count: of the rows.
    """

    path: Path
    files: tuple[Path, ...]
    names: tuple[str, ...]
    types: tuple[pyarrow.DataType, ...]
    open_batches: Callable[[Sequence[str]], Iterator[pyarrow.RecordBatch]]
    count: Callable[[], int]

    def rows(self) -> int:
        """How many there are."""
        with _readable(self.path):
            return self.count()

    def refuse_unfit(self, numbers: Collection[str], texts: Collection[str]) -> None:
        """What cannot be read as declared, before a row is read."""
        for name, kind in zip(self.names, self.types, strict=True):
            way = "a number" if name in numbers else "a category" if name in texts else ""
            if way and not _fits(kind, of_numbers=name in numbers):
                raise InputError(
                    f"{self.path}: column {name!r} has the type {_plain(kind)}, which cannot be read as {way}: write "
                    f"it as one, or leave it out (--drop {name})"
                )

    def refuse_inexact_users(self, name: str) -> None:
        """Ids that were stored as broken numbers: two people may have been rounded to one."""
        types = _pyarrow().types
        if types.is_floating(kind := self.types[self.names.index(name)]):
            raise InputError(
                f"{self.path}: users in {name!r} are of the type {_plain(kind)}, which rounds long ids: several people "
                "may have the same. Write the ids as text or whole numbers"
            )

    def tables(self, numbers: Collection[str], texts: Collection[str]) -> Iterator[Table]:
        """The columns, some rows at a time; codes of text are the same in all of them."""
        coders = {name: TextCoder() for name in texts}
        for batch in self._batches([*numbers, *texts]):
            codes = {name: _codes(batch.column(name), coder) for name, coder in coders.items()}
            yield Table(
                source=str(self.path),
                numbers={name: _numbers(batch.column(name)) for name in numbers},
                texts={
                    name: TextColumn(tuple(coders[name].values_seen), codes[name]) for name in texts
                },
                rows=batch.num_rows,
            )

    def _batches(self, names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        names = list(dict.fromkeys(names))
        with _readable(self.path):
            for batch in self.open_batches(names):
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    yield batch.select(names).slice(start, ROWS_AT_ONCE)
        _pyarrow().default_memory_pool().release_unused()


def is_columnar(path: Path) -> bool:
    """Whether a path is that of such a file, or of a folder that `datasets` wrote."""
    if path.is_dir():
        return any((path / name).is_file() for name in (HUGGING_FACE_STATE, HUGGING_FACE_PARTS))
    return path.suffix.lower() in COLUMNAR_SUFFIXES


def open_columnar(path: Path) -> ColumnarFile:
    """The columns of a file or folder; no row is read.

    Raises:
        InputError: it cannot be read, has no rows, or names that are empty or repeated.
    """
    _pyarrow(path)
    with _readable(path):
        if path.is_dir():
            opened = _open_arrow(path, _hugging_face_files(path))
        elif path.suffix.lower() in PARQUET_SUFFIXES:
            opened = _open_parquet(path)
        else:
            opened = _open_arrow(path, (path,))
    for place, name in enumerate(opened.names):
        if not name or name in opened.names[:place]:
            what = "has no name" if not name else f"is there twice: {shown(name)}"
            raise InputError(f"{path}: the name of column {place + 1} {what}; rename it")
    if not opened.names:
        raise InputError(f"{path} has no columns")
    return opened


# ── kinds of files ───────────────────────────────────────────────────────────────────────────────────


def _open_parquet(path: Path) -> ColumnarFile:
    from pyarrow import parquet

    file = parquet.ParquetFile(path, buffer_size=1 << 20)
    schema = file.schema_arrow

    def batches(names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        for group in range(file.num_row_groups):  # asked for all, it keeps all
            yield from file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=list(names))

    rows = file.metadata.num_rows
    return ColumnarFile(path, (path,), *_columns(schema), batches, lambda: rows)


def _open_arrow(path: Path, files: tuple[Path, ...]) -> ColumnarFile:
    schema = _arrow_reader(files[0]).schema
    for other in files[1:]:
        if not _arrow_reader(other).schema.equals(schema):
            raise InputError(f"{path}: {other.name} has other columns than {files[0].name}")

    def batches(names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        for file in files:
            yield from _arrow_batches(file)

    def count() -> int:
        return sum(batch.num_rows for batch in batches(()))

    return ColumnarFile(path, files, *_columns(schema), batches, count)


def _arrow_reader(path: Path) -> Any:
    """Of a file or of a stream; feather's second version is a file."""
    import pyarrow as pa

    mapped = pa.memory_map(str(path))
    start = bytes(mapped.read(6))
    mapped.seek(0)
    if start.startswith(b"FEA1"):
        raise InputError(f"{path} is of Feather's first version: save it again as the second")
    return pa.ipc.open_file(mapped) if start == b"ARROW1" else pa.ipc.open_stream(mapped)


def _arrow_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    reader = _arrow_reader(path)
    if not hasattr(reader, "num_record_batches"):
        yield from reader
        return
    for place in range(reader.num_record_batches):
        yield reader.get_batch(place)


def _hugging_face_files(folder: Path) -> tuple[Path, ...]:
    if (folder / HUGGING_FACE_PARTS).is_file():
        parts = sorted(part.name for part in folder.iterdir() if part.is_dir())
        example = f"{folder.name}/{(parts or ['train'])[0]}"
        raise InputError(
            f"{folder} holds several parts ({listed(parts)}): name one of them, as {example}"
        )
    try:
        state = json.loads((folder / HUGGING_FACE_STATE).read_text(encoding="utf-8"))
        names = [part["filename"] for part in state["_data_files"]]
        chosen = state.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{folder} is not what `datasets` saves: {HUGGING_FACE_STATE} does not name its files. Save it again with "
            "save_to_disk"
        ) from None
    if chosen or not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise InputError(
            f"{folder} is a choice of the rows of other files, or empty: save it again with flatten_indices()"
        )
    return tuple(folder / name for name in names)


def _columns(schema: pyarrow.Schema) -> tuple[tuple[str, ...], tuple[pyarrow.DataType, ...]]:
    return tuple(name.strip() for name in schema.names), tuple(schema.types)


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────


def _fits(kind: pyarrow.DataType, *, of_numbers: bool) -> bool:
    types = _pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    plain = (
        types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
        or _is_text(kind)
    )
    return plain or (not of_numbers and (types.is_temporal(kind) and not types.is_duration(kind)))


def _is_text(kind: pyarrow.DataType) -> bool:
    types = _pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _decoded(column: pyarrow.Array) -> pyarrow.Array:
    """Categories as their names: which are declared beside the rows is not what the rows hold."""
    return column.dictionary_decode() if _pyarrow().types.is_dictionary(column.type) else column


def _numbers(column: pyarrow.Array) -> NDArray[np.float64]:
    """As numbers; what is missing or none is NaN."""
    import pyarrow as pa

    column = _decoded(column)
    if _is_text(column.type):
        return parsed_numbers([cell or "" for cell in column.to_pylist()])
    if not pa.types.is_floating(column.type):
        column = column.cast(pa.float64(), safe=False)
    values: NDArray[np.generic] = column.to_numpy(zero_copy_only=False)
    return values.astype(np.float64)


def _codes(column: pyarrow.Array, coder: TextCoder) -> NDArray[np.int64]:
    """As codes of names, numbered as they first appear; what is missing is the empty name."""
    import pyarrow as pa

    column = _decoded(column)
    narrow = pa.types.is_floating(column.type) and column.type.bit_width < 64
    if pa.types.is_null(column.type):
        return np.full(len(column), coder[""] if len(column) else 0, dtype=np.int64)
    encoded = column.dictionary_encode(null_encoding="encode")
    cells = encoded.dictionary.to_pylist()
    if narrow:  # .1 and not .10000000149
        cells = [None if cell is None else str(np.float32(cell)) for cell in cells]
    names = ["" if cell is None else str(cell) for cell in cells]
    by_place = np.array([coder[name] for name in names], dtype=np.int64)
    codes: NDArray[np.int64] = by_place[encoded.indices.to_numpy(zero_copy_only=False)]
    return codes


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────


class _readable:  # noqa: N801 (a context manager)
    """What goes wrong in reading, as one line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa

        if error is None or isinstance(error, InputError):
            return
        line = shown(" ".join(str(error).split()), 120).strip("'\"")
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"cannot read {self._path}: {error.strerror}") from None
        if isinstance(error, pa.ArrowException | ValueError | OSError):
            raise InputError(
                f"{self._path} is damaged or not what its name says ({line}): write it again"
            ) from None


def _plain(kind: pyarrow.DataType) -> str:
    return shown(str(kind), 60).strip("'\"")


def _pyarrow(path: Path | None = None) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f"{path or 'this file'}: reading Parquet, Arrow and Hugging Face datasets needs pyarrow: "
            "pip install 'dpis[data]'"
        ) from None
    return pyarrow
