"""What leaks, measured: attacks on runs whose records are known, and lower bounds on epsilon from their success.

Data flows one way: canaries go through the product's own code; scores of canaries (`scores`) become guesses, and
guesses become bounds (`bounds`) that are compared with the claim's trade-off curve (`tradeoff`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpis.auditing.findings import Findings
from dpis.auditing.tradeoff import Curve

if TYPE_CHECKING:
    from dpis.auditing.canaries import Canaries
    from dpis.auditing.mechanism_audit import audit_mechanism
    from dpis.auditing.model_audit import audit_model

__all__ = ["Canaries", "Curve", "Findings", "audit_mechanism", "audit_model"]

_HOMES = {
    "Canaries": "dpis.auditing.canaries",
    "audit_mechanism": "dpis.auditing.mechanism_audit",
    "audit_model": "dpis.auditing.model_audit",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dpis.auditing' has no attribute {name!r}")
