"""``PrivateTrainer``: the Trainer of Hugging Face, with private steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpis import batches
from dpis.dropin import PrivacyEngine, PrivateModule, PrivateOptimizer
from dpis.dropin.row_losses import RowLosses, classification_losses, labels_among
from dpis.dropin.trainer_settings import TrainerSettings, refuse
from dpis.errors import InputError
from dpis.options import Privacy

if TYPE_CHECKING:

    class Trainer:
        """What is used of it; the package is optional."""

        optimizer: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    try:
        from transformers import Trainer
    except ImportError:  # the module can still be read about
        Trainer = object

PRIVATE_VALUES = ("loss", "grad_norm", "total_flos", "num_input_tokens_seen")
PRIVATE_PREFIX = "train_"
"""What a Trainer logs and writes into its checkpoints that was computed from the training data without noise.

With the prefix come loss, times, memory, and speeds, which are made from the true number of records.
"""


class PrivateTrainer(Trainer):
    """A ``transformers.Trainer`` whose every step is one accounted, noisy release.

    The model is run without labels, and every row has its own loss, of the kind that the model computes: given labels,
    it would return a mean over the batch, perhaps over all of its tokens, which couples records. Evaluation is as ever.
    Values that were computed from training data without noise (the training loss) are not logged. Saved models can be
    loaded as ever; resuming is refused. Under ``torchrun`` or ``accelerate launch`` all processes train one model.

    Args:
        args: as for ``Trainer``.
        privacy: the guarantee, and how records are sampled. Its ``clip_norm`` clips every record; the
            ``max_grad_norm`` of the arguments does nothing.
        noise_multiplier: train with this noise instead of for an epsilon.
        seed: repeatable coins and noise, for tests and research: nothing of it may be released.
        row_losses: one loss for every row, from outputs and labels; default: the model's own, or
            `classification_losses` where it has none.
        max_physical_batch_size: rows of a forward pass at most; batches are processed in parts. Default: whole.
        kwargs: as for ``Trainer``.

    Attributes:
        privacy_engine: the `dpis.PrivacyEngine` of the run.

    Example:
        >>> privacy = dpis.Privacy(epsilon=3.0, clip_norm=1.0, n_public=10_000)  # doctest: +SKIP
        >>> trainer = PrivateTrainer(model, arguments, train_dataset=data, privacy=privacy)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> trainer.privacy_engine.get_epsilon(1e-5)  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        privacy: Privacy,
        noise_multiplier: float | None = None,
        seed: int | None = None,
        row_losses: RowLosses | None = None,
        max_physical_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if Trainer is object:
            raise InputError("transformers is not installed: pip install 'dpis[huggingface]'")
        super().__init__(*args, **kwargs)
        _refuse_settings(self.args)
        if kwargs.get("compute_loss_func") is not None:
            refuse({"compute_loss_func": "it normalises over the batch; give row_losses"})
        self.settings = TrainerSettings(
            privacy=privacy, noise_multiplier=noise_multiplier, seed=seed
        )
        self.privacy_engine = PrivacyEngine()
        self._row_losses = row_losses
        self._part = max_physical_batch_size
        self._private: PrivateModule | None = None
        self._private_optimizer: PrivateOptimizer | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, once. The metrics that are returned, for ``save_metrics``, are the public ones."""
        if resume_from_checkpoint:
            raise InputError(
                "resume_from_checkpoint is not supported in a private run: a checkpoint of Trainer knows nothing of "
                "what was spent, and epsilon would start at 0 again. Train in one go"
            )
        if self._private is not None:
            raise InputError(
                "this trainer has spent its plan: a second run on the same data spends again. Make a new "
                "PrivateTrainer, and add its epsilon to the first one's"
            )
        _refuse_settings(self.args)  # they may have been changed
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        return output._replace(metrics=_public(output.metrics))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The private loader: here model and optimizer become private, too."""
        if self.train_dataset is None:
            raise InputError("training requires a train_dataset")
        self.model.train()
        loader = self._plain_loader()
        self.create_optimizer()
        self._private, self._private_optimizer, private_loader = self.settings.make_private(
            self.privacy_engine, self.model, self.optimizer, loader, self._epochs()
        )
        self.optimizer = self._private_optimizer
        return private_loader  # type: ignore[no-any-return]

    def _plain_loader(self) -> DataLoader[Any]:
        """As Trainer makes it, without its sampler."""
        collate = self._get_collator_with_removed_columns(
            self.data_collator, description="training"
        )
        settings: dict[str, Any] = {}
        if self.args.dataloader_num_workers:
            settings = {
                "prefetch_factor": self.args.dataloader_prefetch_factor,
                "persistent_workers": self.args.dataloader_persistent_workers,
            }
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            **settings,
        )

    def _epochs(self) -> int:
        if self.args.max_steps <= 0:
            epochs = float(self.args.num_train_epochs)
            return math.ceil(epochs)
        records: int = self.settings.privacy.n_public or len(self.train_dataset)
        batch: int = self.args.per_device_train_batch_size * self.args.world_size
        steps = max(1, records // batch)
        return -(-int(self.args.max_steps) // steps)

    def training_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Forward and backward for the rows of a batch, in parts."""
        assert self._private is not None
        assert self._private_optimizer is not None
        model.train()
        inputs = self._prepare_inputs(inputs)
        rows = batches.rows(inputs)
        size = self._part or rows or 1
        total = torch.zeros((), device=self.args.device)
        for start in range(0, rows, size):  # nobody was drawn: the step is noise alone
            stop = min(rows, start + size)
            part = batches.apply(lambda t, a=start, b=stop: t[a:b], inputs)  # type: ignore[misc]
            with self.accelerator.autocast():
                losses = self._losses_of(self._private, part)
            losses.mean().backward()  # type: ignore[no-untyped-call]
            total += losses.detach().sum().as_subclass(Tensor)
            if stop < rows:
                self._private_optimizer.signal_skip_step()
                self._private_optimizer.step()
                self._private_optimizer.signal_skip_step(do_skip=False)
        return total / max(1, rows)

    def _losses_of(self, model: PrivateModule, inputs: Any) -> Tensor:
        given, labels = labels_among(inputs)
        if not labels:
            raise InputError(f"every row needs labels, found {', '.join(given)}")
        own = None if self._row_losses else model.head_losses.kind((), given, labels)
        outputs = model(**given)
        if own is not None:
            losses = own(outputs, labels)
        else:
            losses = (self._row_losses or classification_losses)(outputs, labels["labels"])
        rows = batches.rows(labels)
        if losses.shape != (rows,):
            raise InputError(
                f"row_losses must return one loss for each of {rows} rows, found shape {tuple(losses.shape)}: "
                "a loss over the batch couples records, and the guarantee would not hold"
            )
        return losses

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: it would tell how many records were drawn."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what is public, and epsilon."""
        public = _public(logs)
        if self._private is not None:
            public["epsilon"] = self.privacy_engine.get_epsilon(self.settings.privacy.delta)
        super().log(public, *args, **kwargs)  # type: ignore[misc]


def _public(logs: dict[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in logs.items()
        if name not in PRIVATE_VALUES and not name.startswith(PRIVATE_PREFIX)
    }


def _refuse_settings(args: Any) -> None:
    problems = {}
    if args.gradient_accumulation_steps != 1:
        problems[f"gradient_accumulation_steps={args.gradient_accumulation_steps}"] = (
            "every batch is one accounted step; give per_device_train_batch_size the batch size that is wanted, and "
            "max_physical_batch_size to process it in parts"
        )
    if getattr(args, "fp16", False):
        problems["fp16=True"] = (
            "its loss scale, and which steps it skips, follow the gradients without noise; use bf16=True"
        )
    tokens_seen = getattr(args, "include_num_input_tokens_seen", "no")
    if tokens_seen not in ("no", False, None):
        problems[f"include_num_input_tokens_seen={tokens_seen}"] = (
            "the tokens of a step tell how many records were drawn for it, which is private; leave it out"
        )
    if args.n_gpu > 1:
        problems[f"one process for {args.n_gpu} devices"] = (
            "its threads would run parts of a batch that are not known to the engine; start a process for each by "
            "torchrun or accelerate launch"
        )
    for name, why in (
        ("deepspeed", "its updates are not ours; every process holds the whole model"),
        ("fsdp", "this trainer has the whole model in every process; leave it out"),
        ("torch_compile", "the gradient engine watches the layers"),
        ("auto_find_batch_size", "the batch size is a part of the plan"),
        ("dataloader_drop_last", "every batch has its own size"),
        ("group_by_length", "a record must be drawn by its own coin"),
        ("neftune_noise_alpha", "it changes the model while it trains"),
        ("label_smoothing_factor", "give row_losses a loss with label_smoothing"),
    ):
        if getattr(args, name, None):
            problems[f"{name}={getattr(args, name)}"] = why
    refuse(problems)
