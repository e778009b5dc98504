"""The header of a ledger: what a run claims, what the claim rests on, and the guard that follows from both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.filter import Guard, PlannedSequence, RenyiFilter
from dpis.accounting.workload import MOST_RECORDS, PlannedRun
from dpis.errors import InputError


class Mode(StrEnum):
    """What a claim rests on."""

    PREDECLARED = "predeclared"
    """Every event was fixed beforehand; the claim is the plan's, also after an early stop."""

    ADAPTIVE = "adaptive"
    """A Renyi filter admitted every event."""


class CountSource(StrEnum):
    """Where ``n_public`` comes from."""

    GIVEN = "given"
    DATASET_LENGTH = "dataset-length"
    RELEASED = "released"


class Norms(StrEnum):
    """In what shape gradient norms were computed."""

    FIXED_SHAPE = "fixed-shape"
    """One shape throughout: a record's norm does not depend on who shares its batch."""

    BATCH_SHAPED = "batch-shaped"
    """The shapes followed the batches (a padding to the longest, a loop that is not ours): rounding may differ.

    And more than rounding, if the model saw how far a record was padded: then records coupled, and no claim holds.
    `dpis.train` tries that out on some records; in a loop that is not ours nobody does.
    """


class Unit(StrEnum):
    """Who is protected: what two adjacent data sets differ in."""

    RECORD = "record"
    """One row of the data."""

    USER = "user"
    """One user with all of their rows; one row more or less of a user who stays is another matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line: the claim, and what a reader needs to check it."""

    claim: Budget
    adjacency: Adjacency
    n_public: int
    n_public_source: CountSource
    mode: Mode
    planned: tuple[PlannedRun, ...] = ()
    """Every event of a predeclared run; empty in adaptive mode."""
    filter_order: int | None = None
    """The Renyi order of an adaptive run's filter."""
    versions: Mapping[str, str] = field(default_factory=dict)
    seeded: bool = False
    """A fixed seed makes the randomness reproducible, so the claim does not hold: not for release."""
    diagnostics: bool = False
    """Private values were shown to the operator: not for release."""
    audited: bool = False
    """Canaries were planted among the records, and whoever planted them can find them: not for release."""
    norms: Norms = Norms.FIXED_SHAPE
    """Rule 19: whether the rounding of a norm can depend on other records."""
    unit: Unit = Unit.RECORD
    """Who is protected; n_public counts these."""
    shards: int = 1
    """How many parts the records were in, each with coins of its own; 1 where a ledger says nothing about it.

    No claim depends on it. Whoever repeats the draws, by the same key on another number of processes, needs it.
    """

    def __post_init__(self) -> None:
        adaptive = self.mode is Mode.ADAPTIVE
        if adaptive and (self.filter_order is None or self.planned):
            raise InputError("an adaptive run's header needs the filter's Renyi order, and no plan")
        if not adaptive and (not self.planned or self.filter_order is not None):
            raise InputError("a predeclared run's header needs the planned events, and no filter")
        if not 1 <= self.n_public <= MOST_RECORDS:
            raise InputError(f"n_public must lie in 1..{MOST_RECORDS:,}, found {self.n_public}")
        if self.shards < 1 or self.shards & (self.shards - 1):
            raise InputError(f"shards must be a power of two, found {self.shards}")
        if self.n_public_source is CountSource.RELEASED and not adaptive:
            raise InputError(
                "a plan that rests on a released count of records is not predeclared: use the method dpis-adaptive"
            )
        read = self.n_public_source is CountSource.DATASET_LENGTH
        if read and self.adjacency is not Adjacency.ZERO_OUT:
            raise InputError(
                "n_public read from the data set makes the number of records public: adjacency must be zero-out"
            )

    def guard(self) -> Guard:
        """The guard that every event of this run must pass."""
        if self.mode is Mode.ADAPTIVE:
            assert self.filter_order is not None
            return RenyiFilter(self.claim, self.filter_order)
        return PlannedSequence(self.planned, self.claim.delta)
