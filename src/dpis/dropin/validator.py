"""``ModuleValidator``: what a model must not do, as people know it from Opacus."""

from __future__ import annotations

from torch import nn

from dpis.coupling.forbidden_layers import checked_model, fix


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
    def fix(cls, module: nn.Module) -> nn.Module:
        """A copy with what couples records replaced. Make the optimizer from its parameters, afterwards."""
        fixed, _ = fix(module)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """`fix`, then `validate` strictly."""
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed
