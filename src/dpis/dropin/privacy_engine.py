"""``PrivacyEngine``: make a model, an optimizer and a data loader private, and keep the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpis.coupling.forbidden_layers import checked_model
from dpis.dropin.loader import PrivateLoader, checked_loader
from dpis.dropin.module import PrivateModule
from dpis.dropin.optimizer import PrivateOptimizer, checked_optimizer
from dpis.dropin.private_run import Place, PrivateRun
from dpis.dropin.ranks import inner, tell_of_uncaught
from dpis.dropin.request import Request
from dpis.dropin.session import Session
from dpis.dropin.spent import SpentSoFar
from dpis.dropin.validator import ModuleValidator, checked_mode
from dpis.errors import InputError
from dpis.gradients.deferred import DeferredGradients
from dpis.group import current_group, share_weights, warn
from dpis.mechanism import Mechanism, RunPlan, make_plan
from dpis.mechanism.fingerprint import item_digest, require_same_data
from dpis.mechanism.run_plan import open_ended_plan
from dpis.mechanism.secret_state import shared_key
from dpis.options import Privacy

NO_NOISE = "noise_multiplier=0 adds no noise: nothing is private, and epsilon is infinite. For finding errors only"


class PrivacyEngine:
    """Private training with importance sampling in a loop of your own.

    The names are those of Opacus; docs/migration.md says what differs. One engine may make several models private with
    `make_private`: its epsilon is that of all their steps.

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
        self.accountant = SpentSoFar()
        self._make_mechanism: Callable[..., Mechanism] = Mechanism
        self._runs: list[PrivateRun] = []

    def plant(self, canaries: Callable[..., Mechanism]) -> None:
        """Audit the loops that are made private from now on; `dpis.auditing.Canaries` says what leaked.

        Models trained like this are not for release: canaries cost accuracy, and who planted them can find them.
        """
        self._make_mechanism = canaries

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
            noise_multiplier: ``z``: noise standard deviation over the largest contribution of a record. 0, to look for
                errors in a loop: nothing is private.
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
        with current_group().together():
            request = Request.of(privacy, options, max_grad_norm=max_grad_norm, **given)
            if noise_multiplier == 0:
                warn(NO_NOISE, stacklevel=2)
            plan = open_ended_plan(request.open_ended_config(), noise_multiplier)
        return self._make(plan, request)

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
            epochs: passes over the loader; a step past them raises: it would break the promise.
            max_grad_norm: the clip norm ``C``.
            privacy: as for `make_private`.
            options: as for `make_private`.

        Returns:
            As `make_private`.
        """
        given = {"module": module, "optimizer": optimizer, "data_loader": data_loader}
        with current_group().together():
            request = Request.of(privacy, options, max_grad_norm=max_grad_norm, **given)
            config = request.config(epochs, epsilon=target_epsilon, delta=target_delta)
            plan = make_plan(config)
        return self._make(plan, request)

    def _make(self, plan: RunPlan, request: Request) -> tuple[Any, ...]:
        """Everything is checked first: after an error nothing is changed."""
        module, optimizer, loader = request.module, request.optimizer, request.data_loader
        mean, group = request.loss_reduction == "mean", current_group()
        with group.together():
            _checked_module(module)
            checked_optimizer(optimizer, module)
            gradients = DeferredGradients(inner(module), batch_first=request.batch_first)
        tell_of_uncaught(group)
        population = len(cast(Any, loader.dataset))
        group.require_same((str(plan), population), "arguments and dataset")
        share_weights(inner(module), group)
        key, journal = shared_key(request.seed, group), self.accountant.journal_for(plan)
        require_same_data(lambda i: item_digest(loader.dataset, i, key), population, group)
        mechanism = self._make_mechanism(plan, population, key, journal, ahead=False, group=group)
        session = Session(mechanism, gradients, mean=mean, as_delivered=request.inputs_as_delivered)
        private = PrivateModule(module, session), PrivateOptimizer(optimizer, module, session)
        private_loader = PrivateLoader(loader, session, plan.workload.steps_per_epoch)
        self.accountant.follow(plan, journal)
        self._runs.append(PrivateRun(session, journal, request.seed, population))
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
        path: Place,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Everything that is needed to go on, in one secret file (mode 0600): it holds a norm of every record.

        Args:
            path: of the file; or a file that is open in binary mode, which is yours to keep secret.
            module: the private module.
            optimizer: the private optimizer.
            noise_scheduler: of `dpis.schedulers`.
            grad_clip_scheduler: of `dpis.schedulers`.
            checkpoint_dict: more to keep: tensors, numbers, texts, and lists and dictionaries of these.
            module_state_dict_kwargs: for ``module.state_dict``.
        """
        run = self._run_of(module)
        if len(self.accountant) > run.journal.position:
            raise InputError(
                "this engine has spent more than the checkpoint of one model holds (another model, or a history that "
                "was loaded before make_private): what goes on from it would report too small an epsilon. Load the "
                "history after make_private; for several models take an engine for each, and add up their epsilons"
            )
        parts = _parts(optimizer, noise_scheduler, grad_clip_scheduler)
        state = {
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "checkpoint_dict": checkpoint_dict or {},
            **{name: part.state_dict() for name, part in parts.items()},
        }
        run.save(path, state)

    def load_checkpoint(
        self,
        *,
        path: Place,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called, right after the same ``make_private`` call in a new process.

        The next iteration over the loader is the next epoch. With a seed the run goes on bit by bit as it would have.
        Without one, coins and noise are fresh: the same noise on another way from here would cancel in the difference
        of two models.

        Args:
            path: of the file; or a file that is open at the beginning of the checkpoint.
            module: the private module.
            optimizer: the private optimizer.
            noise_scheduler: of `dpis.schedulers`.
            grad_clip_scheduler: of `dpis.schedulers`.
            module_load_dict_kwargs: for ``module.load_state_dict``.

        Returns:
            The ``checkpoint_dict`` that was saved.
        """
        state = self._run_of(module).load(path)
        module.load_state_dict(state["module_state_dict"], **(module_load_dict_kwargs or {}))
        for name, part in _parts(optimizer, noise_scheduler, grad_clip_scheduler).items():
            if name in state:
                part.load_state_dict(state[name])
        return dict(state["checkpoint_dict"])

    def _run_of(self, module: nn.Module) -> PrivateRun:
        if not self._runs:
            raise InputError("nothing is private yet: call make_private first")
        held = set(map(id, module.parameters()))
        for run in self._runs:
            if held.issuperset(map(id, run.session.gradients.parameters.values())):
                return run
        raise InputError(
            "the module is none that this engine made private: give the one it returned"
        )

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
        return ModuleValidator.fix(module)


def _parts(optimizer: Any, noise_scheduler: Any, grad_clip_scheduler: Any) -> dict[str, Any]:
    """What a checkpoint keeps beside the module, by its name there, as far as it is given."""
    parts = {
        "optimizer_state_dict": optimizer,
        "noise_scheduler_state_dict": noise_scheduler,
        "grad_clip_scheduler_state_dict": grad_clip_scheduler,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _checked_module(module: nn.Module) -> nn.Module:
    if isinstance(module, PrivateModule):
        raise InputError("the module is private already: give the one it was made from")
    if isinstance(module, nn.DataParallel):
        raise InputError(
            "DataParallel is not supported: its threads would run parts of a batch that are not known to the engine. "
            "Give the module it wraps; for several devices start a process for each by torchrun"
        )
    module = inner(module)
    checked_mode(module)
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    if any(kind.is_complex for kind in kinds):
        raise InputError("trainable parameters must be real numbers, found complex ones")
    return checked_model(module)
