"""Errors meant for people: what was required, what was found, what to do."""

from __future__ import annotations


def shown_number(value: object) -> str:
    """A number as an error shows it; anything else by its type, however long it is."""
    if not isinstance(value, int | float):
        return f"a value of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a whole number of more than 60 digits"
    return repr(value)


class DpisError(Exception):
    """Base of every error this package raises on purpose. Its message is one readable line."""


class InputError(DpisError, ValueError):
    """An argument cannot be honoured as given. Nothing was run and nothing was spent."""


class CouplingError(InputError):
    """One record's gradient depends on the other records of the batch."""


class MisuseError(DpisError, RuntimeError):
    """A private loop was driven in an order that its guarantee does not cover. Nothing was released."""


class GradientError(DpisError, RuntimeError):
    """The gradients of single records cannot be had from this model as it is. Nothing was clipped or released."""


class BudgetExceededError(DpisError):
    """An event would spend more than the claim allows. It was refused before anything was released."""


class LedgerError(DpisError):
    """A file is not a ledger of this package, or cannot be read as one."""


class BrokenLedgerError(DpisError):
    """A ledger contradicts itself or its claim. ``line`` is the first line that shows it (from 1)."""

    def __init__(self, line: int, problem: str):
        super().__init__(line, problem)  # what it is made of, so that it passes between processes
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        return f"line {self.line}: {self.problem}"


class PublicCountWarning(UserWarning):
    """The number of records was read from the dataset, so it is treated as public."""

    def __init__(self) -> None:
        super().__init__(
            "the number of records is treated as public, since n_public was not given: records are protected, how many "
            "there are is not"
        )


class BatchOverProcessesWarning(UserWarning):
    """How many records a step expects of all processes, and of each: loops for several mean one or the other.

    Args:
        batch_size: of a step.
        processes: how many there are.
        sampler: of the loader, where it was made for several processes and is replaced.
    """

    def __init__(self, batch_size: int, processes: int, sampler: str | None) -> None:
        replaced = "" if sampler is None else f"{sampler} is replaced by private draws: "
        super().__init__(
            f"{replaced}a step expects {batch_size:,} records over all {processes} processes, "
            f"{batch_size / processes:,.4g} on each"
        )
