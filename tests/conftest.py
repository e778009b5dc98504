"""Shared by all tests: Hypothesis runs the same examples everywhere, without a clock; one thread for every worker."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from hypothesis import settings

settings.register_profile("dpis", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("dpis")
