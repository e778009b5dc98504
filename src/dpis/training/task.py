"""What is trained, on what, and how: everything that is not privacy, checked before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpis.coupling.forbidden_layers import checked_model
from dpis.coupling.shared_rows import refuse_rows_named_twice, share_rows
from dpis.errors import InputError
from dpis.gradients.losses import Loss, Objective
from dpis.training.averaging import WeightAverage
from dpis.training.evaluation import HeldOut, Metric
from dpis.training.model_file import ModelCard
from dpis.training.records import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Stop once a held-out metric has not improved for some epochs. The claim stays that of the whole plan.

    Attributes:
        metric: its name among the held-out metrics. Held-out data is not protected; training values may not decide.
        patience: how many epochs without improvement.
        larger_is_better: of the metric.
    """

    metric: str = "accuracy"
    patience: int = 5
    larger_is_better: bool = True


@dataclass(kw_only=True)
class Task:
    """What is trained, on what, and how: everything that is not privacy.

    Attributes:
        model: the module. Layers of it that were put in evaluation mode one by one stay so.
        records: what is protected.
        loss: ``loss(output, target)``.
        objective: instead of ``loss``, see `RecordGradients`.
        optimizer: any of ``torch.optim`` that steps without a closure.
        scheduler: of its learning rate.
        scheduler_interval: "epoch" or "step": how often the scheduler steps.
        held_out: what the model is measured on.
        average: a moving average of the weights, released in place of them.
        early_stop: when to stop before the plan's end.
        physical_batch: how many records run at once; None: as many as fit the caches.
        card: what is stored beside the weights.
    """

    model: nn.Module
    records: Records
    optimizer: Optimizer
    loss: Loss | None = None
    objective: Objective | None = None
    scheduler: LRScheduler | ReduceLROnPlateau | None = None
    scheduler_interval: str = "epoch"
    held_out: HeldOut | None = None
    average: WeightAverage | None = None
    early_stop: EarlyStop | None = None
    physical_batch: int | None = None
    card: ModelCard | None = None

    def __post_init__(self) -> None:
        self.model = checked_model(self.model)
        if (self.loss is None) == (self.objective is None):
            raise InputError("exactly one of loss and objective is required")
        self._check_optimizer()
        self._check_scheduler()
        if self.records.user_ids is None:
            refuse_rows_named_twice(self.records.dataset)
        if self.held_out is not None and share_rows(self.held_out.dataset, self.records.dataset):
            raise InputError(
                "held_out is the training data, or has rows of it: its accuracy would be a private value, published "
                "without noise. Give other records, or none"
            )
        stop = self.early_stop
        if stop is not None and (self._nothing_held_out or stop.metric not in self._metrics):
            raise InputError(f"early stop needs held-out data with the metric {stop.metric!r}")

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise InputError(
                "LBFGS asks for several gradients a step, and each would have to be paid for: use another optimizer"
            )
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trained = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        for missing in trained.keys() - stepped:
            raise InputError(
                f"the optimizer does not step {trained[missing]}: give it all trainable parameters of this model, "
                "or set requires_grad=False on those that shall not train"
            )
        if stepped - trained.keys():
            raise InputError(
                "the optimizer steps parameters that are not trainable parameters of this model: "
                "they would get no noise and no gradient. Make the optimizer from this model's parameters"
            )

    def _check_scheduler(self) -> None:
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self._nothing_held_out or not self._metrics:
            raise InputError(
                "ReduceLROnPlateau needs a metric on held-out data: the training loss is private, a learning rate "
                "that follows it would leak. Give held_out="
            )
        if self.scheduler_interval == "step":
            raise InputError(
                "ReduceLROnPlateau steps once an epoch, when held-out data was measured: leave scheduler_interval out"
            )

    @property
    def _metrics(self) -> Mapping[str, Metric]:
        return {} if self.held_out is None else self.held_out.metrics

    @property
    def _nothing_held_out(self) -> bool:
        dataset = None if self.held_out is None else self.held_out.dataset
        return dataset is None or (isinstance(dataset, Sized) and len(dataset) == 0)
