"""``ModuleValidator``: what a model must not do, as people know it from Opacus."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from dpis.coupling.forbidden_layers import checked_model, fix
from dpis.errors import InputError

logger = logging.getLogger(__name__)

UnsupportedModuleError = InputError
"""The name that Opacus has for it. A `CouplingError`, where records influence one another, is one."""


class ModuleValidator:
    """Finds layers that couple records, and replaces what can be replaced.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> ModuleValidator.is_valid(model)
        False
        >>> ModuleValidator.is_valid(ModuleValidator.fix(model))
        True
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[Exception]:
        """The reasons why the module cannot be trained privately; empty if it can.

        Args:
            module: the model.
            strict: raise the first reason.
        """
        try:
            checked_mode(module)
            checked_model(module)
        except (ValueError, TypeError) as error:
            if strict:
                raise
            return [error]
        return []

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether `validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(
        cls,
        module: nn.Module,
        *,
        num_groups: int | None = None,
        replace_bn_with_in: bool = False,
    ) -> nn.Module:
        """A copy with what couples records replaced. Make the optimizer from its parameters, afterwards.

        What was changed is logged, at level INFO.

        Args:
            module: the model.
            num_groups: of every ``GroupNorm`` that takes the place of a ``BatchNorm``.
            replace_bn_with_in: ``InstanceNorm`` takes its place instead.
        """
        fixed, changes = fix(module, num_groups=num_groups, replace_bn_with_in=replace_bn_with_in)
        for change in changes:
            logger.info("ModuleValidator.fix: %s", change)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **how: Any) -> nn.Module:
        """`fix`, then `validate` strictly."""
        fixed = cls.fix(module, **how)
        cls.validate(fixed, strict=True)
        return fixed


def checked_mode(module: nn.Module) -> None:
    """Refuse to train what is in evaluation mode."""
    if not module.training:
        raise InputError("the module is in evaluation mode: call module.train() first")
