"""From a user's file to tensors: one door for tables and arrays.

`open_records` reads a file and holds it against what was declared. What it returns knows which bounds must still be
released; the caller draws the noise, records the event, and `encode` makes tensors with the result. The preprocessing
that did it is a value in the result: `encode_evaluation` and `encode_features` use it on other files.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dpis.errors import InputError
from dpis.files.array_records import RawArrays, open_arrays, read_arrays_again
from dpis.files.columnar import COLUMNAR_SUFFIXES, is_columnar
from dpis.files.preprocessing import Features, FilePreprocessing, TablePreprocessing
from dpis.files.schema import Schema
from dpis.files.table_records import RawTable, open_table, read_table_again

TABLE_SUFFIXES = (".csv", ".tsv", ".txt", *COLUMNAR_SUFFIXES)
ARRAY_SUFFIXES = (".npy", ".npz", ".pt", ".pth")

RawRecords = RawTable | RawArrays


def open_records(
    path: str | Path,
    *,
    schema: Schema | None = None,
    release_scale: bool = False,
    delimiter: str | None = None,
    anew: bool = False,
) -> RawRecords:
    """Read a file and hold it against what was declared.

    Args:
        path: a table (``.csv``, Parquet, Arrow, a folder of a Hugging Face dataset) or arrays (``.npz``, ``.pt``, a
            folder of ``.npy``). What does not fit in memory is read by index.
        schema: what is declared about the columns and the target.
        release_scale: undeclared columns are numeric, their bounds to be released.
        delimiter: of a table; otherwise the header tells.
        anew: do not use what is kept of the file in a cache.

    Raises:
        InputError: a file that cannot be read, a column that nothing was said about, labels without a class.
    """
    path, schema = Path(path), schema or Schema()
    if _is_table(path):
        return open_table(path, schema, release_scale, delimiter, anew=anew)
    return open_arrays(path, schema, release_scale, delimiter)


def encode_evaluation(
    path: str | Path, preprocessing: FilePreprocessing, *, delimiter: str | None = None
) -> tuple[Features, torch.Tensor]:
    """Features and targets of another file, prepared exactly as those a model was trained on."""
    path = _like_those_trained_on(path, preprocessing)
    if isinstance(preprocessing, TablePreprocessing):
        return preprocessing.encode(
            read_table_again(path, preprocessing, delimiter, with_target=True)
        )
    return preprocessing.encode(read_arrays_again(path, preprocessing, with_target=True))


def encode_features(
    path: str | Path, preprocessing: FilePreprocessing, *, delimiter: str | None = None
) -> Features:
    """Features of another file, to predict from; targets and further columns are ignored, if there are any."""
    path = _like_those_trained_on(path, preprocessing)
    if isinstance(preprocessing, TablePreprocessing):
        table = read_table_again(path, preprocessing, delimiter, with_target=False)
        return preprocessing.encode_features(table)
    return preprocessing.encode_features(read_arrays_again(path, preprocessing, with_target=False))


def _like_those_trained_on(path: str | Path, preprocessing: FilePreprocessing) -> Path:
    """The path, if its file is of the kind the model was trained on."""
    path = Path(path)
    of_tables = isinstance(preprocessing, TablePreprocessing)
    if of_tables and not _is_table(path):
        raise InputError(f"{path}: the model was trained on a table, so a table is needed (.csv)")
    if not of_tables and _is_table(path):
        raise InputError(
            f"{path}: the model was trained on arrays, so arrays are needed (.npz, .npy, .pt)"
        )
    return path


def _is_table(path: Path) -> bool:
    if "\0" in str(path):
        raise InputError(f"a path cannot hold the character NUL, found {str(path)!r}")
    if path.is_dir():
        return is_columnar(path)
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES + ARRAY_SUFFIXES:
        raise InputError(
            f"{path}: a file of records is one of {' '.join(TABLE_SUFFIXES + ARRAY_SUFFIXES)}, found {suffix!r}; a "
            "folder holds .npy files or a Hugging Face dataset"
        )
    if not path.exists():
        raise InputError(f"there is no file {path}: check the name")
    return suffix in TABLE_SUFFIXES
