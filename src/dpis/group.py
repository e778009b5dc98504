"""The processes that train one model together: what they tell each other, and how they stop together.

PyTorch's own engine carries it all: ``torchrun`` starts the processes, ``torch.distributed`` connects them. Ranks trust
each other and hold the same key; the network between them is theirs to protect (docs/design/0010-many-processes.md).

What goes wrong on one rank must stop all of them, with one message that names the rank and the cause. So whatever may
fail on one rank alone stands in `Group.together`, at the end of which every rank hears how the others fared.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpis.errors import DpisError, InputError

T = TypeVar("T")

HOW_TO_GO_ON = (
    "Nothing more was released. Mend the cause and go on from the last checkpoint, "
    "on as many processes as you like"
)


class RankError(DpisError, RuntimeError):
    """Another process of the group stopped, so this one did."""


class Group(ABC):
    """Processes in lockstep. Every method but `together` is called by all ranks, at the same place.

    Attributes:
        rank: which one this is, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and speaks to people."""
        return self.rank == 0

    @abstractmethod
    def gathered(self, value: T) -> list[T]:
        """One value from every rank, in their order. It must be small: it is pickled."""

    @abstractmethod
    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, or the error that it meets: the same on every rank."""

    def after_first(self, make: Callable[[], T]) -> T:
        """Made by rank 0, then by the others, who find what it left on the disk: a download, a cache."""
        made: list[T] = []
        for leading in (True, False):
            with self.together():
                if self.leads == leading:
                    made.append(make())
        return made[0]

    @abstractmethod
    def hear(self, place: int = 0, terms: int = 0) -> None:
        """Go on if all other ranks do.

        Args:
            place: where this rank stands, say the number of its step: all must stand there.
            terms: what it takes this step by, as a number: the same for all.

        Raises:
            RankError: one of them stopped, with its number and its words; or stands elsewhere.
        """

    @abstractmethod
    def stop(self, error: BaseException) -> None:
        """Tell the others, at the place where they `hear`, that this rank goes no further."""

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """An error in here stops all ranks, where they `hear` next."""
        try:
            yield
        except BaseException as error:
            self.stop(error)
            raise

    @contextmanager
    def together(self, place: int = 0) -> Iterator[None]:
        """What is done in here may fail on one rank alone: then all of them raise at its end, as in `hear`."""
        with self.stopping():
            yield
        self.hear(place)

    @abstractmethod
    def exchanged(self, slices: Tensor) -> Tensor:
        """``[size, m]``, one slice for every rank, to the slices for this one: ``[size, m]``, in the order of ranks."""

    @abstractmethod
    def collected(self, own: Tensor) -> Tensor:
        """``[m]`` on every rank to all of them: ``[size, m]``, in the order of ranks."""

    @abstractmethod
    def share(self, tensor: Tensor) -> None:
        """Fill the tensor with that of rank 0."""

    @abstractmethod
    def arrive(self, what: str, seconds: float = 60.0) -> None:
        """Refuse to wait for long where people call something on rank 0 alone.

        Raises:
            RankError: some ranks did not come.
        """

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank; raises as `hear` does."""
        return self.largest(int(here)) > 0

    def largest(self, number: int) -> int:
        """Of all ranks' whole numbers from 0; raises as `hear` does."""
        return max(self.answers(number))

    def answers(self, number: int) -> Sequence[int]:
        """As `gathered`, for a whole number, in a tenth of the time; raises as `hear` does."""
        return self.gathered(number)

    @contextmanager
    def in_a_pass(self) -> Iterator[None]:
        """Here a sharded model's own collectives run: all ranks enter, or none.

        What raises inside cannot be told: the others wait in a collective of the model, not for a word. The process
        ends, and its launcher stops the others.
        """
        self.any(False)
        yield

    def require_same(self, value: Any, what: str) -> None:
        """Refuse to go on if a rank holds another value.

        Raises:
            InputError: naming the first rank that does.
        """
        held = self.gathered(value)
        others = [rank for rank, other in enumerate(held) if other != held[0]]
        if others:
            raise InputError(
                f"every process must have the same, and rank {others[0]} has another than rank 0: {what}. They would "
                "train different models under one claim. Start all of them with the same code, arguments and data. "
                "Nothing more was released"
            )


class Alone(Group):
    """One process."""

    rank, size = 0, 1

    def gathered(self, value: T) -> list[T]:
        """Its own."""
        return [value]

    def from_first(self, make: Callable[[], T]) -> T:
        """Made here."""
        return make()

    def hear(self, place: int = 0, terms: int = 0) -> None:
        """There is nobody to hear from."""

    def stop(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def arrive(self, what: str, seconds: float = 60.0) -> None:
        """There is nobody to wait for."""

    def exchanged(self, slices: Tensor) -> Tensor:
        """As they are."""
        return slices

    def collected(self, own: Tensor) -> Tensor:
        """Its own."""
        return own[None]

    def share(self, tensor: Tensor) -> None:
        """Nobody to share with."""


class Ranks(Group):
    """All ranks of the default process group.

    Small messages go over gloo whatever carries tensors, so that they wait for no accelerator.

    Attributes:
        stopped: whether one of them stopped, or cannot be reached: then all of them stop.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.stopped = self._passing = False
        self._words = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        atexit.unregister(_take_leave)
        atexit.register(_take_leave)

    def gathered(self, value: T) -> list[T]:
        """From all that go on: a rank that stopped says so wherever the others wait for it."""
        self.any(False)
        return self._all(value)

    def _all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self._connected():
            dist.all_gather_object(values, value, group=self._words)
        return values

    def _numbers(self, *own: int) -> list[tuple[int, ...]]:
        """In one tensor. It is always a word, wherever ranks wait: who stops says so in the same form."""
        with self._connected():
            mine = torch.tensor(own)
            everyone = torch.empty(len(own) * self.size, dtype=mine.dtype)
            dist.all_gather_single(everyone, mine, group=self._words)
        rows: list[list[int]] = everyone.view(self.size, -1).tolist()
        return [tuple(row) for row in rows]

    def from_first(self, make: Callable[[], T]) -> T:
        """Rank 0's; an error of its own stays what it is there, and is told by the others."""
        made: list[Any] = [None]
        with self.together():
            if self.leads:
                made = [make()]
        with self._connected():
            dist.broadcast_object_list(made, src=0, group=self._words)
        result: T = made[0]
        return result

    def hear(self, place: int = 0, terms: int = 0) -> None:
        """A word from every rank."""
        told = self._word(place, terms)
        if len(set(told)) > 1:
            self.stopped = True
            raise RankError(
                "the processes hold different noise multipliers or clip norms, or train different parameters: a part "
                "of the update would have less noise than another was charged for, or be added to the wrong weights. "
                f"Set, freeze and thaw on every process, not on one. {HOW_TO_GO_ON}"
            )

    def answers(self, number: int) -> Sequence[int]:
        """A word from every rank."""
        return self._word(_ASKING, number)

    def stop(self, error: BaseException) -> None:
        """Once; a group that has come apart hears nothing any more."""
        if not self.stopped and not self._passing:
            with suppress(RankError):
                self._numbers(1, 0, 0)
                self._all(_in_words(error))
        self.stopped = True

    def _word(self, place: int, answer: int) -> tuple[int, ...]:
        """Three numbers from every rank: whether it stops, where it stands, what it says. Causes follow a stop."""
        stops, places, answers = zip(*self._numbers(0, place, answer), strict=True)
        if any(stops):
            causes = self._all("")
            self.stopped = True
            rank, cause = next((rank, cause) for rank, cause in enumerate(causes) if cause)
            raise RankError(f"rank {rank} stopped: {cause} {HOW_TO_GO_ON}")
        if len(set(places)) > 1:
            self.stopped = True
            raise RankError(
                f"the processes stand at different places ({_in_a_row(places)}): each must take every batch of every "
                f"epoch, and step once for it. {HOW_TO_GO_ON}"
            )
        return tuple(answers)

    @contextmanager
    def in_a_pass(self) -> Iterator[None]:
        """Left by an exception, it is never left: `stop` then tells nobody."""
        self.any(False)
        self._passing = True
        yield
        self._passing = False

    def arrive(self, what: str, seconds: float = 60.0) -> None:
        """A barrier that tells who is missing."""
        try:
            dist.monitored_barrier(self._words, timedelta(seconds=seconds))
        except RuntimeError:
            self.stopped = True
            raise RankError(
                f"{what} must be called on every rank, rank {self.rank} waited {seconds:g} seconds for others: call it "
                "outside of `if rank == 0`. Nothing was written"
            ) from None

    def exchanged(self, slices: Tensor) -> Tensor:
        """Each slice goes over the wire once."""
        received = torch.empty_like(slices)
        with self._connected():
            dist.all_to_all_single(received, slices, group=self._group_of(slices))
        return received

    def collected(self, own: Tensor) -> Tensor:
        """Each slice goes over the wire to every other rank."""
        everything = own.new_empty(self.size * len(own))
        with self._connected():
            dist.all_gather_single(everything, own, group=self._group_of(own))
        return everything.view(self.size, -1)

    def share(self, tensor: Tensor) -> None:
        """A broadcast."""
        with self._connected():
            dist.broadcast(tensor, src=0, group=self._group_of(tensor))

    def _group_of(self, tensor: Tensor) -> Any:
        """The backend of an accelerator carries nothing that lies on the CPU."""
        return self._words if tensor.device.type == "cpu" else None

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Backends report a rank that is gone, and one that does not come, in words of their own."""
        if self.stopped:
            raise RankError(f"the processes of this run have stopped. {HOW_TO_GO_ON}")
        try:
            yield
        except RuntimeError as error:
            self.stopped = True
            said = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
            if "imed out" in said or "imeout" in said:
                problem = (
                    f"rank {self.rank} waited in vain for the other processes ({said}). If one of them was only slow, "
                    "start them with a longer torch.distributed.init_process_group(timeout=...), or dpis train "
                    "--timeout; every process must run the same loop, and call what saves or restores together"
                )
            else:
                problem = (
                    f"another process is gone, or cannot be reached from rank {self.rank} ({said}); what it said last "
                    "names the cause"
                )
            raise RankError(f"{problem}. {HOW_TO_GO_ON}") from None


def _take_leave() -> None:
    """For a script that does not: threads of gloo would abort a process that ends around them."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


_ranks: tuple[weakref.ref[Any], Ranks] | None = None
"""Of the default process group, which lives no longer for it: threads of its would outlive the interpreter."""


def current_group() -> Group:
    """All ranks of the default process group, or this process alone.

    Raises:
        InputError: the environment speaks of several processes, and they are not connected.
    """
    global _ranks
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        default = dist.group.WORLD
        if _ranks is None or _ranks[0]() is not default or _ranks[1].stopped:
            _ranks = weakref.ref(default), Ranks()
        return _ranks[1]
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            f"the environment speaks of {ranks} processes (WORLD_SIZE), and they are not connected: each would draw "
            "records and add noise by itself, and what they release together would cost more than any of them reports. "
            "Call torch.distributed.init_process_group() first; or, if this is one process, unset WORLD_SIZE. Nothing "
            "was released"
        )
    return Alone()


def warn(
    message: Warning | str, category: type[Warning] | None = None, stacklevel: int = 1
) -> None:
    """As ``warnings.warn``, once for all processes: rank 0 says it."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(message, category, stacklevel=stacklevel + 1)


@torch.no_grad()
def share_weights(model: nn.Module, group: Group) -> None:
    """Every process begins with the model of rank 0, as `DistributedDataParallel` has it.

    Raises:
        InputError: they hold models of other shapes.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    group.require_same([(n, tuple(t.shape), str(t.dtype)) for n, t in named], "model")
    for tensor in (*model.parameters(), *model.buffers()):
        if not hasattr(tensor, "to_local"):  # a sharded one is made of all ranks' rows
            group.share(tensor)


_ASKING = -1
"""The place of a rank that asks whether something is so on any."""


def _in_a_row(places: Sequence[int]) -> str:
    def where(place: int) -> str:
        if place <= 0:
            return "another call"
        return f"step {place & 0xFFFFFFFF} (epoch {place >> 32})"

    return ", ".join(f"rank {rank} at {where(place)}" for rank, place in enumerate(places))


def _in_words(error: BaseException) -> str:
    words = " ".join(str(error).split()) or "no reason given"
    kind = "" if isinstance(error, DpisError) else f"{type(error).__name__}: "
    return f"{kind}{words}".rstrip(".") + "."
