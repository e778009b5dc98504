"""``dpis.train``: the whole job in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset, default_collate

from dpis import defaults
from dpis.accounting import Accountant, CountSource
from dpis.batches import tensors_of
from dpis.coupling.forbidden_layers import checked_model
from dpis.coupling.items import Collate
from dpis.errors import InputError
from dpis.gradients.losses import Loss, Objective
from dpis.mechanism import AdaptiveClipping, Config, Contribution, Method, NormSum
from dpis.randomness import Key
from dpis.runs.folder import next_run_folder
from dpis.training.averaging import WeightAverage
from dpis.training.evaluation import METRICS, HeldOut, Metric, correct, require_numbers
from dpis.training.progress import ProgressBar, Reporter, Silent
from dpis.training.records import Augment, Records
from dpis.training.result import Result
from dpis.training.run import Run, RunOptions
from dpis.training.task import EarlyStop, Task
from dpis.training.trainer import Trainer

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]


class PublicCountWarning(UserWarning):
    """The number of records was read from the data set, so it is treated as public."""


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Loss | None = None,
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    method: str = "dpis",
    epochs: int = 10,
    batch_size: int = 256,
    kappa: float | str | Sequence[float] | None = None,
    equivalent_batch: float | None = None,
    headroom: float = defaults.HEADROOM,
    floor: float = 0.05,
    contribution: str = "weight",
    clip_norm: float = 1.0,
    clipping: AdaptiveClipping | None = None,
    a_e: float = defaults.A_E,
    pi_cap: float = 0.5,
    norm_sum: str = "full-pass",
    decay_rate: float = 0.005,
    accountant: str = "pld",
    n_public: int | None = None,
    release_n: bool = False,
    objective: Objective | None = None,
    optimizer: str | Optimizer | MakeOptimizer = "sgd",
    lr: float = 0.1,
    scheduler: MakeScheduler | None = None,
    scheduler_interval: str = "epoch",
    ema: float | None = None,
    collate_fn: Collate = default_collate,
    user_ids: Sequence[Any] | None = None,
    max_rows_per_user: int = 1,
    views: int = 1,
    augment: Augment | None = None,
    augmentations: int = 1,
    batch_shaped: bool = False,
    physical_batch: int | None = None,
    held_out: Dataset[Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    early_stop: EarlyStop | None = None,
    seed: int | None = None,
    diagnostics: bool = False,
    device: str | torch.device = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    keep_checkpoint: bool = False,
    progress: bool | Reporter = False,
) -> Result:
    """Train a model under differential privacy, write its files, and say what is guaranteed.

    Every release of the run is in ``ledger.jsonl`` before it is used; ``dpis verify`` checks the claim from that
    file alone. Killed at any moment, the run goes on by the same call with ``resume=True``.

    Args:
        model: trained in place. It must not couple records (`dpis.fix` replaces batch normalisation).
        dataset: map-style, one record an item: ``(input, ..., target)``.
        loss: ``loss(output, target)``, a mean or a sum over records, or one value a row.
        epsilon: of the guarantee.
        delta: of the guarantee; well below 1 / number of records.
        method: ``dpis``, ``dpis-adaptive``, ``dp-sgd``, ``dp-sgd-decay``; ``sgd`` has no guarantee.
        epochs: of ``floor(n_public / batch_size)`` steps each.
        batch_size: ``b``, the expected number of records a step would sum by the paper's form.
        kappa: norm utilisation in (0, 1]: a number, ``"1:0.4"``, or one an epoch; default 1.
        equivalent_batch: ``B = b / kappa`` instead: the DP-SGD batch with the same privacy and noise.
        headroom: ``k``: how much a record's norm may have grown since it was last seen.
        floor: ``g_L / C``: no record is taken to have a smaller norm than this share of the clip norm.
        contribution: ``weight``, or ``reject`` as in the paper.
        clip_norm: ``C``.
        clipping: adapt the clip norm every epoch, by an accounted release.
        a_e: adaptive method: the share of epochs that reserve as if kappa were 1.
        pi_cap: adaptive method: the largest inclusion probability.
        norm_sum: adaptive method: ``full-pass`` or ``stale``.
        decay_rate: of ``dp-sgd-decay``, per epoch.
        accountant: ``pld`` or ``rdp``, of the predeclared methods.
        n_public: a public number of records (users). Not given: how many there are, which is then treated as public.
        release_n: release a noisy number of records too.
        objective: ``objective(model, batch)``, one loss a row, instead of ``loss``.
        optimizer: ``sgd`` (momentum 0.9), ``adam``, an optimizer over the model's parameters, or a function that
            makes one.
        lr: learning rate of a named optimizer.
        scheduler: makes a learning rate scheduler from the optimizer.
        scheduler_interval: ``epoch`` or ``step``.
        ema: release a moving average of the weights with this decay, such as 0.99.
        collate_fn: makes a batch of a list of items.
        user_ids: one an item: protect users with all of their items, not single items.
        max_rows_per_user: how many items of a user take part in a step, a public bound.
        views: the first tensor of an item has so many views of it along its first axis (`torch.stack`), made from that
            item alone; their gradients are averaged.
        augment: ``augment(batch, generator)`` changes every row at random, each by itself.
        augmentations: so many augmented copies of a record in every step, their gradients averaged.
        batch_shaped: allow shapes that follow the batch; the ledger says so. The model must mask what is padded.
        physical_batch: how many records run at once; None: as many as fit the caches.
        held_out: measured once before training, to try the metrics, and after every epoch; not protected.
        metrics: ``metric(output, target)``, one value a row, by name; default: by the loss.
        early_stop: stop on a held-out metric; the claim stays the plan's.
        seed: repeatable randomness for tests and research; marks the run as not for release.
        diagnostics: show private values; marks the run as not for release.
        device: where to train.
        out: the run's folder, new or empty; default ``runs/1``, ``runs/2``, …
        resume: go on with the interrupted run in ``out``.
        keep_checkpoint: leave the secret checkpoint in the folder after completion.
        progress: True for a bar on stderr.

    Returns:
        The claim, the held-out metrics, and where the files are.

    Example:
        >>> import dpis
        >>> from torch.utils.data import TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> data = TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
        >>> result = dpis.train(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), epsilon=2.0, epochs=2, batch_size=50,
        ...                     n_public=200, out=getfixture("tmp_path") / "run")
        >>> result.claim
        Budget(epsilon=2.0, delta=1e-05)
    """
    where = torch.device(device)
    model = checked_model(model).to(where)
    records = Records(
        dataset,
        collate_fn=collate_fn,
        user_ids=user_ids,
        max_rows_per_user=max_rows_per_user,
        views=views,
        augment=augment,
        augmentations=augmentations,
        batch_shaped=batch_shaped,
        device=where,
    )
    config = Config(
        method=Method.parse(method),
        epsilon=epsilon,
        delta=delta,
        n_public=len(records) if n_public is None else n_public,
        n_public_source=CountSource.DATASET_LENGTH if n_public is None else CountSource.GIVEN,
        batch_size=batch_size,
        epochs=epochs,
        kappa=kappa if kappa is None or isinstance(kappa, int | float | str) else tuple(kappa),
        equivalent_batch=equivalent_batch,
        headroom=headroom,
        floor=floor,
        contribution=Contribution.parse(contribution),
        clip_norm=clip_norm,
        clipping=clipping,
        a_e=a_e,
        pi_cap=pi_cap,
        norm_sum=NormSum.parse(norm_sum),
        decay_rate=decay_rate,
        accountant=Accountant.parse(accountant),
        release_n=release_n,
    )
    made = _optimizer(optimizer, model, lr)
    task = Task(
        model=model,
        records=records,
        loss=loss,
        objective=objective,
        optimizer=made,
        scheduler=None if scheduler is None else scheduler(made),
        scheduler_interval=scheduler_interval,
        held_out=_held_out(held_out, metrics, loss, collate_fn),
        average=None if ema is None else WeightAverage(model, ema),
        early_stop=early_stop,
        physical_batch=physical_batch,
    )
    if n_public is None and config.method.private and not resume:
        warnings.warn(
            "the number of records is treated as public, since n_public was not given: records are protected, how many "
            "there are is not",
            PublicCountWarning,
            stacklevel=2,
        )
    run = _open(out, resume, config, records, seed, diagnostics)
    reporter = (
        progress if not isinstance(progress, bool) else ProgressBar() if progress else Silent()
    )
    return Trainer(run, task, reporter=reporter, keep_checkpoint=keep_checkpoint).train()


def _open(
    out: str | Path | None,
    resume: bool,
    config: Config,
    records: Records,
    seed: int | None,
    diagnostics: bool,
) -> Run:
    if resume:
        if out is None:
            raise InputError("resume=True needs out=, the folder of the interrupted run")
        run = Run.resume(Path(out), len(records))
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
    key = Key.fresh() if seed is None else Key.from_seed(seed)
    options = RunOptions(
        diagnostics=diagnostics,
        batch_shaped=records.batch_shaped,
        user_level=records.user_ids is not None,
    )
    path = next_run_folder(Path("runs")) if out is None else Path(out)
    return Run.start(path, config, len(records), key, options)


def _differences(before: Config, now: Config) -> list[str]:
    values = {name: (getattr(before, name), getattr(now, name)) for name in Config.__slots__}
    return [f"{name}: {old!r}, now {new!r}" for name, (old, new) in values.items() if old != new]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
}


LARGEST_LEARNING_RATE = 1e6
"""Beyond it weights leave what float32 holds within a few steps."""


def require_learning_rate(lr: float, what: str = "the learning rate") -> None:
    """A number above 0, and no larger than weights can bear."""
    if not 0 < lr <= LARGEST_LEARNING_RATE:
        raise InputError(
            f"{what} must be a number above 0 and at most {LARGEST_LEARNING_RATE:g}, found {lr!r}"
        )


def _optimizer(given: str | Optimizer | MakeOptimizer, model: nn.Module, lr: float) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(given, Optimizer):
        return given
    if not isinstance(given, str):
        return given(trained)
    require_learning_rate(lr)
    if given not in OPTIMIZERS:
        raise InputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {given!r}")
    return OPTIMIZERS[given](trained, lr)


def _held_out(
    dataset: Dataset[Any] | None,
    metrics: Mapping[str, Metric] | None,
    loss: Loss | None,
    collate_fn: Collate,
) -> HeldOut | None:
    if dataset is None:
        return None
    if metrics is None:
        metrics = _metrics_for(loss)
    require_numbers(tensors_of(dataset))  # others when they are measured
    return HeldOut(dataset, metrics, None if collate_fn is default_collate else collate_fn)


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
