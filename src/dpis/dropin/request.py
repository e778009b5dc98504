"""What an engine was asked for, under Opacus's names: refused where it is not honoured, and brought into our terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dpis.dropin.loader import batch_of, checked_loader
from dpis.errors import BatchOverProcessesWarning, InputError, PublicCountWarning
from dpis.group import current_group, warn
from dpis.mechanism import Config
from dpis.options import Method, NormSum, Privacy, knobs

GRAD_SAMPLE_MODES = ("hooks", "ghost", "functorch", "ew")
"""Opacus's names. Here there is one engine, at the price of the fastest of them; all names are taken."""

IN_OPACUS = {"epsilon": "target_epsilon", "delta": "target_delta", "clip_norm": "max_grad_norm"}
"""Options that have a name of Opacus's."""

ONLY_IN_TRAIN = ("release_n", "clip_ceiling", "clip_lowest", "clip_scale")
"""Options that need a release between the loop's own steps."""

DROP_LAST = "drop_last=True is ignored: batches have sizes of their own, and an epoch has floor(n_public / batch_size)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What `make_private` and `make_private_with_epsilon` have in common.

    Attributes:
        module: the model; must not couple records (`ModuleValidator.fix`).
        optimizer: over the model's parameters.
        data_loader: its batch size is ``b``; its dataset, collate function and workers are kept.
        max_grad_norm: the clip norm ``C``.
        privacy: options of the guarantee and of sampling.
        seed: repeatable randomness, for tests and research: nothing of it may be released.
        inputs_as_delivered: refuse inputs of the model that have shape and type of what the loader delivered, but
            other contents. False: the loop changes records, each by itself, and nobody checks.
        per_process: on several processes, the loader's batch size is that of each, not of the whole step.
        criterion: returned as it is with ``grad_sample_mode="ghost"``.
        batch_first: whether rows are the first dimension of tensors.
        loss_reduction: "mean" or "sum", of the loss in the loop.
        poisson_sampling: must be True.
        clipping: must be "flat".
        noise_generator: must be None: noise is cryptographic. ``seed`` makes a run repeatable.
        grad_sample_mode: any of Opacus's names.
        wrap_model: must be True.
        rand_on_empty: must be False: an empty batch comes as tensors of length zero, and its step is noise alone.

    Raises:
        InputError: what was asked for is not honoured, with what to do instead.
    """

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[Any]
    max_grad_norm: float | list[float]
    privacy: Privacy
    seed: int | None = None
    inputs_as_delivered: bool = True
    per_process: bool = False
    criterion: Any = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: Any = None
    grad_sample_mode: str = "hooks"
    wrap_model: bool = True
    rand_on_empty: bool = False

    @classmethod
    def of(cls, privacy: Privacy | None, options: Mapping[str, Any], **given: Any) -> Request:
        """From arguments of a call: ``options`` are fields of a request, or of `Privacy`."""
        words = {name: value for name, value in options.items() if name in knobs(Privacy)}
        own = {field.name for field in fields(cls)}
        if unknown := sorted(options.keys() - words.keys() - own):
            raise InputError(
                f"unknown arguments {', '.join(unknown)}: what is not honoured is refused. Leave them out"
            )
        for name in sorted(words.keys() & IN_OPACUS.keys()):
            raise InputError(f"{name} is called {IN_OPACUS[name]} here")
        rest = {name: value for name, value in options.items() if name in own}
        return cls(**given, **rest, privacy=(privacy or Privacy()).adding(**words))

    def __post_init__(self) -> None:
        for complaint in self._complaints():
            raise InputError(complaint)
        self.privacy.refuse_unused(self.method)

    @property
    def method(self) -> Method:
        """Of the mechanism."""
        return Method(self.privacy.method)

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
                f"clipped over all parameters together. Use clipping='flat' {self._instead_of_clipping()}"
            )
        if self.noise_generator is not None:
            yield (
                "noise_generator is not supported: noise from a torch generator can be predicted from its state. Leave "
                "it out; seed= makes a run repeatable, for research"
            )
        if not self.wrap_model:
            yield (
                "wrap_model=False is not supported: gradients of single records are only known of calls of the wrapped "
                "model, and one that is called past it would not be private. Use the module that make_private returns; "
                "it passes on all attributes, and module._module is the model itself, for evaluation and for saving"
            )
        if self.rand_on_empty:
            yield (
                "rand_on_empty=True is not supported: an empty batch is a step of noise alone, and comes as tensors of "
                "length zero. Leave it out"
            )
        if self.grad_sample_mode not in GRAD_SAMPLE_MODES:
            yield (
                f"grad_sample_mode must be one of {', '.join(GRAD_SAMPLE_MODES)}, found {self.grad_sample_mode!r}"
            )
        reduction = getattr(self.criterion, "reduction", self.loss_reduction)
        if self.loss_reduction not in ("mean", "sum"):
            yield f"loss_reduction must be mean or sum, found {self.loss_reduction!r}"
        if reduction != self.loss_reduction:
            yield (
                f"the criterion has reduction={reduction!r}, loss_reduction is {self.loss_reduction!r}: gradients "
                "would be scaled by the size of the batch, which is private. Give both the same"
            )
        if not self.method.private:
            yield f"method={self.method.value!r} is not private: train without an engine"
        for name in sorted(self.privacy.said.intersection(ONLY_IN_TRAIN)):
            yield (
                f"{name} is not supported in a loop of your own: it needs a release between its steps. Use dpis.train"
            )
        if "norm_sum" in self.privacy.said and self.privacy.norm_sum != NormSum.STALE:
            yield (
                "norm_sum='full-pass' is not supported in a loop of your own: only the loop passes over the records. "
                "Leave it out: norms are taken as last seen"
            )

    def _instead_of_clipping(self) -> str:
        """What comes closest, at the same noise."""
        if self.clipping == "adaptive":
            return (
                "with one max_grad_norm. A norm that follows the gradients is a release of its own: dpis.train pays "
                "for it with clip_norm='auto'; here a schedule that is fixed in advance may set it (dpis.schedulers)"
            )
        if isinstance(self.max_grad_norm, list | tuple):
            whole = math.hypot(*self.max_grad_norm)
            return f"with max_grad_norm={whole:.6g}, to which norms of the layers add up: noise is the same"
        return "with one max_grad_norm"

    def config(self, epochs: int, *, epsilon: float, delta: float) -> Config:
        """The mechanism's config. Warns if the number of records becomes public by it."""
        for name, value in (("target_epsilon", epsilon), ("target_delta", delta)):
            if value is None:
                raise InputError(f"{name} must be a number, found None")
        clip_norm = float(cast(float, self.max_grad_norm))
        return self._settled(epochs, epsilon=epsilon, delta=delta, clip_norm=clip_norm)

    def open_ended_config(self) -> Config:
        """The same without a horizon: no budget, no epochs for a schedule."""
        with_horizon = "Use make_private_with_epsilon"
        if not isinstance(self.privacy.kappa, int | float | None):
            raise InputError(
                f"kappa must be a number here, found {self.privacy.kappa!r}: without a horizon there are no epochs for "
                f"a schedule. {with_horizon}"
            )
        if self.method not in (Method.DPIS, Method.DP_SGD):
            raise InputError(f"{self.method} plans its noise for a horizon. {with_horizon}")
        for name in ("accountant", "delta", "epsilon"):
            if name in self.privacy.said:
                raise InputError(f"{name} has no effect where the noise is given. {with_horizon}")
        return self._settled(1, clip_norm=float(cast(float, self.max_grad_norm)))

    def _settled(self, epochs: int, **words: Any) -> Config:
        loader = checked_loader(self.data_loader)
        if self.privacy.n_public is None:
            warn(PublicCountWarning(), stacklevel=4)
        if loader.drop_last:
            warn(DROP_LAST, stacklevel=4)
        if self.method is Method.DPIS_ADAPTIVE:
            words["norm_sum"] = NormSum.STALE
        processes = current_group().size
        batch_size = batch_of(loader, processes, per_process=self.per_process)
        if processes > 1:
            replaced = isinstance(loader.sampler, DistributedSampler)
            sampler = type(loader.sampler).__name__ if replaced else None
            warn(BatchOverProcessesWarning(batch_size, processes, sampler), stacklevel=4)
        return Config.settle(
            self.privacy.adding(**words),
            records=len(cast(Any, loader.dataset)),
            batch_size=batch_size,
            epochs=epochs,
        )
