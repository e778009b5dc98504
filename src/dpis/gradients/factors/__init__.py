"""What per-example gradients of one parameter look like, kept as small factors."""

from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.factor import Compound, Factor
from dpis.gradients.factors.lookup import Lookup
from dpis.gradients.factors.outer import Outer

__all__ = ["Compound", "Dense", "Factor", "Lookup", "Outer"]
