"""Rows: one line of ``results/*.jsonl`` for every cell that was run, and beside them the ledger of each."""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dpis.errors import InputError
from dpis.runs.folder import FolderLock
from reproduction.rows import Row, row_from_line
from reproduction.table_cells import TableCell, key_of

TUNING = "tuning"
"""The file of rows that were measured on a validation split."""


class Results:
    """The rows in a folder; each table has its file, and a row is written once.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows = load_rows(folder, with_tuning=True) if folder.exists() else []

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def prepare(self) -> None:
        """Make the folder, and try that rows can be written there: before hours are spent on one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise InputError(
                f"cannot write rows to {self.folder}: {error.strerror}. Choose another folder by --results"
            ) from None

    def find(self, cell: TableCell) -> Row | None:
        """The cell's row; or that of the same run in another table, made out for this one and written."""
        same_run = [row for row in self._rows if key_of(row["options"]) == cell.key]
        for row in same_run:
            if (row["table"], row["recipe"]) == (cell.table, cell.recipe):
                return row
        if not same_run:
            return None
        shared = {**same_run[0], "table": cell.table, "recipe": cell.recipe}
        self.add(shared)
        return shared

    def add(self, row: Row, ledger: bytes | None = None) -> None:
        """Append a row, after its ledger is in place; not one that another runner has written meanwhile."""
        self.prepare()
        with FolderLock(self.folder, wait=True):
            self._rows = load_rows(self.folder, with_tuning=True)
            if not any(_identity(row) == _identity(other) for other in self._rows):
                self._append(row, ledger)

    def _append(self, row: Row, ledger: bytes | None) -> None:
        if ledger is not None:
            path = ledger_path(self.folder, row)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(lzma.compress(ledger))
        name = TUNING if "eval_share" in row["options"] else row["table"]
        with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows.append(row)


def _identity(row: Row) -> tuple[str, str, str]:
    return row["table"], row["recipe"], key_of(row["options"])


def ledger_path(folder: Path, row: Row) -> Path:
    """Where the ledger of a row is kept."""
    return folder / "ledgers" / f"{row['ledger_sha256'][:16]}.jsonl.xz"


def load_rows(folder: Path, *, with_tuning: bool = False) -> list[Row]:
    """All rows of a folder: of the tables, and if asked for of the search for settings."""
    if not folder.is_dir():
        raise InputError(f"no rows in {folder}: there is no such folder")
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        if path.stem == TUNING and not with_tuning:
            continue
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            rows.append(row_from_line(line, f"{path}, line {number}"))
    return rows


def some_rows(folder: Path, *, with_tuning: bool = False) -> list[Row]:
    """The same, where there is nothing to say without rows."""
    rows = load_rows(folder, with_tuning=with_tuning)
    if not rows:
        raise InputError(
            f"no rows in {folder}: run cells first (`python -m reproduction table3`), or name another folder"
        )
    return rows
