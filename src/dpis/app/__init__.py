"""The command line: thin, every number comes from the library."""

from dpis.app.entry import main

__all__ = ["main"]
