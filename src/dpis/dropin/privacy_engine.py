"""``PrivacyEngine``: make a model, an optimizer and a data loader private, and keep the loop."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.coupling.forbidden_layers import checked_model
from dpis.dropin.loader import PrivateLoader, checked_loader
from dpis.dropin.module import PrivateModule
from dpis.dropin.optimizer import PrivateOptimizer, checked_optimizer
from dpis.dropin.request import Request
from dpis.dropin.session import Session
from dpis.dropin.spent import SpentSoFar
from dpis.errors import InputError
from dpis.gradients.deferred import DeferredGradients
from dpis.mechanism import Mechanism, RunPlan, make_plan
from dpis.mechanism.run_plan import open_ended_plan
from dpis.mechanism.secret_state import load_secret_state, save_secret_state
from dpis.options import Privacy
from dpis.randomness import Key


class PrivacyEngine:
    """Private training with importance sampling in a loop of your own.

    The names are those of Opacus; docs/migration.md says what differs. One engine serves one model.

    Args:
        accountant: taken for compatibility: ``prv``, ``rdp`` and ``gdp`` are all answered by PLD, which is tighter.
        secure_mode: randomness is always cryptographic here; True and False are the same.

    Example:
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
        self.accountant = SpentSoFar()
        self._session: Session | None = None
        self._key = Key.fresh()
        self._population = 0

    # ── making private ───────────────────────────────────────────────────────────────────────────────

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        privacy: Privacy | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make private with a given noise, without a horizon: epsilon grows with every step.

        Args:
            module: the model; must not couple records (`ModuleValidator.fix`).
            optimizer: over the model's parameters.
            data_loader: its batch size is ``b``; its dataset, collate function and workers are kept.
            noise_multiplier: ``z``: noise standard deviation over the largest contribution of a record.
            max_grad_norm: the clip norm ``C``.
            privacy: options of sampling and of the guarantee, beside those given here.
            options: further arguments of Opacus, as `Request` has them; ``seed``; ``inputs_as_delivered``; and any
                option of `Privacy` as a word of its own, such as ``n_public=50_000`` or ``method="dp-sgd"``. What is
                not known is refused.

        Returns:
            ``(module, optimizer, data_loader)``; with ``grad_sample_mode="ghost"``
            ``(module, optimizer, criterion, data_loader)``.
        """
        given = {"module": module, "optimizer": optimizer, "data_loader": data_loader}
        request = Request.of(privacy, options, max_grad_norm=max_grad_norm, **given)
        return self._make(open_ended_plan(request.open_ended_config(), noise_multiplier), request)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        privacy: Privacy | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make private with the least noise that keeps ``(target_epsilon, target_delta)`` over ``epochs``.

        Args:
            module: as for `make_private`.
            optimizer: as for `make_private`.
            data_loader: as for `make_private`.
            target_epsilon: of the guarantee.
            target_delta: of the guarantee.
            epochs: passes over the loader; a step past them raises.
            max_grad_norm: the clip norm ``C``.
            privacy: as for `make_private`.
            options: as for `make_private`.

        Returns:
            As `make_private`.
        """
        given = {"module": module, "optimizer": optimizer, "data_loader": data_loader}
        request = Request.of(privacy, options, max_grad_norm=max_grad_norm, **given)
        config = request.config(epochs, epsilon=target_epsilon, delta=target_delta)
        return self._make(make_plan(config), request)

    def _make(self, plan: RunPlan, request: Request) -> tuple[Any, ...]:
        """Everything is checked first: after an error nothing is changed."""
        if self._session is not None:
            raise InputError(
                "this engine has made a model private already, and its epsilon is that model's: take a new "
                "PrivacyEngine for another"
            )
        module, optimizer, loader = request.module, request.optimizer, request.data_loader
        _checked_module(module)
        checked_optimizer(optimizer, module)
        gradients = DeferredGradients(module, batch_first=request.batch_first)
        self._key = Key.fresh() if request.seed is None else Key.from_seed(request.seed)
        self._population = len(cast(Any, loader.dataset))
        journal = self.accountant.start(plan)
        mechanism = Mechanism(plan, self._population, self._key, journal, ahead=False)
        mean, as_delivered = request.loss_reduction == "mean", request.inputs_as_delivered
        self._session = session = Session(
            mechanism, gradients, mean=mean, as_delivered=as_delivered
        )
        private = PrivateModule(module, session), PrivateOptimizer(optimizer, module, session)
        private_loader = PrivateLoader(loader, session, plan.workload.steps_per_epoch)
        if request.grad_sample_mode != "ghost":
            return *private, private_loader
        given = request.criterion
        return *private, nn.CrossEntropyLoss() if given is None else given, private_loader

    # ── what was spent ───────────────────────────────────────────────────────────────────────────────

    def get_epsilon(self, delta: float) -> float:
        """Epsilon for the steps so far; see `SpentSoFar.get_epsilon` for what it covers."""
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
        """Everything that is needed to go on, in one secret file (mode 0600): it holds a norm of every record.

        Args:
            path: of the file.
            module: the private module.
            optimizer: the private optimizer.
            checkpoint_dict: more to keep: tensors, numbers, texts, and lists and dictionaries of these.
            module_state_dict_kwargs: for ``module.state_dict``.
        """
        session = self._opened()
        state = {
            "plan": self._fingerprint(session),
            "seed": self._key.seed,
            "events": self.accountant.journal.state_dict(),
            "mechanism": session.mechanism.state_dict(),
            "torch_random": torch.get_rng_state(),
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "optimizer_state_dict": {} if optimizer is None else optimizer.state_dict(),
            "checkpoint_dict": checkpoint_dict or {},
        }
        save_secret_state(Path(path), state)

    def load_checkpoint(
        self,
        *,
        path: str | PathLike[str],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called, right after the same ``make_private`` call in a new process.

        The next iteration over the loader is the next epoch. With a seed the run goes on bit by bit as it would have.
        Without one, coins and noise are fresh: the same noise on another way from here would cancel in the difference
        of two models.

        Args:
            path: of the file.
            module: the private module.
            optimizer: the private optimizer.
            module_load_dict_kwargs: for ``module.load_state_dict``.

        Returns:
            The ``checkpoint_dict`` that was saved.
        """
        session = self._opened()
        if len(self.accountant):
            raise InputError(
                f"{len(self.accountant)} events were spent by this engine already: to go back would forget them, and "
                "epsilon would be too small. Load right after make_private, with a new PrivacyEngine; to go back to "
                "older weights, load them by module.load_state_dict"
            )
        state = load_secret_state(Path(path), "plan")
        if state["plan"] != self._fingerprint(session):
            raise InputError(
                f"{path} is of a run with other arguments or another number of records: {state['plan']}; these are "
                f"{self._fingerprint(session)}. What was spent then would not fit the plan now. Make it private with "
                "the same arguments"
            )
        self._key = Key.fresh() if state["seed"] is None else Key.from_seed(state["seed"])
        self.accountant.journal.load_state_dict(state["events"])
        session.mechanism.take_up(self._key, state["mechanism"])
        torch.set_rng_state(state["torch_random"])
        module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
        if optimizer is not None and state["optimizer_state_dict"]:
            optimizer.load_state_dict(state["optimizer_state_dict"])
        return dict(state["checkpoint_dict"])

    def _fingerprint(self, session: Session) -> str:
        """What must be the same for a checkpoint to fit."""
        plan = session.mechanism.plan
        return f"{plan.config}, noise={plan.privacy.planned_noise[0]!r}, records={self._population}"

    def _opened(self) -> Session:
        if self._session is None:
            raise InputError("nothing is private yet: call make_private first")
        return self._session

    # ── compatibility of models ──────────────────────────────────────────────────────────────────────

    def is_compatible(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> bool:
        """Whether `validate` would pass."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (ValueError, TypeError):
            return False
        return True

    def validate(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> None:
        """Raise if the module couples records, the optimizer steps another, or the loader cannot be sampled."""
        _checked_module(module)
        if optimizer is not None:
            checked_optimizer(optimizer, module)
        if data_loader is not None:
            checked_loader(data_loader)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The module with what couples records replaced, as far as that can be done."""
        from dpis.dropin.validator import ModuleValidator

        return ModuleValidator.fix(module)


def _checked_module(module: nn.Module) -> nn.Module:
    if isinstance(module, PrivateModule):
        raise InputError("the module is private already: give the one it was made from")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"{type(module).__name__} is not supported: every process would draw records and add noise by itself, and "
            "epsilon would not be what is reported. Give the module it wraps, in one process"
        )
    if not module.training:
        raise InputError("the module is in evaluation mode: call module.train() first")
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    if any(kind.is_complex for kind in kinds):
        raise InputError("trainable parameters must be real numbers, found complex ones")
    return checked_model(module)
