"""When to look: early, then ever more rarely, and never for the last time."""

from __future__ import annotations


class Looks:
    """Counts the occasions of one probe: the 1st, 2nd, 4th, 8th, … are looked at.

    What shows nothing (a batch of equal records) was no look: then the next occasion is one.

    Example:
        >>> looks = Looks()
        >>> [number for number in range(1, 20) if looks.due()]
        [1, 2, 4, 8, 16]
    """

    def __init__(self) -> None:
        self.occasions, self._owed = 0, False

    def due(self) -> bool:
        """One more occasion: whether to look at it."""
        self.occasions += 1
        return self.now

    @property
    def now(self) -> bool:
        """Whether to look at the present occasion; before the first, too."""
        return self._owed or self.occasions & (self.occasions - 1) == 0

    def showed(self, something: bool) -> None:
        """What came of a look."""
        self._owed = not something
