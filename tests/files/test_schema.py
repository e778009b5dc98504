"""What users may declare, in flags and in files, and how a wrong word is answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpis.errors import InputError
from dpis.files.schema import FROM_DATA, Schema, listed, shown


def test_flags() -> None:
    schema = Schema.from_flags(
        target="y",
        bounds=["age=0:120", "temp=-40:5e1", "a=b=-1:1"],
        categories=['city="Paris, TX",London', "code=1,2.0", f"zip={FROM_DATA}"],
        classes="no, yes",
        drop=["id"],
        user_column="who",
    )
    assert schema.bounds == {"age": (0, 120), "temp": (-40, 50), "a=b": (-1, 1)}
    assert schema.categories == {
        "city": ("Paris, TX", "London"),
        "code": ("1", "2"),
        "zip": FROM_DATA,
    }
    assert schema.classes == ("no", "yes")
    assert (schema.target, schema.drop, schema.user_column) == ("y", ("id",), "who")
    assert Schema.from_flags(classes="10").classes == tuple("0123456789")
    assert Schema.from_flags(classes=" from-data ").classes == FROM_DATA


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"bounds": ["age"]}, "must look like age=0:120, found 'age'"),
        ({"bounds": ["age=0-120"]}, "must look like age=0:120"),
        ({"bounds": ["=0:1"]}, "must look like"),
        ({"bounds": ["age=nan:1"]}, "must look like"),
        ({"bounds": ["age=120:0"]}, "the lower one first, found (120.0, 0.0)"),
        ({"bounds": ["age=1:1"]}, "the lower one first"),
        ({"bounds": ["age=0:inf"]}, "finite"),
        ({"bounds": ["age=0:5e-324"]}, "finite"),
        ({"bounds": ["age=0:1", "age=0:2"]}, "speaks twice of 'age'"),
        ({"categories": ["colour"]}, "must look like colour=red,green,blue"),
        ({"categories": ["colour="]}, "must look like"),
        ({"categories": ["colour=red,red "]}, "'red' is there twice"),
        ({"categories": ["colour=1,1.0"]}, "'1' is there twice"),
        ({"categories": ["colour=red,,blue"]}, "an empty name stands for a missing value"),
        ({"bounds": ["a=0:1"], "categories": ["a=x"]}, "has bounds and categories"),
        ({"classes": "1"}, "from 2 to"),
        ({"classes": "only"}, "from 2 to"),
        ({"classes": "999999999"}, "from 2 to"),
        ({"target": ""}, "name of a column must be text"),
    ],
)
def test_flags_that_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Schema.from_flags(**flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


CONTENT = {
    "target": "income",
    "classes": ["<=50K", ">50K"],
    "drop": ["id"],
    "user_column": "who",
    "bounds": {"age": [0, 120]},
    "categories": {"colour": ["red", "green"], "code": [1, 2], "city": FROM_DATA},
}
TOML = """
target = "income"
classes = ["<=50K", ">50K"]
drop = ["id"]
user_column = "who"
[bounds]
age = [0, 120]
[categories]
colour = ["red", "green"]
code = [1, 2]
city = "from-data"
"""


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(CONTENT))
    (tmp_path / "s.toml").write_text(TOML)
    schema = Schema.from_file(tmp_path / "s.json")
    assert schema == Schema.from_file(tmp_path / "s.toml")
    assert schema.categories["code"] == ("1", "2")
    assert schema.bounds == {"age": (0.0, 120.0)}


def test_a_number_of_classes(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"classes": 3}')
    assert Schema.from_file(tmp_path / "s.json").classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "a schema is a JSON object"),
        ('{"bound": {}}', "a schema has the keys target, bounds"),
        ('{"bounds": []}', "bounds must map columns to values"),
        ('{"bounds": {"a": 3}}', "must be [low, high], found 3"),
        ('{"bounds": {"a": ["0", 1]}}', "two finite numbers"),
        ('{"bounds": {"a": [true, 2]}}', "two finite numbers"),
        ('{"categories": {"a": "red"}}', "must be a list of names or 'from-data'"),
        ('{"categories": {"a": [null]}}', "must be text or numbers"),
        ('{"classes": true}', "must be a list of names"),
        ('{"classes": 1}', "from 2 to"),
        ('{"drop": "id"}', "drop must be a list"),
        ('{"drop": [3]}', "name of a column must be text"),
        ('{"target": 3}', "name of a column must be text"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        Schema.from_file(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the schema"):
        Schema.from_file(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"a \.json or a \.toml file"):
        Schema.from_file(tmp_path / "s.yaml")
    (tmp_path / "s.toml").write_text("a = \n")
    with pytest.raises(InputError, match="is not valid TOML"):
        Schema.from_file(tmp_path / "s.toml")


def test_flags_win_over_a_file() -> None:
    file = Schema.from_flags(target="y", bounds=["a=0:1", "b=0:1"], classes="3", drop=["x"])
    flags = Schema.from_flags(bounds=["a=0:9"], categories=["b=u,v"], drop=["x", "z"])
    both = file.updated(flags)
    assert both.bounds == {"a": (0, 9)}
    assert both.categories == {"b": ("u", "v")}
    assert (both.target, both.drop, both.classes) == ("y", ("x", "z"), ("0", "1", "2"))
    assert file.updated(Schema(target="t")).target == "t"


def test_messages_stay_on_one_short_line() -> None:
    assert len(shown("x" * 1000)) == 40
    assert listed(f"c{i}" for i in range(30)).endswith("c19 and 10 more")
    assert "\n" not in listed(["a\nb"])
    assert listed([]) == "none"
