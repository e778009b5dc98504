"""Ctrl-C: finish the step, save, stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dpis.errors import DpisError


class InterruptedRunError(DpisError, KeyboardInterrupt):
    """The operator stopped the run; it is saved and can be resumed."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to save and stop after the step under way; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
