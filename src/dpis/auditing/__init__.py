"""What leaks, measured: attacks on runs whose records are known, and lower bounds on epsilon from their success.

Data flows one way: canaries go through the product's own code; scores of canaries (`scores`) become guesses, and
guesses become bounds (`bounds`) that are compared with the claim's trade-off curve (`tradeoff`).
"""

from typing import TYPE_CHECKING, Any

from dpis.auditing.findings import Findings
from dpis.auditing.tradeoff import Curve

if TYPE_CHECKING:
    from dpis.auditing.mechanism_audit import audit_mechanism

__all__ = ["Curve", "Findings", "audit_mechanism"]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for."""
    if name == "audit_mechanism":
        from dpis.auditing.mechanism_audit import audit_mechanism

        return audit_mechanism
    raise AttributeError(f"module 'dpis.auditing' has no attribute {name!r}")
