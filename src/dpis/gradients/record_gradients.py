"""``RecordGradients``: norms and weighted sums for batches of any size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dpis import batches
from dpis.batches import Batch
from dpis.coupling.forbidden_layers import checked_model
from dpis.errors import InputError
from dpis.gradients.losses import Loss, Objective, objective_of
from dpis.gradients.recorder import Recorder
from dpis.gradients.tape import Tape

if TYPE_CHECKING:
    from dpis.gradients.sharded_sums import ShardedSums
from dpis.group import Group

# Chooses the weights of records from their norms and their indices in the batch.
Weigh = Callable[[Tensor, Tensor], Tensor]

CHUNK_BYTES = 64 << 20
"""What the activations of one chunk may take on a CPU: larger chunks fall out of the caches."""
LARGEST_CHUNK = 512
"""On a CPU; other devices take as many records as fit."""
PARAMETERS_WORTH = 8
"""A chunk reads all parameters and writes all sums, whatever its size: its activations may take so many times their
room, if there is memory."""
SHARE_OF_MEMORY = 8
"""A chunk takes this part of the memory at most: activations are what can be told beforehand, not all there is."""
SHARE_OF_DRAW = 10
"""Chunks of one shape are this part of a draw at most: half a chunk is filled up on average, 5 % of it."""
# Vector kernels treat the entries that do not fill their last vectors by other code, which rounds differently. With
# whole vectors of records there are none, in whatever order records and features lie.
LANES = 64 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 32


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a batch gave.

    Attributes:
        norms: ``||grad_i||`` of every record, float64; not finite where a gradient is not.
        sums: ``Σ_i w_i grad_i`` by parameter name; float64 where several chunks were added up.
    """

    norms: Tensor
    sums: dict[str, Tensor]


class RecordGradients:
    """Gradient norms of single records, and weighted sums of their gradients.

    For records ``i`` with losses ``l_i`` one forward and one backward pass give every
    ``n_i = ||∇l_i||``; then, for any weights ``w_i``, ``Σ_i w_i ∇l_i``. Gradients of single records
    are not held where that would be dear. The first batch also serves to find out where the records
    are in every tensor, and to compare the result with plain autograd.

    Args:
        module: the model. Its trainable parameters are those that require a gradient now.
        loss: ``loss(output, target)`` for batches ``(input, ..., target)``; see
            ``losses.objective_of`` for what ``reduction`` means here.
        objective: ``objective(module, batch)``, instead of ``loss``, for anything else.
        rows_per_record: a record is this many consecutive rows of the batch (augmentations of an
            image, texts of a user); its loss is the mean over its rows.
        chunk: at most so many records run at once; None: as many as suit caches and memory.
        fixed_shape: chunks have one shape, filled up with copies, in whole multiples of ``LANES`` unless records are
            so large that this would not fit. Then the last bits of a record's norm do not depend on who shares its
            batch. Otherwise a batch runs as it is, and they may (docs/soundness.md says why that is harmless).
        expected_records: how many records a batch has on average, as far as that is public; chunks of one shape are
            chosen by it. The size of an actual batch never decides: it is private.
        check: compare with plain autograd at the first batch.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> gradients = RecordGradients(nn.Linear(3, 2), nn.CrossEntropyLoss())
        >>> batch = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
        >>> clipped = gradients(batch, lambda norms, _: (0.1 / norms).clamp(max=1.0))
        >>> clipped.norms.shape, clipped.sums["weight"].shape
        (torch.Size([5]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None = None,
        *,
        objective: Objective | None = None,
        rows_per_record: int = 1,
        chunk: int | None = None,
        fixed_shape: bool = False,
        expected_records: int = LARGEST_CHUNK,
        check: bool = True,
    ) -> None:
        if loss is not None and objective is None:
            objective = objective_of(loss)
        elif loss is not None or objective is None:
            raise InputError("Exactly one of loss and objective is required.")
        self._recorder = Recorder(checked_model(module), objective, rows_per_record, check)
        self._given_chunk, self._expected_records = chunk, expected_records
        self.fixed_shape = fixed_shape
        self._chunk: int | None = None
        self._batch_shaped: bool | None = None
        self._spare: Batch | None = None
        self.parameters = self._recorder.parameters
        if not self.parameters:
            raise InputError("No parameter of the module requires a gradient: nothing to train.")

    @property
    def ranks(self) -> Group:
        """The processes that hold the slices of a sharded model; of any other this one alone."""
        return self._recorder.sharding.ranks

    @property
    def sharded_sums(self) -> ShardedSums | None:
        """How sums of a sharded model lie on these processes; None of any other."""
        return self._recorder.sharding.sums

    def record(self, batch: Batch, present: Tensor | None = None) -> Tape:
        """One forward and one backward pass over at least one record, all at once.

        Args:
            batch: the records; they are not padded to a chunk.
            present: ``[records, rows_per_record]``; False marks rows that only fill up a record.
        """
        return self._recorder.record(batch, present)

    def __call__(self, batch: Batch, weigh: Weigh, present: Tensor | None = None) -> Gradients:
        """Norms of all records, and the sum of their gradients with weights made from the norms.

        Args:
            batch: any number of records, none included.
            weigh: given norms and indices of some records, their weights. Called once a chunk.
            present: ``[records, rows_per_record]``; False marks rows that only fill up a record.

        Returns:
            Norms and sums. A record whose norm is not finite has weight zero whatever ``weigh``
            says: it contributes nothing.
        """
        norms = [torch.zeros(0, dtype=torch.float64, device=batches.device(batch))]
        sums: dict[str, Tensor] = {}
        first = 0
        for tape in self.tapes(batch, present):
            own = tape.norms()
            places = torch.arange(first, first + len(own), device=own.device)
            weights = torch.where(own.isfinite(), weigh(own, places).to(own), 0.0)
            sums = _added(sums, tape.weighted_sum(weights))
            norms.append(own)
            first += len(own)
        if not sums:
            sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        return Gradients(torch.cat(norms), sums)

    def tapes(self, batch: Batch, present: Tensor | None = None) -> Iterator[Tape]:
        """One forward and one backward pass for each chunk of a batch of any size, none included.

        Where memory runs out, chunks are halved, for good, and the same records run again.

        Args:
            batch: the records.
            present: ``[records, rows_per_record]``; False marks rows that only fill up a record.
        """
        records, start = batches.records(batch, self._recorder.rows_per_record), 0
        ranks = self.ranks
        if ranks.size > 1:
            self._prepare_together(batch)
        while ranks.any(start < records):
            if start == records:
                yield self._recorder.record(self.blank(batch), None, 0)
                continue
            most, left = self.chunk(batch), records - start
            size = most if self.fixed_shape else math.ceil(left / math.ceil(left / most))
            generators = torch.get_rng_state()
            try:
                tape = self._chunk_tape(batch, present, start, size, min(size, left))
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                if ranks.size > 1:
                    raise InputError(_TOO_LARGE.format(size)) from error
                if size == 1:
                    raise
                self._chunk = size // 2
                torch.set_rng_state(generators)
                continue
            yield tape
            start += tape.records

    def _chunk_tape(
        self, batch: Batch, present: Tensor | None, start: int, size: int, real: int
    ) -> Tape:
        """Of ``size`` records from ``start`` on; copies of the last stand for those after the first ``real``."""
        K = self._recorder.rows_per_record
        if real == size:
            chunk = batches.between(batch, start * K, (start + size) * K)
            shown = None if present is None else present[start : start + size]
            return self._recorder.record(chunk, shown)
        places = torch.arange(start, start + size, device=batches.device(batch))
        places = places.clamp(max=start + real - 1)
        chunk = batches.take(batch, batches.rows_of_records(places, K))
        shown = None if present is None else present[places]
        return self._recorder.record(chunk, shown, real)

    def _prepare_together(self, batch: Batch) -> int | None:
        """Plan on all ranks, if one has to; how many of the records that this one runs count (None: all)."""
        K = self._recorder.rows_per_record
        if batches.records(batch, K):
            if self._spare is None:
                self._spare = batches.apply(lambda tensor: tensor[:K].clone(), batch)
            self._recorder.prepare(batch)
            return None
        self._recorder.prepare(self.blank(batch), 0)
        return 0

    def blank(self, batch: Batch) -> Batch:
        """What a rank without records runs while another has some: one that it had earlier, or zeros.

        It weighs nothing.
        """
        K = self._recorder.rows_per_record

        def zeros(tensor: Tensor) -> Tensor:
            return tensor.new_zeros([K, *(size or 1 for size in tensor.shape[1:])])

        return batches.apply(zeros, batch) if self._spare is None else self._spare

    def chunk(self, batch: Batch) -> int:
        """How many records run at once, at most: fixed by the model, the sizes of one record and the machine."""
        if self._chunk is None:
            if self.ranks.size == 1:
                self._recorder.prepare(batch)
            fitting = self._budget(batches.device(batch)) // max(1, self._recorder.bytes_per_record)
            most = LARGEST_CHUNK if batches.device(batch).type == "cpu" else fitting
            wanted = self._given_chunk or max(1, min(fitting, most))
            self._chunk = self._of_one_shape(wanted, fitting) if self.fixed_shape else wanted
        return self._chunk

    def _of_one_shape(self, wanted: int, fitting: int) -> int:
        """Whole lanes, where they fit: rounded up if the size was given, else down to a part of what is expected."""
        if self._given_chunk is None:
            wanted = max(
                LANES, min(wanted, self._expected_records // SHARE_OF_DRAW) // LANES * LANES
            )
        whole_lanes = LANES * -(-wanted // LANES)
        power_of_two = 1 << max(0, fitting.bit_length() - 1)
        return whole_lanes if whole_lanes <= fitting else self._given_chunk or power_of_two

    def _budget(self, device: torch.device) -> int:
        """Bytes that the activations of a chunk may take."""
        if device.type != "cpu":
            free: int = torch.get_device_module(device).mem_get_info(device)[0]
            return free // 2
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE_OF_MEMORY
        return max(CHUNK_BYTES, min(memory, PARAMETERS_WORTH * self._recorder.parameter_bytes))

    def batch_shaped(self, batch: Batch) -> bool:
        """Whether the last bits of a record's norm may depend on who shares its batch.

        With chunks of one shape they do where sizes inside the model follow the batch (packed sequences), and where a
        kernel rounds records differently by their place. The latter is tried out, once, on a chunk of these records
        in several orders.
        """
        if not self.fixed_shape:
            return True
        if self._batch_shaped is None:
            ranks, K, real = self.ranks, self._recorder.rows_per_record, None
            if ranks.size > 1:
                real = self._prepare_together(batch)
            batch = self.blank(batch) if real == 0 else batch
            size = self.chunk(batch) if real is None else 1
            places = torch.arange(size, device=batches.device(batch)) % batches.records(batch, K)
            chunk = batches.take(batch, batches.rows_of_records(places, K))
            follows_values = ranks.any(self._recorder.batch_shaped)
            self._batch_shaped = follows_values or self._recorder.depends_on_place(chunk, real)
        return self._batch_shaped

    def gradients_agree(self, pairs: Iterable[tuple[Batch, Batch]], like: Batch) -> bool:
        """Whether both batches of every pair have one gradient: the same rows, say, padded otherwise.

        Args:
            pairs: as many as this rank has; all ranks ask together, and have one answer.
            like: any batch of the same kind, without records too.
        """
        left = list(pairs)
        while self.ranks.any(bool(left)):
            one, other = left.pop(0) if left else (self.blank(like), self.blank(like))
            if not self._recorder.gradients_agree(one, other):
                return False
        return True


def _out_of_memory(error: RuntimeError) -> bool:
    """Devices have an error of their own; the CPU's says so in words."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def _added(total: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Chunks are added up in float64; the sum of a single one stays as it is."""
    if not total:
        return more
    return {name: total[name].double().add_(value) for name, value in more.items()}


_TOO_LARGE = (
    "The records that run at once must fit into the memory of every rank; {} did not. A rank of a sharded model cannot "
    "run them again alone: the others wait for it. Give a smaller chunk=. Nothing was released."
)
