"""The tables of `benchmarks/per_example.py`: whom a figure compares with, and what a failure looks like."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts that import each other

import engines
import meters
import per_example


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, *seconds: float) -> object:
        taken = itertools.cycle(seconds)

        def step() -> None:
            self.now += next(taken)

        return step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meters.time, "perf_counter", made)
    return made


class TestTurns:
    def test_a_figure_is_a_quotient_within_the_round(self, clock: Clock) -> None:
        """The machine becomes ten times slower half-way: the ratio does not."""
        steps = {"unit": clock.step(1, 10), "other": clock.step(3, 30)}
        times, _ = meters.in_turns(steps, "unit", seconds=60, clock=clock, steady=False)
        assert meters.ratios(times, "unit")["other"] == (3, 3, 3)

    def test_steps_at_powers_of_two_do_not_count(self, clock: Clock) -> None:
        slow = [50 if step & (step - 1) == 0 else 1 for step in range(2, 300)]  # after the first
        steps = {"unit": clock.step(1), "other": clock.step(*slow)}
        times, _ = meters.in_turns(steps, "unit", seconds=200, clock=clock)
        assert set(times["other"]) == {1}

    def test_each_leaves_when_its_time_is_up(self, clock: Clock) -> None:
        steps = {"unit": clock.step(1), "short": clock.step(2), "long": clock.step(20)}
        times, _ = meters.in_turns(steps, "unit", seconds=10, clock=clock, steady=False)
        rounds = {name: len(taken) for name, taken in times.items()}
        assert rounds == {"unit": 10, "short": 5, "long": 2}

    def test_one_that_fails_leaves_and_the_others_go_on(self, clock: Clock) -> None:
        def failing() -> None:
            raise MemoryError

        steps = {"unit": clock.step(1), "failing": failing, "other": clock.step(2)}
        times, failures = meters.in_turns(steps, "unit", seconds=10, clock=clock, steady=False)
        assert failures.keys() == {"failing"}
        assert times.keys() == {"unit", "other"}


class TestTable:
    def test_an_engine_that_fails_has_a_cell_that_says_why(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(task: object, batch: object) -> engines.Step:
            raise RuntimeError("can't allocate memory: you tried to allocate 9 bytes")

        monkeypatch.setitem(engines.WORK["gradients"], "opake", failing)
        words = "--models mlp-100k --batches 2 --engines dpis opake --seconds 0.01"
        (row,) = per_example.rows(per_example.arguments(words.split()))
        assert row["opake"].note == "no memory"
        assert row["dpis"].ratio > 0
        assert per_example.body(row).count("|") == 8

    def test_batches_that_would_take_too_long_are_left_out(self) -> None:
        words = "--models mlp-100k --batches 1 1000000 --engines sgd --seconds 0.01 --longest 1"
        _, large = per_example.rows(per_example.arguments(words.split()))
        assert large["sgd"].note == "too long"

    def test_another_sum_is_marked(self) -> None:
        ours = per_example.Cell("m", 1, "gradients", "dpis", 1.0, 1.0, 1.0, 1.0, 3, sum_norm=2.0)
        theirs = per_example.replace(ours, engine="opake", sum_norm=2.1)
        assert per_example.shown(theirs, ours).endswith("*")
        assert not per_example.shown(per_example.replace(theirs, sum_norm=2.0), ours).endswith("*")
