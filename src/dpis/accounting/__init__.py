"""How much noise a budget asks for, and what a finished run has spent. Needs no torch.

Data flows one way: `Budget` and `Workload` go into a plan (`plan_predeclared`, `plan_adaptive`); the plan into a
`Header`; a `LedgerWriter` lets each event pass the header's guard and writes it down; `verify_ledger` recomputes
epsilon from the file alone.
"""

from dpis.accounting.adaptive import (
    AdaptivePlan,
    adaptive_step,
    next_grad_noise,
    plan_adaptive,
)
from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.events import Composition, Event, Gaussian, PoissonGaussian
from dpis.accounting.filter import Guard, PlannedSequence, RenyiFilter, Unguarded
from dpis.accounting.header import CountSource, Header, Mode, Norms, Unit
from dpis.accounting.ledger import Entry, Ledger, read_ledger
from dpis.accounting.ledger_writer import LedgerWriter
from dpis.accounting.norm_sums import NormSumBounds
from dpis.accounting.plans import (
    NoPrivacy,
    OpenEndedPlan,
    PrivacyPlan,
    Terms,
    epsilon_of_events,
)
from dpis.accounting.pld import epsilon_by_pld
from dpis.accounting.predeclared import PredeclaredPlan, plan_predeclared
from dpis.accounting.renyi import epsilon_by_rdp
from dpis.accounting.schedule import exponential_decay, kappa_schedule
from dpis.accounting.verification import Verdict, verify_ledger
from dpis.accounting.workload import Cadence, PlannedRun, Release, Workload
from dpis.options import Accountant

__all__ = [
    "Accountant",
    "AdaptivePlan",
    "Adjacency",
    "Budget",
    "Cadence",
    "Composition",
    "CountSource",
    "Entry",
    "Event",
    "Gaussian",
    "Guard",
    "Header",
    "Ledger",
    "LedgerWriter",
    "Mode",
    "NoPrivacy",
    "NormSumBounds",
    "Norms",
    "OpenEndedPlan",
    "PlannedRun",
    "PlannedSequence",
    "PoissonGaussian",
    "PredeclaredPlan",
    "PrivacyPlan",
    "Release",
    "RenyiFilter",
    "Terms",
    "Unguarded",
    "Unit",
    "Verdict",
    "Workload",
    "adaptive_step",
    "epsilon_by_pld",
    "epsilon_by_rdp",
    "epsilon_of_events",
    "exponential_decay",
    "kappa_schedule",
    "next_grad_noise",
    "plan_adaptive",
    "plan_predeclared",
    "read_ledger",
    "verify_ledger",
]
