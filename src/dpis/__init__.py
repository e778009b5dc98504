"""Differentially private training for PyTorch with importance sampling."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpis.gradients import fix as fix

__version__ = "0.1.0"
__all__ = ["__version__", "fix"]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for: planning and verifying do without."""
    if name == "fix":
        from dpis.gradients import fix

        return fix
    raise AttributeError(f"module 'dpis' has no attribute {name!r}")
