"""The one table: which rule treats which torch function."""

from dpis.gradients.rules import (
    broadcast,
    convolution,
    embedding,
    linear,
    normalization,
    recurrent,
)
from dpis.gradients.rules.rule import RuleTable

RULES: RuleTable = {
    **linear.RULES,
    **convolution.RULES,
    **embedding.RULES,
    **normalization.RULES,
    **broadcast.RULES,
    **recurrent.RULES,
}
