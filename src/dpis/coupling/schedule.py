"""When to try out again what was found to hold: early, then ever more rarely, and never for the last time."""

from __future__ import annotations


def time_to_look(occasion: int) -> bool:
    """At the 1st, 2nd, 4th, 8th, … occasion, and before any."""
    return occasion & (occasion - 1) == 0
