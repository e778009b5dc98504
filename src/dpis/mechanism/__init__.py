"""The private mechanism: ``Config -> RunPlan -> Mechanism``, one step at a time."""

from typing import TYPE_CHECKING, Any

from dpis.mechanism.config import AdaptiveClipping, Config
from dpis.mechanism.journal import EventCounter, GroupJournal, Journal, LedgerJournal
from dpis.mechanism.run_plan import RunPlan, make_plan, plan_with_count
from dpis.options import Contribution, Method, NormSum

if TYPE_CHECKING:
    from dpis.mechanism.mechanism import Mechanism

__all__ = [
    "AdaptiveClipping",
    "Config",
    "Contribution",
    "EventCounter",
    "GroupJournal",
    "Journal",
    "LedgerJournal",
    "Mechanism",
    "Method",
    "NormSum",
    "RunPlan",
    "make_plan",
    "plan_with_count",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for: planning does without."""
    if name == "Mechanism":
        from dpis.mechanism.mechanism import Mechanism

        return Mechanism
    raise AttributeError(f"module 'dpis.mechanism' has no attribute {name!r}")
