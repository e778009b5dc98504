"""Differentially private training for PyTorch with importance sampling."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpis.auditing.api import audit as audit
    from dpis.coupling.forbidden_layers import fix as fix
    from dpis.dropin import BatchMemoryManager as BatchMemoryManager
    from dpis.dropin import ModuleValidator as ModuleValidator
    from dpis.dropin import PrivacyEngine as PrivacyEngine
    from dpis.dropin import UnsupportedModuleError as UnsupportedModuleError
    from dpis.options import Privacy as Privacy
    from dpis.options import Training as Training
    from dpis.training import EarlyStop as EarlyStop
    from dpis.training import train as train

__version__ = "0.1.0"

_HOMES = {
    "BatchMemoryManager": "dpis.dropin",
    "EarlyStop": "dpis.training",
    "ModuleValidator": "dpis.dropin",
    "Privacy": "dpis.options",
    "PrivacyEngine": "dpis.dropin",
    "Training": "dpis.options",
    "UnsupportedModuleError": "dpis.dropin",
    "audit": "dpis.auditing.api",
    "fix": "dpis.coupling.forbidden_layers",
    "train": "dpis.training",
}
__all__ = [
    "BatchMemoryManager",
    "EarlyStop",
    "ModuleValidator",
    "Privacy",
    "PrivacyEngine",
    "Training",
    "UnsupportedModuleError",
    "__version__",
    "audit",
    "fix",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for: planning and verifying do without."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dpis' has no attribute {name!r}")
