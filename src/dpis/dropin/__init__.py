"""The drop-in for a training loop that exists already."""

from dpis.dropin.memory import BatchMemoryManager
from dpis.dropin.module import PrivateModule
from dpis.dropin.optimizer import PrivateOptimizer
from dpis.dropin.privacy_engine import PrivacyEngine
from dpis.dropin.validator import ModuleValidator, UnsupportedModuleError
from dpis.errors import MisuseError

__all__ = [
    "BatchMemoryManager",
    "MisuseError",
    "ModuleValidator",
    "PrivacyEngine",
    "PrivateModule",
    "PrivateOptimizer",
    "UnsupportedModuleError",
]
