"""The command line: thin, every number comes from the library."""

from dpis.cli.app import main

__all__ = ["main"]
