"""The private mechanism: ``Config -> Plan -> Mechanism``, one step at a time."""

from dpis.mechanism.config import AdaptiveClipping, Config, Contribution, Method, NormSum
from dpis.mechanism.epoch_terms import Terms
from dpis.mechanism.journal import Journal, LedgerJournal, Unprotected
from dpis.mechanism.mechanism import Mechanism
from dpis.mechanism.plan import Plan, make_plan, plan_with_count

__all__ = [
    "AdaptiveClipping",
    "Config",
    "Contribution",
    "Journal",
    "LedgerJournal",
    "Mechanism",
    "Method",
    "NormSum",
    "Plan",
    "Terms",
    "Unprotected",
    "make_plan",
    "plan_with_count",
]
