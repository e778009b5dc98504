"""Fast gradients equal the slow oracles on every problem of the list."""

from __future__ import annotations

import warnings

import pytest
import torch

from dpis import batches
from dpis.gradients import RecordGradients, SlowGradientsWarning
from tests.gradients import oracles
from tests.gradients.problems import PROBLEMS, RECORDS, Problem

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def setting(problem: Problem, dtype: torch.dtype, records: int = RECORDS):
    torch.manual_seed(0)
    module = problem.module().to(dtype)
    batch = batches.apply(
        lambda t: t.to(dtype) if t.is_floating_point() else t,
        problem.batch(records * problem.rows_per_record),
    )
    return module, batch


def fast(problem: Problem, module: torch.nn.Module, **options: object) -> RecordGradients:
    return RecordGradients(
        module,
        objective=problem.objective,
        rows_per_record=problem.rows_per_record,
        **options,  # type: ignore[arg-type]
    )


def assert_equal(problem: Problem, dtype: torch.dtype, oracle, records: int = RECORDS) -> None:
    module, batch = setting(problem, dtype, records)
    expected = oracle(problem, module, batch)
    with warnings.catch_warnings():
        if problem.slow:
            warnings.simplefilter("ignore", SlowGradientsWarning)
        tape = fast(problem, module, check=False).record(batch)
    limit = TOLERANCE[dtype]
    norms = oracles.norms(expected)
    assert ((tape.norms() - norms).abs() <= limit * norms).all()
    one_in_five = (torch.arange(records) % 5 == 1).double()
    for weights in (torch.rand(records) + 0.5, one_in_five, torch.zeros(records)):
        sums = tape.weighted_sum(weights)
        slow = oracles.weighted_sum(expected, weights)
        assert sums.keys() == slow.keys()
        scale = (weights * norms).sum()
        for name, value in slow.items():
            assert sums[name].shape == value.shape
            assert (sums[name] - value).norm() <= limit * scale, name


def ids(problem: Problem) -> str:
    return problem.id


@pytest.mark.parametrize("problem", PROBLEMS, ids=ids)
def test_float64_equals_the_oracle(problem: Problem) -> None:
    assert_equal(problem, torch.float64, oracles.by_vmap if problem.vmap else oracles.by_loop)


@pytest.mark.parametrize("problem", PROBLEMS, ids=ids)
def test_float32_equals_the_oracle(problem: Problem) -> None:
    assert_equal(problem, torch.float32, oracles.by_vmap if problem.vmap else oracles.by_loop)


@pytest.mark.parametrize("problem", PROBLEMS, ids=ids)
def test_one_record_equals_plain_autograd(problem: Problem) -> None:
    assert_equal(problem, torch.float64, oracles.by_loop, records=1)
