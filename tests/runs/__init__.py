"""Tests of a run's files."""
