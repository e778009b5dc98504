"""The private mechanism: ``Config -> RunPlan -> Mechanism``, one step at a time."""

from dpis.mechanism.config import AdaptiveClipping, Config
from dpis.mechanism.journal import EventCounter, Journal, LedgerJournal
from dpis.mechanism.mechanism import Mechanism
from dpis.mechanism.run_plan import RunPlan, make_plan, plan_with_count
from dpis.options import Contribution, Method, NormSum

__all__ = [
    "AdaptiveClipping",
    "Config",
    "Contribution",
    "EventCounter",
    "Journal",
    "LedgerJournal",
    "Mechanism",
    "Method",
    "NormSum",
    "RunPlan",
    "make_plan",
    "plan_with_count",
]
