"""``PrivacyEngine``: make a model, an optimizer and a data loader private, and keep the loop."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.accounting import (
    AdaptivePlan,
    Composition,
    CountSource,
    Entry,
    Event,
    epsilon_by_pld,
    epsilon_by_rdp,
)
from dpis.engine.loader import PrivateLoader, checked_loader
from dpis.engine.module import PrivateModule
from dpis.engine.optimizer import PrivateOptimizer
from dpis.engine.session import Session
from dpis.errors import InputError
from dpis.gradients import guards
from dpis.gradients.deferred import DeferredGradients
from dpis.mechanism import Config, Journal, Mechanism, Method, NormSum, Plan, make_plan
from dpis.mechanism.plan import open_ended_plan
from dpis.randomness import Key
from dpis.training.api import PublicCountWarning
from dpis.training.checkpoint import load_checkpoint, save_checkpoint

GRAD_SAMPLE_MODES = ("hooks", "ghost", "functorch", "ew")
"""Opacus's names. Here there is one engine, at the price of the fastest of them; all names are taken."""


class EventCounter(Journal):
    """Counts events in memory; what a plan or a filter allows is kept by the mechanism and its guard."""

    def __init__(self, guard: Any = None) -> None:
        self.events: Counter[Event] = Counter()
        self._guard = guard
        self._position = 0

    def spend(self, entries: Sequence[Entry]) -> None:
        """Count, if the guard admits them."""
        for entry in entries:
            if self._guard is not None:
                self._guard.admit(entry.event)
            self.events[entry.event] += 1
            self._position += 1

    def go_to(self, position: int) -> None:
        """After a checkpoint was loaded; `restore` follows."""
        self._position = position

    def restore(self, events: Counter[Event]) -> None:
        """Spend again, in a guard that is new, what was spent before a checkpoint."""
        self.events = Counter()
        for event, times in events.items():
            for _ in range(times):
                if self._guard is not None:
                    self._guard.admit(event)
            self.events[event] = times

    def finish(self, model_sha256: str) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""

    @property
    def position(self) -> int:
        """How many events there were."""
        return self._position

    @property
    def fraction_spent(self) -> float:
        """Of the plan's or the filter's budget; 0 without either."""
        return 0.0 if self._guard is None else float(self._guard.fraction_spent)


class Accountant:
    """What has been spent so far."""

    def __init__(self) -> None:
        self.journal = EventCounter()
        self.plan: Plan | None = None

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Epsilon at ``delta`` for the steps so far.

        Predeclared: by PLD, valid for a stop that was fixed in advance; a stop chosen from what was seen is covered by
        the target that was planned for, not by this number. Adaptive: the claim, at the planned delta.
        """
        plan = None if self.plan is None else self.plan.accounting
        if isinstance(plan, AdaptivePlan):
            if delta < plan.budget.delta:
                raise InputError(
                    f"the adaptive mode claims epsilon at delta = {plan.budget.delta:g} or larger, found {delta:g}"
                )
            return plan.budget.epsilon
        composition = Composition(tuple(self.journal.events.items()))
        if not composition.events:
            return 0.0
        try:
            return epsilon_by_pld(composition, delta)
        except InputError:  # too small a delta for it
            return epsilon_by_rdp(composition, delta)

    def __len__(self) -> int:
        return self.journal.position


class PrivacyEngine:
    """Private training with importance sampling in a loop of your own.

    The names are those of Opacus; docs/migration.md says what differs. One engine serves one model.

    Args:
        accountant: taken for compatibility: ``prv``, ``rdp`` and ``gdp`` are all answered by PLD, which is tighter.
        secure_mode: randomness is always cryptographic here; True and False are the same.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
        >>> model, loader = nn.Linear(4, 2), DataLoader(data, batch_size=16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private_with_epsilon(
        ...     module=model, optimizer=optimizer, data_loader=loader, target_epsilon=2.0, target_delta=1e-5,
        ...     epochs=1, max_grad_norm=1.0, n_public=64)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(inputs), targets).backward()
        ...     optimizer.step()
        >>> engine.get_epsilon(1e-5) <= 2.0
        True
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        if accountant not in ("prv", "rdp", "gdp", "pld"):
            raise InputError(f"accountant must be prv, rdp, gdp or pld, found {accountant!r}")
        del secure_mode
        self.accountant = Accountant()
        self._session: Session | None = None
        self._key = Key.fresh()

    # ── making private ───────────────────────────────────────────────────────────────────────────────

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        sampling: str = "importance",
        k: float = 5.0,
        kappa: float = 1.0,
        n_public: int | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> tuple[Any, ...]:
        """Make private with a given noise, without a horizon: epsilon grows with every step.

        Args:
            module: the model; must not couple records (`ModuleValidator.fix`).
            optimizer: over the model's parameters.
            criterion: returned as it is with ``grad_sample_mode="ghost"``.
            data_loader: its batch size is ``b``; its data set, collate function and workers are kept.
            noise_multiplier: ``z``: noise standard deviation over the largest contribution of a record.
            max_grad_norm: the clip norm ``C``.
            batch_first: whether rows are the first dimension of tensors.
            loss_reduction: "mean" or "sum", of the loss in the loop.
            poisson_sampling: must be True.
            clipping: must be "flat".
            noise_generator: must be None: noise is cryptographic. ``seed`` makes a run repeatable.
            grad_sample_mode: any of Opacus's names.
            wrap_model: must be True.
            rand_on_empty: empty batches are tensors of length zero.
            sampling: "importance", or "uniform" (DP-SGD).
            k: headroom of importance sampling.
            kappa: norm utilisation: the rate is ``b / (kappa · n_public)``.
            n_public: a public number of records; default ``len(dataset)``, which is then treated as public.
            seed: repeatable randomness, for tests and research: nothing of it may be released.
            unknown: refused.

        Returns:
            ``(module, optimizer, data_loader)``; with ``grad_sample_mode="ghost"``
            ``(module, optimizer, criterion, data_loader)``.
        """
        _refuse_unsupported(
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            wrap_model=wrap_model,
            max_grad_norm=max_grad_norm,
            unknown=unknown,
        )
        config = self._config(
            data_loader, max_grad_norm, sampling, "predeclared", k, kappa, n_public, epochs=1
        )
        plan = open_ended_plan(config, noise_multiplier)
        made = self._wrap(plan, module, optimizer, data_loader, batch_first, loss_reduction, seed)
        return _returned(made, criterion, grad_sample_mode)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        sampling: str = "importance",
        mode: str = "predeclared",
        k: float = 5.0,
        kappa: float | str = 1.0,
        n_public: int | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> tuple[Any, ...]:
        """Make private with the least noise that keeps ``(target_epsilon, target_delta)`` over ``epochs``.

        Args:
            module: the model; must not couple records (`ModuleValidator.fix`).
            optimizer: over the model's parameters.
            criterion: returned as it is with ``grad_sample_mode="ghost"``.
            data_loader: its batch size is ``b``; its data set, collate function and workers are kept.
            target_epsilon: of the guarantee.
            target_delta: of the guarantee.
            epochs: passes over the loader; a step past them raises.
            max_grad_norm: the clip norm ``C``.
            batch_first: whether rows are the first dimension of tensors.
            loss_reduction: "mean" or "sum", of the loss in the loop.
            poisson_sampling: must be True.
            clipping: must be "flat".
            noise_generator: must be None: noise is cryptographic. ``seed`` makes a run repeatable.
            grad_sample_mode: any of Opacus's names.
            wrap_model: must be True.
            sampling: "importance", or "uniform" (DP-SGD).
            mode: "predeclared", or "adaptive": noise solved every epoch from released norm sums.
            k: headroom of importance sampling.
            kappa: norm utilisation, a number or a schedule such as "1:0.4".
            n_public: a public number of records; default ``len(dataset)``, which is then treated as public.
            seed: repeatable randomness, for tests and research: nothing of it may be released.
            unknown: refused.

        Returns:
            As `make_private`.
        """
        _refuse_unsupported(
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            wrap_model=wrap_model,
            max_grad_norm=max_grad_norm,
            unknown=unknown,
        )
        config = self._config(
            data_loader,
            max_grad_norm,
            sampling,
            mode,
            k,
            kappa,
            n_public,
            epochs=epochs,
            epsilon=target_epsilon,
            delta=target_delta,
        )
        plan = make_plan(config)
        made = self._wrap(plan, module, optimizer, data_loader, batch_first, loss_reduction, seed)
        return _returned(made, criterion, grad_sample_mode)

    def _config(
        self,
        data_loader: DataLoader[Any],
        max_grad_norm: float | list[float],
        sampling: str,
        mode: str,
        k: float,
        kappa: float | str,
        n_public: int | None,
        *,
        epochs: int,
        epsilon: float = 1.0,
        delta: float = 1e-5,
    ) -> Config:
        loader = checked_loader(data_loader)
        if sampling not in ("importance", "uniform"):
            raise InputError(f"sampling must be importance or uniform, found {sampling!r}")
        if mode not in ("predeclared", "adaptive") or (
            mode == "adaptive" and sampling == "uniform"
        ):
            raise InputError(
                f"mode must be predeclared, or with importance sampling adaptive, found {mode!r}"
            )
        records = len(cast(Any, loader.dataset))
        if n_public is None:
            warnings.warn(
                "the number of records is treated as public, since n_public was not given: records are protected, how "
                "many there are is not",
                PublicCountWarning,
                stacklevel=4,
            )
        assert loader.batch_size is not None
        by_importance = Method.DPIS if mode == "predeclared" else Method.DPIS_ADAPTIVE
        return Config(
            method=by_importance if sampling == "importance" else Method.DP_SGD,
            epsilon=epsilon,
            delta=delta,
            n_public=records if n_public is None else n_public,
            n_public_source=CountSource.DATASET_LENGTH if n_public is None else CountSource.GIVEN,
            batch_size=loader.batch_size,
            epochs=epochs,
            kappa=None if mode == "adaptive" and kappa == 1 else kappa,
            headroom=k,
            clip_norm=float(cast(float, max_grad_norm)),
            norm_sum=NormSum.STALE,
        )

    def _wrap(
        self,
        plan: Plan,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        batch_first: bool,
        loss_reduction: str,
        seed: int | None,
    ) -> tuple[PrivateModule, PrivateOptimizer, PrivateLoader]:
        if self._session is not None:
            raise InputError(
                "this engine has made a model private already: take a new PrivacyEngine"
            )
        if isinstance(module, PrivateModule):
            raise InputError("the module is private already: give the one it was made from")
        if loss_reduction not in ("mean", "sum"):
            raise InputError(f"loss_reduction must be mean or sum, found {loss_reduction!r}")
        if not module.training:
            raise InputError("the module is in evaluation mode: call module.train() first")
        self._key = Key.fresh() if seed is None else Key.from_seed(seed)
        self.accountant.journal = EventCounter(plan.guard())
        self.accountant.plan = plan
        population = len(cast(Any, data_loader.dataset))
        mechanism = Mechanism(plan, population, self._key, self.accountant.journal, ahead=False)
        gradients = DeferredGradients(module, batch_first=batch_first)
        session = Session(mechanism, gradients, mean=loss_reduction == "mean")
        wrapped = PrivateModule(module, session)
        private_optimizer = PrivateOptimizer(optimizer, module, session)
        loader = PrivateLoader(data_loader, session, plan.workload.steps_per_epoch)
        self._session = session
        return wrapped, private_optimizer, loader

    # ── what was spent ───────────────────────────────────────────────────────────────────────────────

    def get_epsilon(self, delta: float) -> float:
        """Epsilon for the steps so far; see `Accountant.get_epsilon` for what it covers."""
        return self.accountant.get_epsilon(delta)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────

    def save_checkpoint(
        self,
        *,
        path: str | PathLike[str],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Everything that is needed to go on, in one secret file (mode 0600): it holds the key of the noise.

        Args:
            path: of the file.
            module: the private module.
            optimizer: the private optimizer.
            checkpoint_dict: more to keep.
            module_state_dict_kwargs: for ``module.state_dict``.
        """
        session = self._opened()
        state = {
            "key": self._key.secret,
            "seed": self._key.seed,
            "mechanism": session.mechanism.state_dict(),
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "optimizer_state_dict": {} if optimizer is None else optimizer.state_dict(),
            "checkpoint_dict": checkpoint_dict or {},
        }
        save_checkpoint(Path(path), state)

    def load_checkpoint(
        self,
        *,
        path: str | PathLike[str],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called, after the same ``make_private`` call.

        Args:
            path: of the file.
            module: the private module.
            optimizer: the private optimizer.
            module_load_dict_kwargs: for ``module.load_state_dict``.

        Returns:
            The ``checkpoint_dict`` that was saved.
        """
        session = self._opened()
        state = load_checkpoint(Path(path))
        self._key = Key(state["key"], state["seed"])
        session.mechanism.take_up(self._key, state["mechanism"])
        self.accountant.journal.restore(session.mechanism.spent)
        module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
        if optimizer is not None and state["optimizer_state_dict"]:
            optimizer.load_state_dict(state["optimizer_state_dict"])
        return dict(state["checkpoint_dict"])

    def _opened(self) -> Session:
        if self._session is None:
            raise InputError("nothing is private yet: call make_private first")
        return self._session

    # ── compatibility of models ──────────────────────────────────────────────────────────────────────

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether `validate` would pass."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except ValueError:
            return False
        return True

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raise if the module couples records, or the loader cannot be sampled."""
        guards.checked(module)
        if data_loader is not None:
            checked_loader(data_loader)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The module with what couples records replaced, as far as that can be done."""
        from dpis.engine.validator import ModuleValidator

        return ModuleValidator.fix(module)


def _returned(
    made: tuple[PrivateModule, PrivateOptimizer, PrivateLoader], criterion: Any, mode: str
) -> tuple[Any, ...]:
    if mode not in GRAD_SAMPLE_MODES:
        raise InputError(
            f"grad_sample_mode must be one of {', '.join(GRAD_SAMPLE_MODES)}, found {mode!r}"
        )
    module, optimizer, loader = made
    if mode == "ghost":
        return module, optimizer, nn.CrossEntropyLoss() if criterion is None else criterion, loader
    return module, optimizer, loader


def _refuse_unsupported(
    *,
    poisson_sampling: bool,
    clipping: str,
    noise_generator: Any,
    wrap_model: bool,
    max_grad_norm: float | list[float],
    unknown: dict[str, Any],
) -> None:
    if not poisson_sampling:
        raise InputError(
            "poisson_sampling=False is not supported: shuffled batches have no amplification that this engine could "
            "account for, and epsilon would be wrong. Leave it out"
        )
    if clipping != "flat" or isinstance(max_grad_norm, list | tuple):
        raise InputError(
            f"clipping={clipping!r} is not supported: gradients are clipped over all parameters together. Use "
            "clipping='flat' with one max_grad_norm; for a clip norm that adapts see dpis.train(clipping=...)"
        )
    if noise_generator is not None:
        raise InputError(
            "noise_generator is not supported: noise from a torch generator can be predicted from its state. Leave it "
            "out; seed= makes a run repeatable, for research"
        )
    if not wrap_model:
        raise InputError(
            "wrap_model=False is not supported: use the module that make_private returns"
        )
    if unknown:
        raise InputError(f"unknown arguments {', '.join(sorted(unknown))}: none is ignored")
