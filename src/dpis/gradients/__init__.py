"""Gradients of single records: their norms, and their weighted sums, at close to SGD's price."""

from dpis.gradients.engine import Gradients, RecordGradients
from dpis.gradients.fallback import SlowGradientsWarning
from dpis.gradients.guards import Change, fix
from dpis.gradients.rules.base import CouplingError
from dpis.gradients.tape import Tape

__all__ = [
    "Change",
    "CouplingError",
    "Gradients",
    "RecordGradients",
    "SlowGradientsWarning",
    "Tape",
    "fix",
]
