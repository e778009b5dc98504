"""``PrivacyCallback``: a Lightning run, made private by one callback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from dpis.dropin import PrivacyEngine, PrivateModule
from dpis.dropin.trainer_settings import TrainerSettings, refuse
from dpis.errors import InputError
from dpis.group import Alone, Group, current_group
from dpis.options import Privacy

if TYPE_CHECKING:

    class Callback:
        """The package is optional."""

    class Precision:
        """What is used of it."""

        def _wrap_closure(self, model: Any, optimizer: Any, closure: Any) -> Any: ...

    class DDPStrategy:
        """One of those that hold the whole model in every process."""
else:
    try:
        from lightning.pytorch.callbacks import Callback
        from lightning.pytorch.plugins import Precision
        from lightning.pytorch.strategies import DDPStrategy
    except ModuleNotFoundError:  # the module can still be read about
        Callback = Precision = DDPStrategy = object


PRECISIONS = "32-true", "bf16-mixed"
"""What a private run computes in; norms and sums in float32 or better in either."""


class PrivacyCallback(Callback):
    """Makes model, optimizer and train loader of a Lightning run private when it starts.

    The module stays as it is: automatic optimisation, one optimizer, a ``training_step`` that calls the model once on
    the batch. While it runs, calls of the model go through the gradient engine; the optimizer's step is the release.
    Validation and testing are untouched. Epsilon is logged as ``epsilon`` after every epoch.

    With ``strategy="ddp"`` all processes train one model; the loader's batch size is that of a device, as ever.

    A loss that ``training_step`` logs is a private value: keep it to yourself, and let schedulers and early stopping
    read held-out data only.

    Args:
        privacy: the guarantee, and how records are sampled.
        noise_multiplier: train with this noise instead of for an epsilon.
        seed: repeatable randomness, for tests and research: nothing of it may be released.
        model: the attribute of the module that ``training_step`` calls, for example ``"net"`` for ``self.net(x)``;
            default: the module itself, ``self(x)``. It must own every trainable parameter.

    Attributes:
        engine: the `dpis.PrivacyEngine` of the run.

    Example:
        >>> privacy = dpis.Privacy(epsilon=3.0, clip_norm=1.0, n_public=10_000)  # doctest: +SKIP
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[PrivacyCallback(privacy)])  # doctest: +SKIP
        >>> trainer.fit(module, train_loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        privacy: Privacy,
        *,
        noise_multiplier: float | None = None,
        seed: int | None = None,
        model: str = "",
    ) -> None:
        if Callback is object:
            raise InputError("lightning is not installed: pip install 'dpis[lightning]'")
        super().__init__()
        self.settings = TrainerSettings(
            privacy=privacy, noise_multiplier=noise_multiplier, seed=seed
        )
        self.engine = PrivacyEngine()
        self._model = model
        self._group: Group = Alone()
        self._undo: list[Callable[[], None]] = []

    # ── before and after ─────────────────────────────────────────────────────────────────────────────

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make everything private, before the loader is first asked for."""
        self._group = current_group()
        _refuse_settings(trainer, pl_module)
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise InputError(
                f"one train DataLoader is required, found {type(loader).__name__}: records of several loaders are not "
                "drawn by one coin each"
            )
        model = pl_module.get_submodule(self._model)
        made = self.settings.make_private(
            self.engine, model, trainer.optimizers[0], loader, _epochs(trainer, self.settings)
        )
        private, optimizer, private_loader = made
        steps = _Redirect(pl_module, model, private)
        self._undo = [steps.undo, _set_precision(trainer.strategy)]
        # of several processes: sums are added up before their noise, and records are drawn where they belong
        self._undo.append(_set(trainer.strategy, "model", pl_module))
        connector = trainer._data_connector
        kept = _kept(connector._prepare_dataloader, private_loader)
        self._undo.append(_set(connector, "_prepare_dataloader", kept))
        self._undo.append(_set(trainer.strategy, "optimizers", [optimizer]))
        self._undo.append(_set(trainer.fit_loop, "_data_source", type(source)(private_loader, "")))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what was spent."""
        spent = self.engine.get_epsilon(self.settings.privacy.delta)
        pl_module.log("epsilon", spent, sync_dist=self._group.size > 1)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave module and trainer as they were."""
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As `on_fit_end`; the other processes of the run stop, too."""
        self._group.stop(exception)
        self._restore()

    def _restore(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = []


class _Releasing(Precision):
    """Runs the closure (forward, backward) once, then steps without it: a release has no second look.

    Args:
        chosen: the precision that the trainer was given: forward passes run in it.
    """

    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.precision, self._chosen = chosen.precision, chosen

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, where it was asked for."""
        context: AbstractContextManager[Any] = self._chosen.forward_context()
        return context

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Forward, backward; then the noisy step."""
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result


class _Redirect:
    """While ``training_step`` runs, calls of the model are calls of the private model."""

    def __init__(self, pl_module: Any, model: Any, private: PrivateModule) -> None:
        self._pl_module, self._model = pl_module, model
        forward, training_step = model.forward, pl_module.training_step
        self._active = False

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not (self._active and model.training):
                return forward(*args, **kwargs)
            with self._set_active(False):  # the private model calls the model itself
                return private(*args, **kwargs)

        @functools.wraps(training_step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            with self._set_active(True):
                return training_step(*args, **kwargs)

        model.forward, pl_module.training_step = called, stepped

    @contextmanager
    def _set_active(self, active: bool) -> Iterator[None]:
        before, self._active = self._active, active
        try:
            yield
        finally:
            self._active = before

    def undo(self) -> None:
        """The class's own methods again."""
        del self._model.__dict__["forward"], self._pl_module.__dict__["training_step"]


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; returns how to undo that."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _set_precision(strategy: Any) -> Callable[[], None]:
    return _set(strategy, "precision_plugin", _Releasing(strategy.precision_plugin))


def _kept(prepare: Callable[..., Any], own: DataLoader[Any]) -> Callable[..., Any]:
    """As Lightning prepares loaders, but for this one: it draws what it draws."""

    def prepared(loader: Any, *args: Any, **kwargs: Any) -> Any:
        return loader if loader is own else prepare(loader, *args, **kwargs)

    return prepared


def _epochs(trainer: Any, settings: TrainerSettings) -> int:
    epochs = trainer.max_epochs
    if settings.noise_multiplier is None and (epochs is None or epochs < 1):
        raise InputError(
            f"max_epochs must be a number of epochs to plan for, found {epochs}: the noise for an epsilon is solved "
            "for a horizon"
        )
    return int(epochs or 1)


def _refuse_settings(trainer: Any, pl_module: Any) -> None:
    problems = {}
    if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
        problems[f"strategy={type(trainer.strategy).__name__}"] = (
            "every process holds the whole model; use strategy='ddp'"
        )
    if trainer.precision not in PRECISIONS:
        problems[f"precision={trainer.precision!r}"] = (
            "steps are left out where gradients overflow, or weights are rounded; use 32-true or bf16-mixed"
        )
    if trainer.gradient_clip_val:
        problems[f"gradient_clip_val={trainer.gradient_clip_val}"] = (
            "records are clipped one by one; give clip_norm to Privacy"
        )
    if trainer.accumulate_grad_batches != 1:
        problems[f"accumulate_grad_batches={trainer.accumulate_grad_batches}"] = (
            "every batch is one accounted step; give the loader the batch size that is wanted"
        )
    if trainer.ckpt_path:
        problems["ckpt_path"] = (
            "a checkpoint of Lightning knows nothing of what was spent, and epsilon would start at 0 again; use "
            "engine.save_checkpoint and load_checkpoint in a loop of your own"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        problems["reload_dataloaders_every_n_epochs"] = "the plan is made for one data set"
    if trainer.overfit_batches:
        problems["overfit_batches"] = "batches are drawn afresh every step"
    if not pl_module.automatic_optimization:
        problems["manual optimisation"] = (
            "with a loop of your own use dpis.PrivacyEngine directly (examples/dropin_loop.py)"
        )
    if len(trainer.optimizers) != 1:
        problems[f"a module with {len(trainer.optimizers)} optimizers"] = "use one"
    refuse(problems)
