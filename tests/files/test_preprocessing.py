"""How records become features: by hand, by laws, and the same after a trip through JSON."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.files.arrays import Arrays
from dpis.files.preprocessing import (
    ArrayPreprocessing,
    CategoricalColumn,
    NumericColumn,
    TablePreprocessing,
    preprocessing_from_json,
)
from dpis.files.schema import canonical
from dpis.files.table import Table, TextColumn
from dpis.files.targets import ClassTarget, NumberTarget, Origin, distinct_names

CLASSES = ClassTarget("y", ("no", "yes"))


def text(cells: list[str]) -> TextColumn:
    values = tuple(dict.fromkeys(map(canonical, cells)))
    return TextColumn(values, np.array([values.index(canonical(c)) for c in cells], dtype=np.int64))


def table(numbers: dict[str, list[float]], texts: dict[str, list[str]]) -> Table:
    length = len(next(iter({**numbers, **texts}.values())))
    return Table(
        source="t.csv",
        numbers={name: np.array(cells, dtype=np.float64) for name, cells in numbers.items()},
        texts={name: text(cells) for name, cells in texts.items()},
        rows=length,
        lines=np.arange(2, length + 2),
    )


def arrays(features: np.ndarray, targets: np.ndarray | None = None) -> Arrays:
    return Arrays("a.npz", features, "y", targets, None)


def test_a_table_by_hand() -> None:
    made = TablePreprocessing(
        (NumericColumn("age", (0, 100)), CategoricalColumn("colour", ("red", "green"))), CLASSES
    )
    read = table(
        {"age": [0, 25, 300, math.nan, -math.inf]},
        {"colour": ["green", " red", "", "blue", "RED"], "y": ["yes", "no ", "no", "yes", "yes"]},
    )
    features, targets = made.encode(read)
    assert made.feature_names == (
        "age",
        "age missing",
        "colour=red",
        "colour=green",
        "colour=missing/other",
    )
    assert features.dtype == torch.float32
    assert features.tolist() == [
        [-1.0, 0, 0, 1, 0],
        [-0.5, 0, 1, 0, 0],
        [1.0, 0, 0, 0, 1],
        [0.0, 1, 0, 0, 1],
        [-1.0, 0, 0, 0, 1],
    ]
    assert targets.tolist() == [1, 0, 0, 1, 1]
    assert made.decode_predictions(torch.tensor([[0.0, 2.0], [1.0, -1.0]])) == ["yes", "no"]
    assert made.record_shape == (5,)


BOUND = st.floats(-1e300, 1e300)
PAIRS = st.tuples(BOUND, BOUND).map(sorted).filter(lambda p: p[1] / 2 - p[0] / 2 > 0)


@settings(deadline=None)
@given(pair=PAIRS, values=st.lists(st.floats(), min_size=1, max_size=8))
def test_numbers_stay_between_minus_one_and_one(pair: list[float], values: list[float]) -> None:
    made = TablePreprocessing((NumericColumn("a", tuple(pair)),), CLASSES)
    read = table({"a": values}, {})
    found = made.encode_features(read).numpy()
    assert np.isfinite(found).all()
    assert (np.abs(found) <= 1).all()
    np.testing.assert_array_equal(found[:, 1], np.isnan(values))
    assert (found[np.isnan(values), 0] == 0).all()
    order = np.argsort(np.array(values)[~np.isnan(values)], kind="stable")
    assert (np.diff(found[~np.isnan(values), 0][order]) >= 0).all()


@settings(deadline=None)
@given(pair=PAIRS, data=st.data())
def test_regression_targets_come_back(pair: list[float], data: st.DataObject) -> None:
    low, high = pair
    values = data.draw(st.lists(st.floats(low, high), min_size=1, max_size=5))
    target = NumberTarget("y", (low, high))
    encoded = target.of_numbers(np.array(values), str)
    assert (encoded.abs() <= 1).all()
    tolerance = 1e-6 * (high / 2 - low / 2) + 1e-15 * max(abs(low), abs(high))
    np.testing.assert_allclose(target.decode(encoded), values, rtol=0, atol=tolerance)
    assert target.decode(encoded[:, None]) == target.decode(encoded)
    assert all(low <= value <= high for value in target.decode(torch.tensor([-9.0, 9.0])))


@settings(deadline=None)
@given(cells=st.lists(st.text(max_size=3), min_size=1, max_size=8), data=st.data())
def test_every_category_has_one_place(cells: list[str], data: st.DataObject) -> None:
    categories = distinct_names(data.draw(st.lists(st.sampled_from(cells)).map(set).map(list)))
    categories = tuple(dict.fromkeys(map(canonical, categories)))
    made = TablePreprocessing((CategoricalColumn("c", categories),), CLASSES)
    found = made.encode_features(table({}, {"c": cells})).numpy()
    assert (found.sum(axis=1) == 1).all()
    expected = [
        categories.index(canonical(c)) if canonical(c) in categories else len(categories)
        for c in cells
    ]
    assert found.argmax(axis=1).tolist() == expected


def test_one_record_is_encoded_whatever_the_others() -> None:
    """Rule 17: preprocessing couples no records."""
    made = TablePreprocessing(
        (NumericColumn("a", (0, 1), Origin.RELEASED), CategoricalColumn("c", ("u",))), CLASSES
    )
    alone = made.encode_features(table({"a": [0.3]}, {"c": ["u"]}))
    among = made.encode_features(
        table({"a": [math.nan, 0.3, 1e9]}, {"c": ["new", "u", ""]}),
    )
    assert torch.equal(alone[0], among[1])


def test_names_from_data_have_an_order_that_no_record_decides() -> None:
    assert distinct_names(["10", "9", "NA", "-1", "", "?"]) == ("-1", "9", "10")
    assert distinct_names(["b", "10", "9", "nan"]) == ("10", "9", "b")


def test_labels_of_arrays() -> None:
    digits = ClassTarget("y", tuple("0123"))
    for values in (np.array([3, 0], np.uint8), np.array([3.0, 0.0]), np.array(["3.0", " 0"])):
        assert digits.of_array(values, str).tolist() == [3, 0]
    assert CLASSES.of_array(np.array([True, False]), str).tolist() == [1, 0]  # places
    assert ClassTarget("y", ("5", "-2")).of_array(np.array([-2, 5]), str).tolist() == [1, 0]


def test_targets_that_are_refused() -> None:
    with pytest.raises(InputError, match=r"2 records have a target 'y' that is none of the 2 cla"):
        CLASSES.of_text(text(["yes", "maybe", "", "no"]), lambda i: f"line {i + 2}")
    with pytest.raises(InputError, match=r"the first is 'maybe' in line 3; declare every class"):
        CLASSES.of_text(text(["yes", "maybe", "", "no"]), lambda i: f"line {i + 2}")
    digits = ClassTarget("y", tuple("0123"))
    for bad in (7, -1):
        with pytest.raises(InputError, match=rf"1 record has .* the first is {bad} in record 2"):
            digits.of_array(np.array([0, bad]), lambda i: f"record {i + 1}")
    with pytest.raises(InputError, match="none of the 4 classes"):
        digits.of_array(np.array([2**64 - 1], dtype=np.uint64), str)
    with pytest.raises(InputError, match=r"not a whole number, such as 0.5: for regression"):
        digits.of_array(np.array([0.5]), str)
    with pytest.raises(InputError, match="not a whole number"):
        digits.of_array(np.array([math.nan]), str)
    with pytest.raises(InputError, match="whole numbers or text"):
        digits.of_array(np.array([1j]), str)
    with pytest.raises(InputError, match=r"1 record has no number as target 'y'.*line 1"):
        NumberTarget("y", (0, 1)).of_numbers(np.array([0.5, math.nan]), lambda i: f"line {i}")


def test_outputs_that_are_refused() -> None:
    with pytest.raises(InputError, match="2 columns, one a class, found shape"):
        CLASSES.decode(torch.zeros(4, 3))
    with pytest.raises(InputError, match="one number a record"):
        NumberTarget("y", (0, 1)).decode(torch.zeros(4, 3))


def test_images_are_divided_by_255() -> None:
    made = ArrayPreprocessing((2, 2), True, CLASSES)
    images = np.array([[[0, 51], [102, 255]]], dtype=np.uint8)
    features, labels = made.encode(arrays(images, np.array([1])))
    torch.testing.assert_close(features, torch.tensor([[[0.0, 0.2], [0.4, 1.0]]]))
    assert labels.tolist() == [1]
    assert made.decode_predictions(torch.tensor([[0.0, 1.0]])) == ["yes"]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64, np.int8, bool])
def test_other_arrays_are_taken_as_they_are(kind: type) -> None:
    values = np.array([[0, 1], [1, 0]], dtype=kind)
    features = ArrayPreprocessing((2,), False, CLASSES).encode_features(arrays(values))
    assert features.dtype == torch.float32
    np.testing.assert_array_equal(features.numpy(), values.astype(np.float64))


def test_arrays_that_are_refused() -> None:
    made = ArrayPreprocessing((2,), False, NumberTarget("y", (0, 10)))
    bad = np.array([[1, 2], [math.nan, 0], [3, math.inf], [1e60, 0]])
    with pytest.raises(InputError, match=r"3 records have features that are not finite.*record 2;"):
        made.encode_features(arrays(bad))
    with pytest.raises(InputError, match="that rule is part of the mechanism"):
        made.encode_features(arrays(bad[:2]))
    with pytest.raises(InputError, match=r"records must have the shape \(2,\), found \(3,\)"):
        made.encode_features(arrays(np.zeros((2, 3))))
    with pytest.raises(InputError, match="features must be not uint8, found uint8"):
        made.encode_features(arrays(np.zeros((2, 2), np.uint8)))
    with pytest.raises(InputError, match="features must be uint8, which is divided by 255"):
        ArrayPreprocessing((2,), True, CLASSES).encode_features(arrays(np.zeros((2, 2))))
    for large in (2**24 + 1, -(2**24) - 1):
        with pytest.raises(InputError, match="not exact in float32"):
            made.encode_features(arrays(np.array([[large, 0]])))
    with pytest.raises(InputError, match="targets are needed"):
        made.encode_targets(arrays(np.zeros((2, 2))))
    with pytest.raises(InputError, match="must be numbers"):
        made.encode_targets(arrays(np.zeros((1, 2)), np.array(["a"])))
    assert made.encode_targets(arrays(np.zeros((2, 2)), np.array([0, 10]))).tolist() == [-1, 1]


VALUES = [
    TablePreprocessing(
        (
            NumericColumn("a", (-0.1, 1 / 3), Origin.RELEASED),
            CategoricalColumn("c", ("ü", "b, c"), Origin.CONFIRMED),
            CategoricalColumn("empty", (), Origin.CONFIRMED),
        ),
        ClassTarget("y", ("0", "1"), Origin.CONFIRMED),
    ),
    TablePreprocessing((NumericColumn("a", (-1e300, 1e300)),), NumberTarget("y", (0, 0.1))),
    ArrayPreprocessing((1, 28, 28), True, ClassTarget("labels", ("cat", "dog"))),
    ArrayPreprocessing((7,), False, NumberTarget("y", (-5, 5))),
]


@pytest.mark.parametrize("value", VALUES, ids=["table", "regression", "images", "array"])
def test_json_brings_it_back(value: TablePreprocessing | ArrayPreprocessing) -> None:
    assert preprocessing_from_json(json.loads(json.dumps(value.to_json()))) == value


@pytest.mark.parametrize("value", VALUES, ids=["table", "regression", "images", "array"])
def test_json_with_a_field_lost_or_wrong_is_refused(
    value: TablePreprocessing | ArrayPreprocessing,
) -> None:
    for key in value.to_json():
        for change in ({}, {key: "wrong"}, {key: 3}, {key: [-3]}, {key: {"name": "y"}}):
            data = {k: v for k, v in value.to_json().items() if k != key}
            with pytest.raises(InputError):
                preprocessing_from_json({**data, **change})
    for odd in (None, [], {"kind": "other"}):
        with pytest.raises(InputError, match="not the preprocessing of a table"):
            preprocessing_from_json(odd)


def test_json_of_parts_is_read_strictly() -> None:
    good = VALUES[0].to_json()
    column = {"name": "a", "bounds": [0, 1], "origin": "declared"}
    for bad in (
        {**column, "origin": "guessed"},
        {**column, "bounds": [1, 0]},
        {**column, "bounds": [0]},
        {**column, "extra": 1},
        {**column, "name": 3},
    ):
        with pytest.raises(InputError):
            preprocessing_from_json({**good, "columns": [bad]})
    with pytest.raises(InputError, match="at least one column"):
        preprocessing_from_json({**good, "columns": []})
    with pytest.raises(InputError, match="each once"):
        preprocessing_from_json({**good, "columns": [column, column]})
