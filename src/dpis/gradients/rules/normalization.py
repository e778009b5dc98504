"""Scales and shifts of normalisation layers that do not couple records."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from dpis.gradients.factors import Dense
from dpis.gradients.layout import Layout
from dpis.gradients.rules.rule import Call, Factors, Rule, RuleTable, Watched


class Affine(Rule):
    """``y = scale ⊙ x̂ + shift``: ``d scale = Σ g ⊙ x̂``, ``d shift = Σ g`` over positions.

    The normalised input ``x̂`` is computed again: that is cheaper than keeping it.
    """

    reads_parameters = False

    scale_at: ClassVar[int]
    """The place of the scale among the arguments."""
    shift_at: ClassVar[int | None]
    """That of the shift; None: it has none."""

    def accepts(self, call: Call) -> bool:
        """The input is not itself a parameter."""
        return not call.wants(call.argument(0, "input"))

    def factors(self, saved: Call, watched: Watched) -> Factors:
        """Both gradients, one record at a time."""
        grad, layout = watched[0]
        scale = saved.argument(self.scale_at, "weight")
        shift = None if self.shift_at is None else saved.argument(self.shift_at, "bias")
        if saved.wants(scale):
            yield scale, self.summed(grad * self.normalised(saved), scale, layout)
        if shift is not None and saved.wants(shift):
            yield shift, self.summed(grad, shift, layout)

    @abstractmethod
    def normalised(self, call: Call) -> Tensor:
        """The input, normalised but not yet scaled."""

    @abstractmethod
    def summed(self, grads: Tensor, parameter: Tensor, layout: Layout) -> Dense:
        """Sum over all but the rows and the parameter's own dimensions."""


class LastDimensions(Affine):
    """Layers whose parameters have the shape of the last dimensions."""

    def summed(self, grads: Tensor, parameter: Tensor, layout: Layout) -> Dense:
        """Positions stand between the rows and the parameter's dimensions."""
        rows = layout.rows_first(grads)
        positions = rows.reshape(rows.shape[0], -1, *parameter.shape)
        return Dense(positions.squeeze(1) if positions.shape[1] == 1 else positions.sum(1))


class Channels(Affine):
    """Layers whose parameters have one entry a channel, the second dimension."""

    def summed(self, grads: Tensor, parameter: Tensor, layout: Layout) -> Dense:
        """Positions stand behind the channels."""
        rows = layout.rows_first(grads)
        return Dense(rows.reshape(*rows.shape[:2], -1).sum(2))


class LayerNorm(LastDimensions):
    """Normalised over the last dimensions."""

    scale_at, shift_at = 2, 3

    def normalised(self, call: Call) -> Tensor:
        """Centred, and divided by the standard deviation."""
        x, shape = call.argument(0, "input"), call.argument(1, "normalized_shape")
        return functional.layer_norm(x, shape, eps=call.argument(4, "eps", 1e-5))


class RMSNorm(LastDimensions):
    """Divided by the root mean square over the last dimensions."""

    scale_at, shift_at = 2, None

    def normalised(self, call: Call) -> Tensor:
        """Divided by the root mean square."""
        x, shape = call.argument(0, "input"), call.argument(1, "normalized_shape")
        return functional.rms_norm(x, shape, eps=call.argument(3, "eps"))


class GroupNorm(Channels):
    """Normalised over groups of channels and all positions of a record."""

    scale_at, shift_at = 2, 3

    def normalised(self, call: Call) -> Tensor:
        """Each group centred, and divided by its standard deviation."""
        x, groups = call.argument(0, "input"), call.argument(1, "num_groups")
        return functional.group_norm(x, groups, eps=call.argument(4, "eps", 1e-5))


class InstanceNorm(Channels):
    """Each channel of a record normalised by itself (or, in evaluation, by fixed statistics)."""

    scale_at, shift_at = 3, 4

    def normalised(self, call: Call) -> Tensor:
        """Each channel centred, and divided by its standard deviation."""
        x, own = call.argument(0, "input"), call.argument(5, "use_input_stats", True)
        statistics = (None, None) if own else _statistics(call)
        eps = call.argument(7, "eps", 1e-5)
        return functional.instance_norm(x, *statistics, use_input_stats=own, eps=eps)


class FrozenBatchNorm(Channels):
    """Batch normalisation by fixed statistics (evaluation mode); the watch refuses those of the batch."""

    scale_at, shift_at = 3, 4

    def normalised(self, call: Call) -> Tensor:
        """Centred and divided by the fixed statistics."""
        x, eps = call.argument(0, "input"), call.argument(7, "eps", 1e-5)
        return functional.batch_norm(x, *_statistics(call), training=False, eps=eps)


def _statistics(call: Call) -> tuple[Tensor | None, Tensor | None]:
    return call.argument(1, "running_mean"), call.argument(2, "running_var")


RULES: RuleTable = {
    functional.layer_norm: LayerNorm(),
    functional.rms_norm: RMSNorm(),
    functional.group_norm: GroupNorm(),
    functional.instance_norm: InstanceNorm(),
    functional.batch_norm: FrozenBatchNorm(),
}
