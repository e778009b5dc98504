"""Canaries that are inputs: copies of records with a wrong label, found by the released model's losses alone.

Nothing of training is seen, so this shows far less than canaries whose gradients are given: a bound of 0 is usual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from dpis import batches
from dpis.auditing.canaries import Canaries
from dpis.auditing.scores import Scored
from dpis.errors import InputError
from dpis.gradients.losses import Objective, objective_of
from dpis.group import Group
from dpis.mechanism import Journal, Mechanism, RunPlan
from dpis.randomness import Key
from dpis.training import Task

_ROWS = 512


class MislabelledCanaries(Canaries):
    """So many copies of records with a wrong label, each planted by a fair coin.

    Args:
        count: ``m``.
        key: tosses the coins and chooses the labels.
    """

    attack = "black-box"

    def __init__(self, count: int, key: Key | None = None) -> None:
        super().__init__(count)
        self._key = Key.fresh() if key is None else key
        self._inside = self._key.stream("audit-canaries", 0).uniforms(count) < 0.5
        self._task: Task | None = None
        self._batch: tuple[Tensor, Tensor, Tensor] | None = None

    def prepare(self, task: Task) -> None:
        """Plant the canaries behind the task's records."""
        records = task.records
        if records.user_ids is not None or records.rows_per_record != 1:
            raise InputError("mislabelled canaries are single rows: audit without users and views")
        dataset = records.dataset
        if len(records) < self.count:
            raise InputError(
                f"mislabelled canaries are copies of records: {len(records):,} were found, {self.count:,} asked for"
            )
        items = [dataset[index] for index in range(self.count)]
        if not all(len(item) == 2 and isinstance(item[0], Tensor) for item in items):
            raise InputError("mislabelled canaries need records of the form (input, class)")
        inputs = torch.stack([item[0] for item in items])
        labels = torch.as_tensor([int(item[1]) for item in items])
        with torch.no_grad():
            classes = task.model(inputs[:1].to(records.device)).shape[-1]
        turned = self._key.stream("audit-labels", 0).uniforms(self.count) * (classes - 1)
        wrong = (labels + 1 + torch.from_numpy(turned.astype(np.int64))) % classes
        self._task, self._batch = task, (inputs, labels, wrong)
        inside = torch.from_numpy(self._inside)
        planted = TensorDataset(inputs[inside], wrong[inside])
        task.records = replace(records, dataset=_joined(dataset, planted))

    def __call__(
        self,
        plan: RunPlan,
        population: int,
        key: Key,
        journal: Journal,
        *,
        ahead: bool = True,
        group: Group | None = None,
    ) -> Mechanism:
        """A mechanism as any other: these canaries are records of the dataset."""
        self.fix_strategy(plan)
        self.mechanism = Mechanism(plan, population, key, journal, ahead=ahead, group=group)
        return self.mechanism

    @property
    def scored(self) -> Scored:
        """By how much likelier the model holds the wrong label, against the right one."""
        if self._task is None or self._batch is None:
            raise InputError("the canaries were planted in no run")
        inputs, labels, wrong = self._batch
        task = self._task
        objective = task.objective or objective_of(task.loss)  # type: ignore[arg-type]
        task.model.eval()
        scores = _losses(task, objective, inputs, labels) - _losses(task, objective, inputs, wrong)
        return Scored(scores[self._inside], scores[~self._inside])


def _losses(task: Task, objective: Objective, inputs: Tensor, labels: Tensor) -> Any:
    parts = []
    for start in range(0, len(inputs), _ROWS):
        rows = inputs[start : start + _ROWS], labels[start : start + _ROWS]
        on_device = batches.apply(lambda tensor: tensor.to(task.records.device), rows)
        with torch.no_grad():
            parts.append(objective(task.model, on_device).double().cpu())
    return torch.cat(parts).numpy()


def _joined(dataset: Dataset[Any], planted: TensorDataset) -> Dataset[Any]:
    """One dataset; of tensors, if it was of tensors."""
    if type(dataset) is not TensorDataset:
        return ConcatDataset([dataset, planted])
    pairs = zip(dataset.tensors, planted.tensors, strict=True)
    return TensorDataset(*(torch.cat([own, more.to(own)]) for own, more in pairs))
