"""Runs are made as in the tests of training."""

from tests.training.conftest import _quick_engine, checked_engine

__all__ = ["_quick_engine", "checked_engine"]
