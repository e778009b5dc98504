"""``RecordGradients``: norms and weighted sums for batches of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpis import batches
from dpis.batches import Batch
from dpis.coupling.forbidden_layers import checked_model
from dpis.errors import InputError
from dpis.gradients.losses import Loss, Objective, objective_of
from dpis.gradients.recorder import Recorder
from dpis.gradients.tape import Tape

# Chooses the weights of records from their norms and their indices in the batch.
Weigh = Callable[[Tensor, Tensor], Tensor]

# What the activations of one chunk may take: larger chunks fall out of the caches.
CHUNK_BYTES = 64 << 20
LARGEST_CHUNK = 512
# Below so much to fill a chunk up costs less than a second pass: nearly every batch should fit one.
CHEAP_BYTES = 1 << 20
# Vector kernels treat the entries that do not fill their last vectors by other code, which rounds differently. With
# whole vectors of records there are none, in whatever order records and features lie.
LANES = 64 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 32
# Where nothing is said of how many records to expect: small batches are not padded beyond measure.
USUAL_CHUNK = 128


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
        chunk: how many records run at once; None: as many as fit the caches. Batches are padded to
            whole chunks, so that a record's norm does not depend on who shares its batch. For the same reason
            chunks are whole multiples of ``LANES``, unless records are so large that this would not fit.
        expected_records: how many records a batch has on average, as far as that is public; no
            larger chunk is chosen. The size of an actual batch never decides: it is private.
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
        expected_records: int = USUAL_CHUNK,
        check: bool = True,
    ) -> None:
        if loss is not None and objective is None:
            objective = objective_of(loss)
        elif loss is not None or objective is None:
            raise InputError("Exactly one of loss and objective is required.")
        self._recorder = Recorder(checked_model(module), objective, rows_per_record, check)
        self._given_chunk, self._expected_records = chunk, expected_records
        self._chunk: int | None = None
        self._batch_shaped: bool | None = None
        self.parameters = self._recorder.parameters
        if not self.parameters:
            raise InputError("No parameter of the module requires a gradient: nothing to train.")

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

        Chunks all have one shape: the last is filled up with copies, which get no weight.

        Args:
            batch: the records.
            present: ``[records, rows_per_record]``; False marks rows that only fill up a record.
        """
        K = self._recorder.rows_per_record
        records = batches.records(batch, K)
        size = self.chunk(batch) if records else 1
        for start in range(0, records, size):
            real = min(size, records - start)
            if real == size:
                chunk = batches.between(batch, start * K, (start + size) * K)
                shown = None if present is None else present[start : start + size]
            else:
                places = torch.arange(start, start + size, device=batches.device(batch))
                places = places.clamp(max=records - 1)
                chunk = batches.take(batch, batches.rows_of_records(places, K))
                shown = None if present is None else present[places]
            yield self._recorder.record(chunk, shown, real if real < size else None)

    def chunk(self, batch: Batch) -> int:
        """How many records run at once: fixed by the model and the sizes of one record."""
        if self._chunk is None:
            self._recorder.prepare(batch)
            bytes_per_record = max(1, self._recorder.bytes_per_record)
            fitting = CHUNK_BYTES // bytes_per_record
            usual = min(LARGEST_CHUNK, self._expected_records)
            most = min(LARGEST_CHUNK, usual + math.ceil(4 * math.sqrt(usual)))  # of Poisson draws
            wanted = self._given_chunk or (most if most * bytes_per_record < CHEAP_BYTES else usual)
            whole_lanes = LANES * -(-wanted // LANES)
            power_of_two = 1 << max(0, fitting.bit_length() - 1)
            self._chunk = (
                whole_lanes if whole_lanes <= fitting else self._given_chunk or power_of_two
            )
        return self._chunk

    def batch_shaped(self, batch: Batch) -> bool:
        """Whether the last bits of a record's norm may depend on who shares its batch.

        They do where sizes inside the model follow the batch (packed sequences), and where a kernel rounds records
        differently by their place. The latter is tried out, once, on a chunk of these records in several orders.
        """
        if self._batch_shaped is None:
            size, K = self.chunk(batch), self._recorder.rows_per_record
            places = torch.arange(size, device=batches.device(batch)) % batches.records(batch, K)
            chunk = batches.take(batch, batches.rows_of_records(places, K))
            follows_values = self._recorder.batch_shaped
            self._batch_shaped = follows_values or self._recorder.depends_on_place(chunk)
        return self._batch_shaped

    def gradients_agree(self, one: Batch, other: Batch) -> bool:
        """Whether two batches have one gradient, by plain autograd: the same rows, say, padded otherwise."""
        return self._recorder.gradients_agree(one, other)


def _added(total: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Chunks are added up in float64; the sum of a single one stays as it is."""
    if not total:
        return more
    return {name: total[name].double().add_(value) for name, value in more.items()}
