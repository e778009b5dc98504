"""``dpis.train``: the whole job in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from dpis.batches import tensors_of
from dpis.coupling.forbidden_layers import checked_model
from dpis.errors import InputError, PublicCountWarning
from dpis.features.augment import Augmentation
from dpis.gradients.losses import Loss
from dpis.group import Group, current_group, share_weights, warn
from dpis.mechanism import Config, Journal, Mechanism, RunPlan
from dpis.mechanism.secret_state import shared_key
from dpis.options import Method, Privacy, Training
from dpis.randomness import Key
from dpis.runs.folder import next_run_folder
from dpis.training.averaging import WeightAverage
from dpis.training.evaluation import METRICS, HeldOut, Metric, correct, require_numbers
from dpis.training.progress import ProgressBar, Reporter, Silent
from dpis.training.records import Records
from dpis.training.result import Result
from dpis.training.run import Run, RunOptions
from dpis.training.task import Task
from dpis.training.trainer import Trainer

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]

LEARNING_RATE = 0.1
"""Where none is given."""


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Loss | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    n_public: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    privacy: Privacy | None = None,
    training: Training | None = None,
    held_out: Dataset[Any] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> Result:
    """Train a model under differential privacy, write its files, and say what is guaranteed.

    Every release of the run is in ``ledger.jsonl`` before it is used; ``dpis verify`` checks the claim from that
    file alone. Killed at any moment, the run goes on by the same call with ``resume=True``.

    Args:
        model: trained in place. It must not couple records (`dpis.fix` replaces batch normalisation).
        dataset: map-style, one record an item: ``(input, ..., target)``.
        loss: ``loss(output, target)``, a mean or a sum over records, or one value a row.
        epsilon: as in `Privacy`.
        delta: as in `Privacy`.
        n_public: as in `Privacy`.
        epochs: as in `Training`.
        batch_size: as in `Training`.
        lr: as in `Training`.
        privacy: all options of the guarantee and of sampling.
        training: all options of optimisation and of how records are read.
        held_out: measured once before training, to try the metrics, and after every epoch; not protected.
        seed: repeatable randomness for tests and research; marks the run as not for release.
        out: the run's folder, new or empty; default ``runs/1``, ``runs/2``, …
        resume: go on with the interrupted run in ``out``.

    Returns:
        The claim, the held-out metrics, and where the files are.

    Example:
        >>> import dpis
        >>> from torch.utils.data import TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> data = TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
        >>> result = dpis.train(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), epsilon=2.0, epochs=2, batch_size=50,
        ...                     n_public=200, privacy=dpis.Privacy(headroom=3.0), out=getfixture("tmp_path") / "run")
        >>> result.claim
        Budget(epsilon=2.0, delta=1e-05)
    """
    return train_under(
        None,
        model,
        dataset,
        loss,
        epsilon=epsilon,
        delta=delta,
        n_public=n_public,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        privacy=privacy,
        training=training,
        held_out=held_out,
        seed=seed,
        out=out,
        resume=resume,
    )


class Audit(Protocol):
    """Makes the mechanism that a run is audited under, and may plant records in its task before."""

    def prepare(self, task: Task) -> None:
        """Before the run is opened."""
        ...

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
        """As `Mechanism` is called."""
        ...


def train_under(
    audit: Audit | None,
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Loss | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    n_public: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    privacy: Privacy | None = None,
    training: Training | None = None,
    held_out: Dataset[Any] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> Result:
    """As `train`, under an audit if one is given."""
    group = current_group()
    with group.together():
        privacy = (privacy or Privacy()).adding(epsilon=epsilon, delta=delta, n_public=n_public)
        privacy.refuse_unused(Method.parse(privacy.method))
        training = (training or Training()).adding(epochs=epochs, batch_size=batch_size, lr=lr)
        if training.check_data and not resume:
            raise InputError(
                "check_data compares data with that of an interrupted run: give resume=True too"
            )
        device = to_device(training.device)
        model = checked_model(model).to(device)
        records = _records(dataset, training, device, group)
        config = Config.settle(
            privacy, records=len(records), batch_size=training.batch_size, epochs=training.epochs
        )
        optimizer = _optimizer(training, model)
        measured = _held_out(held_out, training, loss)
    if privacy.n_public is None and config.method.private and not resume:
        warn(PublicCountWarning(), stacklevel=3)
    with group.stopping():
        share_weights(model, group)
        task = Task(
            model=model,
            records=records,
            loss=loss,
            objective=training.objective,
            optimizer=optimizer,
            scheduler=None if training.scheduler is None else training.scheduler(optimizer),
            scheduler_interval=training.scheduler_interval,
            held_out=measured,
            average=WeightAverage(model, training.ema) if training.ema else None,
            early_stop=training.early_stop,
            physical_batch=training.physical_batch,
        )
        if audit is not None:
            audit.prepare(task)
        run = _open(out, resume, config, task.records, seed, training.diagnostics, group, audit)
        return Trainer(
            run,
            task,
            reporter=_reporter(training.progress),
            keep_checkpoint=training.keep_checkpoint,
            check_data=training.check_data,
        ).train()


def _reporter(progress: Reporter | bool) -> Reporter:
    if not isinstance(progress, bool):
        return progress
    return ProgressBar() if progress else Silent()


def _records(
    dataset: Dataset[Any], training: Training, device: torch.device, group: Group
) -> Records:
    by_user = training.user_ids is not None or "max_rows_per_user" in training.said
    augment = training.augment
    return Records(
        dataset,
        collate_fn=training.collate_fn or default_collate,
        user_ids=training.user_ids,
        max_rows_per_user=training.max_rows_per_user if by_user else 1,
        views=training.views,
        augment=Augmentation(augment) if isinstance(augment, str) else augment,
        augmentations=training.augmentations,
        batch_shaped=training.batch_shaped,
        device=device,
        rank=group.rank,
    )


def to_device(name: str | torch.device) -> torch.device:
    """A device by name; ``auto`` is a GPU of CUDA if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).cpu()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used: {reason}") from None
    return device


def _open(
    out: str | Path | None,
    resume: bool,
    config: Config,
    records: Records,
    seed: int | None,
    diagnostics: bool,
    group: Group,
    audit: Audit | None,
) -> Run:
    if resume:
        if out is None:
            raise InputError("resume=True needs out=, the folder of the interrupted run")
        run = Run.resume(Path(out), len(records), group)
        changed = _differences(run.config, config)
        if seed not in (None, run.key.seed):
            changed.append(f"seed: {run.key.seed!r}, now {seed!r}")
        if diagnostics and not run.options.diagnostics:
            changed.append("diagnostics: False, now True")
        if changed:
            run.close()
            raise InputError(
                f"cannot resume {out}: it was started with other settings ({', '.join(changed)})"
            )
        return run
    options = RunOptions(
        diagnostics=diagnostics,
        batch_shaped=records.batch_shaped,
        user_level=records.user_ids is not None,
        audited=audit is not None,
    )
    path = group.from_first(lambda: next_run_folder(Path("runs")) if out is None else Path(out))
    return Run.start(
        path, config, len(records), shared_key(seed, group), options, group, audit or Mechanism
    )


def _differences(before: Config, now: Config) -> list[str]:
    values = {one.name: (getattr(before, one.name), getattr(now, one.name)) for one in fields(now)}
    return [f"{name}: {old!r}, now {new!r}" for name, (old, new) in values.items() if old != new]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
}


def _optimizer(training: Training, model: nn.Module) -> Optimizer:
    given, trained = training.optimizer, [p for p in model.parameters() if p.requires_grad]
    if not isinstance(given, str) and "lr" in training.said:
        raise InputError(
            "lr is of a named optimizer: give it to the optimizer, and leave it out here"
        )
    if isinstance(given, Optimizer):
        return given
    if not isinstance(given, str):
        made: Optimizer = given(trained)
        return made
    return OPTIMIZERS[given](trained, LEARNING_RATE if training.lr is None else training.lr)


def _held_out(
    dataset: Dataset[Any] | None, training: Training, loss: Loss | None
) -> HeldOut | None:
    if dataset is None:
        return None
    metrics = _metrics_for(loss) if training.metrics is None else training.metrics
    require_numbers(tensors_of(dataset))  # others when they are measured
    collate = training.collate_fn
    return HeldOut(dataset, metrics, None if collate is default_collate else collate)


def _metrics_for(loss: Loss | None) -> Mapping[str, Metric]:
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return {"accuracy": partial(correct, ignored=loss.ignore_index)}
    if loss is functional.cross_entropy:
        return {"accuracy": METRICS["accuracy"]}
    if isinstance(loss, nn.MSELoss) or loss is functional.mse_loss:
        return {"squared_error": METRICS["squared_error"]}
    raise InputError(
        "how to measure held-out data does not show from this loss: give metrics={name: metric(output, target)}, "
        "with one value a row"
    )
