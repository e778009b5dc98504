"""Records as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.files.preprocessing import FilePreprocessing, confirmed_public
from dpis.files.targets import ClassTarget, Task


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Records as tensors, with the preprocessing that made them."""

    features: torch.Tensor
    """float32, ``[N, ...]``."""

    targets: torch.Tensor
    """int64 labels or float32 numbers in ``[-1, 1]``, ``[N]``."""

    preprocessing: FilePreprocessing
    user_ids: NDArray[np.int64] | None
    """``[N]``, users numbered from 0 in order of first appearance."""

    @property
    def task(self) -> Task:
        """Classification or regression."""
        return self.preprocessing.target.task

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Their names, in the order of labels and outputs."""
        target = self.preprocessing.target
        return target.classes if isinstance(target, ClassTarget) else None

    @property
    def public_by_confirmation(self) -> tuple[str, ...]:
        """What was read from the data on the user's word that it is public; a summary must say so."""
        columns = getattr(self.preprocessing, "columns", ())
        return confirmed_public(columns, self.preprocessing.target)
