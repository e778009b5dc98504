"""The CSV reader: what it accepts, what it refuses, and that it agrees with a slow reading by hand."""

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.files import csv_table
from dpis.files.csv_table import CsvHeader, read_header, read_table
from dpis.files.schema import canonical


def written(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def header_error(path: Path, **options: str) -> str:
    with pytest.raises(InputError) as caught:
        read_header(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def table_error(path: Path) -> str:
    header = read_header(path)
    with pytest.raises(InputError) as caught:
        read_table(path, header, numbers=header.names[:1], texts=header.names[1:])
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "names", "delimiter"),
    [
        ("a,b\n1,2\n", ("a", "b"), ","),
        ("a;b;c\n1;2;3\n", ("a", "b", "c"), ";"),
        ("a\tb\n1\t2\n", ("a", "b"), "\t"),
        ('"a;1";"b,2";"c"\n1;2;3\n', ("a;1", "b,2", "c"), ";"),
        ("\ufeffa, b \r\n1,2\r\n", ("a", "b"), ","),
        ("\n\na,b\n1,2\n", ("a", "b"), ","),
        ("only\n1\n", ("only",), ","),
    ],
)
def test_the_header_tells_names_and_delimiter(
    tmp_path: Path, text: str, names: tuple[str, ...], delimiter: str
) -> None:
    assert read_header(written(tmp_path, text)) == CsvHeader(names, delimiter)


def test_a_delimiter_given_is_used(tmp_path: Path) -> None:
    path = written(tmp_path, "a|b,c\n1|2\n")
    assert read_header(path, "|").names == ("a", "b,c")
    assert "one character" in header_error(path, delimiter="||")
    assert "one character" in header_error(path, delimiter="\n")


def test_headers_that_are_refused(tmp_path: Path) -> None:
    assert "is empty" in header_error(written(tmp_path, ""))
    assert "is empty" in header_error(written(tmp_path, "\n\n"))
    assert "'a' is there twice" in header_error(written(tmp_path, "a,b,a\n1,2,3\n"))
    assert "column 1 has no name" in header_error(written(tmp_path, ",a\n0,1\n"))
    assert "index=False" in header_error(written(tmp_path, ",a\n0,1\n"))
    assert "found numbers: 1.5, 2" in header_error(written(tmp_path, "1.5,2\n3,4\n"))
    assert "UTF-8" in header_error(written(tmp_path, "größe,b\n1,2\n".encode("latin-1")))
    assert "cannot read" in header_error(tmp_path / "nowhere.csv")
    assert "cannot read" in header_error(tmp_path)
    assert "not valid CSV" in header_error(written(tmp_path, '"a,b\n1,2\n'), delimiter=",")


def test_rows_that_are_refused_are_named(tmp_path: Path) -> None:
    ragged = table_error(written(tmp_path, "a,b\n1,x\n\n2,y,z\n"))
    assert "line 4: 3 cells where the header has 2" in ragged
    short = table_error(written(tmp_path, 'a,b\n1,"x\ny"\n2\n'))
    assert "line 4: 1 cells" in short
    assert "no records" in table_error(written(tmp_path, "a,b\n\n"))
    assert "line 3" in table_error(written(tmp_path, 'a,b\n1,x\n2,"y\n'))
    assert "UTF-8" in table_error(written(tmp_path, b"a,b\n" + b"1,2\n" * 9000 + b"1,\xff\n"))
    assert "line 2" in table_error(written(tmp_path, "a,b\n1," + "x" * 200_000 + "\n"))


def test_lines_are_those_on_which_records_begin(tmp_path: Path) -> None:
    path = written(tmp_path, 'a,b\n1,"x\ny"\n\n2,z\n')
    table = read_table(path, read_header(path), numbers=["a"], texts=["b"])
    assert table.lines.tolist() == [2, 5]
    assert table.texts["b"].values == ("x\ny", "z")


def test_what_is_not_a_number_is_missing(tmp_path: Path) -> None:
    cells = ["1", " 2.5 ", "", "NA", "abc", "1e3", "-inf", "nan", "1.2.3", "12%"]
    path = written(tmp_path, "a,b\n" + "".join(f"{cell},x\n" for cell in cells))
    found = read_table(path, read_header(path), numbers=["a"], texts=[]).numbers["a"]
    n = math.nan
    np.testing.assert_array_equal(found, [1, 2.5, n, n, n, 1000, -math.inf, n, n, n])


CELLS = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.integers().map(str),
    st.sampled_from(["", " ", "red", "1.0", "1", "a,b", 'say "hi"', "x\ny", "é", "NA"]),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), data=st.data())
def test_agrees_with_reading_cell_by_cell(
    rows: list[tuple[str, str]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chunks of any length, quoted cells: the same as one cell after another."""
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = written(tmp_path_factory.mktemp("csv"), text.getvalue())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_table, "_ROWS_AT_ONCE", data.draw(st.integers(1, 5)))
        table = read_table(path, read_header(path), numbers=["a"], texts=["b"])

    def slow(cell: str) -> float:
        try:
            return float(cell)
        except ValueError:
            return math.nan

    np.testing.assert_array_equal(table.numbers["a"], [slow(a) for a, _ in rows])
    column = table.texts["b"]
    assert [column.values[code] for code in column.codes] == [canonical(b) for _, b in rows]
    assert len(set(column.values)) == len(column.values)
    assert column.codes[0] == 0
