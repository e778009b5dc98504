"""Shared by all tests: Hypothesis runs the same examples everywhere, without a clock."""

from hypothesis import settings

settings.register_profile("dpis", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("dpis")
