"""What a record's gradient of one parameter looks like, kept as small factors."""

from dpis.gradients.factors.base import Factor
from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.lookup import Lookup
from dpis.gradients.factors.outer import Outer

__all__ = ["Dense", "Factor", "Lookup", "Outer"]
