"""The accounted release of bounds: its sensitivity, and bounds that hold the data."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.files.scaling import (
    CELLS,
    DEFAULT_BOUNDS,
    HIGHEST_EXPONENT,
    PARTS,
    bounds_from_counts,
    bucket_counts,
    one_over_rows,
    sensitivity,
)

VALUES = st.one_of(st.floats(), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1.0, 2.0]))


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    columns = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(VALUES, min_size=columns, max_size=columns), max_size=8))
    return np.array(rows, dtype=np.float64).reshape(len(rows), columns)


def counted(table: np.ndarray, users: np.ndarray | None = None) -> torch.Tensor:
    return bucket_counts(list(table.T), None if users is None else one_over_rows(users))


@settings(max_examples=150, deadline=None)
@given(table=tables(), data=st.data())
def test_one_record_moves_the_counts_by_at_most_the_sensitivity(
    table: np.ndarray, data: st.DataObject
) -> None:
    columns = table.shape[1]
    record = np.array([data.draw(st.lists(VALUES, min_size=columns, max_size=columns))])
    place = data.draw(st.integers(0, len(table)))
    larger = np.concatenate([table[:place], record, table[place:]])
    change = (counted(larger) - counted(table)).norm().item()
    assert change <= sensitivity(columns) * (1 + 1e-12)
    known = int((~np.isnan(record)).sum())
    assert change == pytest.approx(math.sqrt(2 * known))  # attained where nothing is missing


@settings(max_examples=80, deadline=None)
@given(table=tables(), data=st.data())
def test_one_user_moves_the_counts_by_at_most_the_sensitivity(
    table: np.ndarray, data: st.DataObject
) -> None:
    rows, columns = table.shape
    users = np.array(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), int)
    gone = users != 1
    change = (counted(table, users) - counted(table[gone], users[gone])).norm().item()
    assert change <= sensitivity(columns) * (1 + 1e-9)


def test_counts_by_hand() -> None:
    counts = bucket_counts([np.array([1.0, 1.05, -1.0, 0.0, 1e-9, math.nan, 1e300, math.inf])])
    assert counts.dtype == torch.float64
    assert counts.shape == (1, CELLS)
    octaves, parts = counts[0, : CELLS // 17 + 1], counts[0]
    assert parts.sum() == 2 * 7  # the NaN counts nowhere
    assert octaves[84].item() == 2  # zero and what is near it
    assert octaves[84 + 1 + 20].item() == 2  # 1 and 1.05
    assert octaves[168].item() == 2  # the last one holds all that is larger


@pytest.mark.parametrize("bad", [0, -1])
def test_a_release_needs_columns(bad: int) -> None:
    with pytest.raises(InputError, match="at least one column"):
        sensitivity(bad)


FINE = {
    "age": lambda rng, n: rng.uniform(18, 90, n),
    "year": lambda rng, n: rng.uniform(1995, 2020, n),
    "income": lambda rng, n: rng.lognormal(10.5, 0.6, n),
    "celsius": lambda rng, n: rng.normal(12, 9, n),
    "standard": lambda rng, n: rng.normal(0, 1, n),
    "debt": lambda rng, n: -rng.lognormal(8, 0.7, n),
    "flag": lambda rng, n: rng.integers(0, 2, n).astype(float),
    "milliseconds": lambda rng, n: rng.normal(1.7e12, 1e9, n),
}


@pytest.mark.parametrize("name", FINE)
def test_bounds_hold_the_bulk_and_not_much_more(name: str) -> None:
    """20,000 records, eight columns at multiplier 10: the noise is 40 counts. Fixed seed."""
    rng = np.random.default_rng(3)
    column = FINE[name](rng, 20_000)
    std = 1.001 * 10 * sensitivity(8)
    noisy = bucket_counts([column]) + std * torch.from_numpy(rng.normal(size=(1, CELLS)))
    ((low, high),) = bounds_from_counts(noisy, std)
    inside = ((column >= low) & (column <= high)).mean()
    assert inside > 0.96
    spread = np.quantile(column, 0.99) - np.quantile(column, 0.01)
    resolution = max(abs(low), abs(high)) / PARTS
    assert high - low < 2 * spread + 2 * resolution


def test_few_records_still_find_the_octave() -> None:
    rng = np.random.default_rng(4)
    column = rng.uniform(100, 200, 1000)
    std = 1.001 * 10 * sensitivity(8)
    noisy = bucket_counts([column]) + std * torch.from_numpy(rng.normal(size=(1, CELLS)))
    ((low, high),) = bounds_from_counts(noisy, std)
    assert 64 <= low <= 130
    assert 170 <= high <= 256


def test_empty_columns_give_the_default_at_the_stated_rate() -> None:
    """2,000 columns of pure noise, each wrong with probability 6e-4: above 7 wrong has probability 3e-5."""
    noise = torch.from_numpy(np.random.default_rng(5).normal(size=(2000, CELLS))) * 7.0
    wrong = sum(pair != DEFAULT_BOUNDS for pair in bounds_from_counts(noise, 7.0))
    assert wrong <= 7


def test_special_columns() -> None:
    zero, half, both = np.zeros(9), np.array([0.0, 0.0, 3.0]), np.array([-3.0, 0.0])
    found = bounds_from_counts(bucket_counts([zero, half, both, np.array([math.inf])]), 0.0)
    assert found[0] == (-(2.0**-20), 2.0**-20)
    assert found[1] == (0.0, 3.125)
    assert found[2] == (-3.0, 0.0)
    assert found[3][1] == 2.0**HIGHEST_EXPONENT


COUNTS = st.sampled_from([0.0, 1.0, -1e9, 1e9, math.nan, math.inf, -math.inf, 50.0, 1e308])


@settings(max_examples=100, deadline=None)
@given(cells=st.dictionaries(st.integers(0, CELLS - 1), COUNTS, max_size=60), fill=COUNTS)
def test_bounds_are_always_finite_and_ordered(cells: dict[int, float], fill: float) -> None:
    noisy = torch.full((1, CELLS), fill, dtype=torch.float64)
    for cell, value in cells.items():
        noisy[0, cell] = value
    ((low, high),) = bounds_from_counts(noisy, 3.0)
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low < high


@settings(max_examples=150, deadline=None)
@given(
    octave=st.sampled_from([10, 83, 84, 85, 120]),
    count=st.sampled_from([20.0, 1e3, 1e4]),
    parts=st.lists(st.sampled_from([0.0, 4.0, 12.0, 40.0, 1e3]), min_size=PARTS, max_size=PARTS),
)
@example(octave=120, count=1e4, parts=[12.0] * PARTS)
def test_parts_that_contradict_their_octave_still_give_an_order(
    octave: int, count: float, parts: list[float]
) -> None:
    noisy = torch.zeros(1, CELLS, dtype=torch.float64)
    noisy[0, octave] = count
    octaves = 2 * 84 + 1
    begin = octaves + (octave * PARTS if octave < 84 else (octave - 1) * PARTS + 1)
    noisy[0, begin : begin + PARTS] = torch.tensor(parts, dtype=torch.float64)
    ((low, high),) = bounds_from_counts(noisy, 3.0)
    assert low < high


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=30))
def test_without_noise_every_value_is_inside(values: list[float]) -> None:
    column = np.array(values)
    ((low, high),) = bounds_from_counts(bucket_counts([column]), 0.0)
    assert low - 2.0**-20 <= column.min()
    assert column.max() <= high + 2.0**-20


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="must have the shape"):
        bounds_from_counts(torch.zeros(3), 1.0)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="noise_std"):
            bounds_from_counts(torch.zeros(1, CELLS), bad)
