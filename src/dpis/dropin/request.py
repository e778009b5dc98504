"""What an engine was asked for, under Opacus's names: refused where it is not honoured, and brought into our terms."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.dropin.loader import checked_loader
from dpis.errors import InputError, PublicCountWarning
from dpis.mechanism import Config
from dpis.options import Method, NormSum, Privacy

GRAD_SAMPLE_MODES = ("hooks", "ghost", "functorch", "ew")
"""Opacus's names. Here there is one engine, at the price of the fastest of them; all names are taken."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The arguments that `make_private` and `make_private_with_epsilon` share, as they say them.

    Raises:
        InputError: what was asked for is not honoured, with what to do instead.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    data_loader: DataLoader[Any]
    max_grad_norm: float | list[float]
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    sampling: str
    mode: str
    k: float
    kappa: float | str
    n_public: int | None
    seed: int | None
    inputs_as_delivered: bool
    unknown: Mapping[str, Any]

    def __post_init__(self) -> None:
        for complaint in self._complaints():
            raise InputError(complaint)

    def _complaints(self) -> Iterator[str]:
        """What is asked for and not honoured, with its consequence and what to do."""
        if not self.poisson_sampling:
            yield (
                "poisson_sampling=False is not supported: shuffled batches have no amplification that this engine "
                "could account for, and epsilon would be wrong. Leave it out"
            )
        if self.clipping != "flat" or isinstance(self.max_grad_norm, list | tuple):
            yield (
                f"clipping={self.clipping!r} with max_grad_norm={self.max_grad_norm!r} is not supported: gradients are "
                "clipped over all parameters together. Use clipping='flat' with one max_grad_norm; for a clip norm "
                "that adapts see dpis.train(clipping=...)"
            )
        if self.noise_generator is not None:
            yield (
                "noise_generator is not supported: noise from a torch generator can be predicted from its state. Leave "
                "it out; seed= makes a run repeatable, for research"
            )
        if not self.wrap_model:
            yield (
                "wrap_model=False is not supported: gradients of single records are only known of the wrapped model. "
                "Use the module that make_private returns"
            )
        if self.rand_on_empty:
            yield (
                "rand_on_empty=True is not supported: an empty batch is a step of noise alone, and comes as tensors of "
                "length zero. Leave it out"
            )
        if self.grad_sample_mode not in GRAD_SAMPLE_MODES:
            yield (
                f"grad_sample_mode must be one of {', '.join(GRAD_SAMPLE_MODES)}, found {self.grad_sample_mode!r}: "
                "training in several processes is not supported"
            )
        reduction = getattr(self.criterion, "reduction", self.loss_reduction)
        if self.loss_reduction not in ("mean", "sum"):
            yield f"loss_reduction must be mean or sum, found {self.loss_reduction!r}"
        if reduction != self.loss_reduction:
            yield (
                f"the criterion has reduction={reduction!r}, loss_reduction is {self.loss_reduction!r}: gradients "
                "would be scaled by the size of the batch, which is private. Give both the same"
            )
        if self.unknown:
            named = ", ".join(sorted(self.unknown))
            yield f"unknown arguments {named}: what is not honoured is refused. Leave them out"
        if self.sampling not in ("importance", "uniform"):
            yield f"sampling must be importance or uniform, found {self.sampling!r}"
        modes = ("predeclared", "adaptive") if self.sampling == "importance" else ("predeclared",)
        if self.mode not in modes:
            yield f"mode must be predeclared, or with importance sampling adaptive, found {self.mode!r}"

    def config(self, *, epochs: int, epsilon: float = 1.0, delta: float = 1e-5) -> Config:
        """The mechanism's config. Warns if the number of records becomes public by it."""
        loader, n_public = checked_loader(self.data_loader), self.n_public
        records = len(cast(Any, loader.dataset))
        if n_public is None:
            warnings.warn(PublicCountWarning(), stacklevel=3)
        assert loader.batch_size is not None
        adaptive = self.mode == "adaptive"
        by_importance = Method.DPIS_ADAPTIVE if adaptive else Method.DPIS
        privacy = Privacy(
            method=by_importance if self.sampling == "importance" else Method.DP_SGD,
            epsilon=epsilon,
            delta=delta,
            n_public=n_public,
            kappa=None if adaptive and self.kappa == 1 else self.kappa,
            headroom=self.k,
            clip_norm=float(cast(float, self.max_grad_norm)),
            norm_sum=NormSum.STALE,
        )
        return Config.settle(privacy, records=records, batch_size=loader.batch_size, epochs=epochs)
