"""What per-example gradients of one parameter look like, kept as small factors."""

from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.factor import Factor
from dpis.gradients.factors.lookup import Lookup
from dpis.gradients.factors.outer import Outer
from dpis.gradients.factors.sum import Sum

__all__ = ["Dense", "Factor", "Lookup", "Outer", "Sum"]
