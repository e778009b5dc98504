"""``dpis.audit``: train under attack, and say what leaked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dpis.auditing.black_box import MislabelledCanaries
from dpis.auditing.canaries import Canaries
from dpis.auditing.findings import Findings
from dpis.gradients.losses import Loss
from dpis.training.api import train_under


def audit(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Loss | None = None,
    *,
    canaries: int = 1000,
    black_box: bool = False,
    out: str | Path | None = None,
    **options: Any,
) -> Findings:
    """Train as `dpis.train` would, with canaries among the records, and bound epsilon from below.

    The run is marked as not for release: canaries cost accuracy, and whoever planted them can find them.

    Args:
        model: trained in place.
        dataset: as for `dpis.train`.
        loss: as for `dpis.train`.
        canaries: how many; each takes part by a fair coin.
        black_box: canaries are records with a wrong label, found by the losses of the released model: shows far less.
        out: the run's folder; by default none is kept.
        options: of `dpis.train`.

    Example:
        >>> import dpis, torch
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
        >>> found = dpis.audit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), canaries=10, epsilon=2.0, epochs=1,
        ...                    batch_size=50, n_public=200, seed=1)
        >>> found.bound <= found.epsilon, found.refuted
        (True, False)
    """
    planted = MislabelledCanaries(canaries) if black_box else Canaries(canaries)
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            train_under(planted, model, dataset, loss, out=Path(folder) / "run", **options)
            return planted.findings()
    result = train_under(planted, model, dataset, loss, out=out, **options)
    return planted.written(result.folder)
