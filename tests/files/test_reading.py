"""The whole way from a file to tensors: declared, released, confirmed; and every way to be told what is missing."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpis.errors import InputError
from dpis.files.preprocessing import (
    EncodedRecords,
    NumericColumn,
    TablePreprocessing,
    preprocessing_from_json,
)
from dpis.files.reading import encode_evaluation, encode_features, open_records
from dpis.files.scaling import CELLS, bounds_from_counts, bucket_counts, one_over_rows, sensitivity
from dpis.files.schema import Schema
from dpis.files.table_records import RawTable
from dpis.files.targets import MOST_FROM_DATA, ClassTarget, Origin

PEOPLE = """id,age,colour,who,income
1,20,red,ann,low
2,60,green,bob,high
3,,blue,ann,low
4,200,?,cy,high
"""


def csv(folder: Path, text: str = PEOPLE, name: str = "people.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def flags(**changes: Any) -> Schema:
    given = {
        "target": "income",
        "bounds": ["age=0:100"],
        "categories": ["colour=red,green"],
        "classes": "low,high",
        "drop": ["id"],
        "user_column": "who",
    }
    return Schema.from_flags(**{**given, **changes})


def error(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        open_records(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_declared_table(tmp_path: Path) -> None:
    raw = open_records(csv(tmp_path), schema=flags())
    assert raw.columns_to_release == ()
    assert (len(raw), raw.target.task) == (4, "classification")
    found = raw.encode()
    torch.testing.assert_close(
        found.features,
        torch.tensor(
            [[-0.6, 0, 1, 0, 0], [0.2, 0, 0, 1, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0, 1]],
        ),
    )
    assert found.targets.tolist() == [0, 1, 0, 1]
    assert found.user_ids is not None
    assert found.user_ids.tolist() == [0, 1, 0, 2]
    assert found.preprocessing.target.task == "classification"
    assert classes_of(found) == ("low", "high")
    assert found.preprocessing.public_by_confirmation == ()


def classes_of(made: EncodedRecords) -> tuple[str, ...]:
    assert isinstance(made.preprocessing.target, ClassTarget)
    return made.preprocessing.target.classes


def test_what_was_confirmed_is_said(tmp_path: Path) -> None:
    schema = flags(categories=["colour=from-data"], classes="from-data", user_column=None)
    raw = open_records(csv(tmp_path), schema=schema.updated(Schema(drop=("who",))))
    found = raw.encode()
    assert found.preprocessing.public_by_confirmation == (
        "categories of colour",
        "classes of income",
    )
    assert classes_of(found) == ("high", "low")
    assert isinstance(found.preprocessing, TablePreprocessing)
    assert found.preprocessing.feature_names[2:] == (
        "colour=blue",
        "colour=green",
        "colour=red",
        "colour=missing/other",
    )
    assert found.user_ids is None


def test_classes_may_stand_among_the_categories(tmp_path: Path) -> None:
    schema = flags(classes=None, categories=["colour=red", "income=low,high"])
    assert classes_of(open_records(csv(tmp_path), schema=schema).encode()) == ("low", "high")
    both = flags(categories=["colour=red", "income=high,low"])
    assert "classes and categories of the target" in error(csv(tmp_path), schema=both)


def test_bounds_that_are_released(tmp_path: Path) -> None:
    raw = open_records(csv(tmp_path), schema=flags(bounds=[], drop=[]), release_scale=True)
    assert isinstance(raw, RawTable)
    assert raw.columns_to_release == ("id", "age")
    counts = raw.bucket_counts()
    assert counts.shape == (2, CELLS)
    columns = [raw.table.numbers["id"], raw.table.numbers["age"]]
    assert torch.equal(
        counts, bucket_counts(columns, one_over_rows(raw.user_ids))
    )  # a user is a record
    some = np.array([1, 3])
    assert torch.equal(raw.bucket_counts(some), bucket_counts([c[some] for c in columns]))
    with pytest.raises(InputError, match=r"bounds of 2 columns must be released first \(id, age\)"):
        raw.encode()
    bounds = bounds_from_counts(counts, 0.0)
    made = raw.encode(bounds).preprocessing
    assert isinstance(made, TablePreprocessing)
    assert made.columns[1] == NumericColumn("age", bounds[1], Origin.RELEASED)


def test_a_release_end_to_end(tmp_path: Path) -> None:
    """One accounted Gaussian event gives features spread over [-1, 1]."""
    rng = np.random.default_rng(1)
    ages, years = rng.uniform(20, 90, 20_000), rng.uniform(1950, 2020, 20_000)
    rows = "".join(f"{a:.1f},{y:.0f},{a > 50:d}\n" for a, y in zip(ages, years, strict=True))
    path = csv(tmp_path, "age,year,old\n" + rows)
    schema = Schema.from_flags(target="old", classes="2")
    raw = open_records(path, schema=schema, release_scale=True)
    std = 1.001 * 10 * sensitivity(len(raw.columns_to_release))
    noisy = raw.bucket_counts() + std * torch.from_numpy(rng.normal(size=(2, CELLS)))
    features = raw.encode(bounds_from_counts(noisy, std)).features
    assert features[:, 0].std() > 0.3
    assert features[:, 2].std() > 0.3
    assert (features[:, [1, 3]] == 0).all()


def test_a_regression(tmp_path: Path) -> None:
    path = csv(tmp_path, "size;price\n10;100\n20;300\n")
    schema = Schema.from_flags(target="price", bounds=["size=0:20", "price=0:200"])
    found = open_records(path, schema=schema).encode()
    assert found.preprocessing.target.task == "regression"
    assert found.targets.tolist() == [0.0, 1.0]
    assert found.targets.dtype == torch.float32
    assert found.preprocessing.decode_predictions(found.targets) == [100.0, 200.0]
    assert found.preprocessing.decode_predictions(torch.tensor([[0.5], [7.0]])) == [150.0, 200.0]


def test_a_column_that_nothing_is_known_about(tmp_path: Path) -> None:
    message = error(csv(tmp_path), schema=flags(bounds=[]))
    for way in (
        "column 'age'",
        "--bounds age=LOW:HIGH",
        "--categories age=A,B,C",
        "--release-scale",
        "--categories age=from-data",
        "--drop age",
    ):
        assert way in message


def test_a_target_that_nothing_is_known_about(tmp_path: Path) -> None:
    for release in (False, True):  # a release never decides what is learnt
        message = error(csv(tmp_path), schema=flags(classes=None), release_scale=release)
        for way in (
            "'income'",
            "--classes A,B,C",
            "10 for 0 to 9",
            "from-data",
            "--bounds income=",
        ):
            assert way in message
    both = flags(bounds=["age=0:9", "income=0:9"])
    assert "has classes and bounds" in error(csv(tmp_path), schema=both)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "Give --target one of id, age, colour, who, income"),
        ({"target": "wage"}, "no column 'wage' (--target); its columns are id, age, colour"),
        ({"drop": ["id", "x"]}, "no column 'x' (--drop)"),
        ({"bounds": ["Age=0:1"]}, "no column 'Age' (--bounds)"),
        ({"categories": ["c=a"]}, "no column 'c' (--categories)"),
        ({"user_column": "u"}, "no column 'u' (--user-column)"),
        ({"drop": ["income"]}, "'income' is needed, and --drop leaves it out"),
        ({"user_column": "income"}, "says who the user is"),
        ({"user_column": "age"}, "says who the user is"),
        ({"bounds": [], "categories": [], "drop": ["id", "age", "colour"]}, "no column is left"),
        ({"classes": "low,medium"}, "2 records have a target 'income' that is none of the 2"),
    ],
)
def test_declarations_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = csv(tmp_path)
    with pytest.raises(InputError) as caught:
        open_records(path, schema=flags(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_label_out_of_range_names_value_and_line(tmp_path: Path) -> None:
    path = csv(tmp_path, "a,y\n1,0\n2,12\n")
    schema = Schema.from_flags(target="y", bounds=["a=0:9"], classes="10")
    assert f"the first is '12' in line 3 of {path}" in error(path, schema=schema)


@pytest.mark.parametrize("nobody", ["NA", "None", "NaT"])
def test_rows_without_a_user(tmp_path: Path, nobody: str) -> None:
    path = csv(tmp_path, PEOPLE.replace("bob", "").replace("cy", nobody))
    assert "2 of 4 rows have no user in 'who', the first is line 3 of" in error(
        path, schema=flags()
    )


def test_users_that_a_spreadsheet_cut_short(tmp_path: Path) -> None:
    path = csv(tmp_path, PEOPLE.replace("bob", "1.23457E+12").replace("cy", "1.23457E+12"))
    assert "such as '1.23457E+12' were cut short" in error(path, schema=flags())


def test_sets_that_are_hardly_categories(tmp_path: Path) -> None:
    rows = "".join(f"id{i},{i % 2}\n" for i in range(MOST_FROM_DATA + 1))
    path = csv(tmp_path, "key,y\n" + rows)
    schema = Schema.from_flags(target="y", categories=["key=from-data"], classes="2")
    assert "column 'key' has 1,001 distinct values" in error(path, schema=schema)
    one = csv(tmp_path, "a,y\n1,yes\n2,yes\n")
    schema = Schema.from_flags(target="y", bounds=["a=0:9"], classes="from-data")
    assert "one class only" in error(one, schema=schema)


def test_notes_for_the_operator(tmp_path: Path) -> None:
    path = csv(tmp_path, "a,b,c,d,y\nx,9,u,1,0\ny,8,v,2,1\n3,0,w,3,0\n")
    schema = Schema.from_flags(
        target="y", bounds=["a=0:9", "b=0:1", "d=0:9"], categories=["c=k"], classes="2"
    )
    assert open_records(path, schema=schema).private_notes == (
        "column 'a': 2 of 3 values are empty or not a number",
        "column 'b': 2 of 3 values are outside its bounds",
        "column 'c': 3 of 3 values are missing or none of its categories",
    )


def test_files_that_are_not_records(tmp_path: Path) -> None:
    assert "there is no file" in error(tmp_path / "none.csv")
    assert "there is no file" in error(tmp_path / "none.npz")
    assert "found '.xlsx'" in error(tmp_path / "t.xlsx")


# The same preparation for other files


def trained(folder: Path) -> EncodedRecords:
    return open_records(csv(folder), schema=flags()).encode()


def test_other_files_are_prepared_alike(tmp_path: Path) -> None:
    made = trained(tmp_path)
    stored = preprocessing_from_json(json.loads(json.dumps(made.preprocessing.to_json())))
    features, targets = encode_evaluation(tmp_path / "people.csv", stored)
    assert torch.equal(features, made.features)
    assert torch.equal(targets, made.targets)
    other = csv(tmp_path, "extra\tcolour\tage\nx\tgreen\t60\nx\tred\t20\n", "new.tsv")
    assert torch.equal(encode_features(other, stored), made.features[[1, 0]])


def test_other_files_that_do_not_fit(tmp_path: Path) -> None:
    made = trained(tmp_path).preprocessing
    lacking = csv(tmp_path, "age\n3\n", "lacking.csv")
    with pytest.raises(InputError, match="no column colour, which is needed; its columns are age"):
        encode_features(lacking, made)
    without = csv(tmp_path, "age,colour\n3,red\n", "without.csv")
    assert encode_features(without, made).shape == (1, 5)
    with pytest.raises(InputError, match="no column income, which is needed"):
        encode_evaluation(without, made)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 5)))
    with pytest.raises(InputError, match="trained on a table"):
        encode_features(tmp_path / "a.npz", made)


# Arrays


def arrays(folder: Path, **content: Any) -> Path:
    path = folder / "a.npz"
    np.savez(path, **content)
    return path


IMAGES = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)


def test_images_with_classes(tmp_path: Path) -> None:
    path = arrays(tmp_path, images=IMAGES, labels=np.array([0, 1, 2, 1]), user_ids=[5, 5, 7, 8])
    with pytest.raises(InputError, match="what is to be protected was not said"):
        open_records(path, schema=Schema.from_flags(classes="cat,dog,cow"))
    schema = Schema.from_flags(classes="cat,dog,cow", user_column="user_ids")
    raw = open_records(path, schema=schema)
    assert raw.image_shape == IMAGES.shape[1:]
    assert (raw.columns_to_release, raw.private_notes, len(raw)) == ((), (), 4)
    assert raw.bucket_counts().shape == (0, CELLS)
    found = raw.encode()
    torch.testing.assert_close(found.features, torch.from_numpy(IMAGES) / 255.0)
    assert found.targets.tolist() == [0, 1, 2, 1]
    assert classes_of(found) == ("cat", "dog", "cow")
    assert found.user_ids is not None
    assert found.user_ids.tolist() == [0, 0, 1, 2]
    assert found.preprocessing.public_by_confirmation == ()
    with pytest.raises(InputError, match="arrays need no bounds"):
        raw.encode([(0, 1)])
    assert torch.equal(encode_evaluation(path, found.preprocessing)[0], found.features)


def test_classes_of_arrays_from_data(tmp_path: Path) -> None:
    schema = Schema.from_flags(classes="from-data")
    for labels, classes in (
        (np.array([10, 2, 10, 3]), ("2", "3", "10")),
        (np.array(["b", "a", "b", "c"]), ("a", "b", "c")),
        (np.array([True, False, True, True]), ("False", "True")),
        (np.array([1.0, 0.0, 1.0, 2.0]), ("0", "1", "2")),
    ):
        found = open_records(arrays(tmp_path, x=IMAGES, y=labels), schema=schema).encode()
        assert classes_of(found) == classes
        assert found.preprocessing.public_by_confirmation == ("classes of y",)
        expected = [classes.index(str(v).removesuffix(".0")) for v in labels]
        assert found.targets.tolist() == expected


def test_a_regression_on_arrays(tmp_path: Path) -> None:
    x = np.ones((3, 2))
    path = arrays(tmp_path, x=x, dose=np.array([0.0, 5.0, 99.0]))
    schema = Schema.from_flags(target="dose", bounds=["dose=0:10"])
    found = open_records(path, schema=schema).encode()
    assert found.targets.tolist() == [-1, 0, 1]
    assert torch.equal(encode_evaluation(path, found.preprocessing)[1], found.targets)
    assert encode_features(path, found.preprocessing).shape == (3, 2)
    torch.save(torch.ones(5, 2), tmp_path / "new.pt")
    assert encode_features(tmp_path / "new.pt", found.preprocessing).shape == (5, 2)
    with pytest.raises(InputError, match="trained on arrays"):
        encode_features(csv(tmp_path), found.preprocessing)


def test_arrays_that_are_refused(tmp_path: Path) -> None:
    path = arrays(tmp_path, x=np.ones((3, 2)), y=np.array([0, 1, 7]))
    assert "nothing is known about the target 'y'" in error(path)
    ten = Schema.from_flags(classes="3")
    for schema, options in (
        (ten.updated(Schema(drop=("x",))), {}),
        (Schema.from_flags(classes="3", bounds=["x=0:1"]), {}),
        (ten, {"release_scale": True}),
        (ten, {"delimiter": ";"}),
    ):
        assert "are declared for tables" in error(path, schema=schema, **options)
    assert f"the first is 7 in record 3 of {path}" in error(path, schema=ten)
    nan = arrays(tmp_path, x=np.array([[1, math.nan]]), y=np.array([0]))
    assert "1 record has features that are not finite" in error(nan, schema=ten)
    assert "targets are needed" in error(arrays(tmp_path, x=np.ones((3, 2))), schema=ten)
