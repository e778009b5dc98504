"""Gradients of single records: their norms, and their weighted sums, at close to SGD's price."""

from dpis.gradients.fallback import SlowGradientsWarning
from dpis.gradients.record_gradients import Gradients, RecordGradients
from dpis.gradients.tape import Tape

__all__ = [
    "Gradients",
    "RecordGradients",
    "SlowGradientsWarning",
    "Tape",
]
