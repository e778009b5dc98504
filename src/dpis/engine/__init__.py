"""The drop-in for a training loop that exists already."""

from dpis.engine.memory import BatchMemoryManager
from dpis.engine.module import PrivateModule
from dpis.engine.optimizer import PrivateOptimizer
from dpis.engine.privacy_engine import PrivacyEngine
from dpis.engine.session import MisuseError
from dpis.engine.validator import ModuleValidator

__all__ = [
    "BatchMemoryManager",
    "MisuseError",
    "ModuleValidator",
    "PrivacyEngine",
    "PrivateModule",
    "PrivateOptimizer",
]
