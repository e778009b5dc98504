"""What loader, module and optimizer of one private loop share: the order of things, and the mechanism."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpis.errors import DpisError
from dpis.gradients import batches
from dpis.gradients.deferred import DeferredGradients, Pass, TapedGradients
from dpis.mechanism import Mechanism
from dpis.mechanism.mechanism import GradientSum
from dpis.sampling import Draw


class MisuseError(DpisError, RuntimeError):
    """A private loop was driven in an order that its guarantee does not cover. Nothing was released."""


class Session:
    """One draw, one forward pass for each of its rows, one backward pass, one release; then the next.

    Args:
        mechanism: releases one noisy gradient for every draw.
        gradients: the module, run now and asked for gradients later.
        mean: losses are means over the rows of a physical batch (else sums).
    """

    def __init__(self, mechanism: Mechanism, gradients: DeferredGradients, *, mean: bool) -> None:
        self.mechanism, self.gradients = mechanism, gradients
        self.stepping = False
        self._mean = mean
        self._taped = TapedGradients(gradients.parameters)
        self._ahead: deque[Draw] = deque()
        self._current: Draw | None = None
        self._passes: list[Pass] = []
        self._sum: GradientSum | None = None

    # ── the loader's side ────────────────────────────────────────────────────────────────────────────

    def begin_iteration(self) -> None:
        """A new pass over the loader is a new epoch; what was left of the last one is given up."""
        self._forget()
        self.mechanism.abandon_epoch()
        self.mechanism.begin_epoch(_no_full_pass)

    def draw(self) -> Draw:
        """The next batch's records, perhaps well before it is delivered."""
        draw = self.mechanism.draw_ahead()
        self._ahead.append(draw)
        return draw

    def deliver(self) -> None:
        """The oldest drawn batch goes to the loop."""
        if self._current is not None:
            raise MisuseError(
                "the next batch was taken before optimizer.step() was called for the last one: its noisy gradient was "
                "not released, and the plan counts a step for every batch. Call optimizer.step() for each, empty "
                "ones too, or break out of the loop"
            )
        self._current = self._ahead.popleft()
        self._sum = self.mechanism.start_sum(self._current)
        self._sum.start_from(self.gradients.parameters)

    # ── the module's side ────────────────────────────────────────────────────────────────────────────

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's outputs for a batch, or a part of it, open to gradients."""
        if self._current is None or self._sum is None:
            raise MisuseError(
                "the model was trained on a batch that did not come from the private loader: it was not sampled by "
                "independent coins, so no amplification can be claimed. Take batches from the loader that make_private "
                "returned; to evaluate, call model.eval() or use torch.no_grad()"
            )
        if batches.rows((args, dict(kwargs))) == 0:
            return self._run_empty(args, kwargs)
        passed = self.gradients.run(args, kwargs)
        known = self._sum.records + sum(p.rows for p in self._passes) + passed.rows
        if known > len(self._current):
            raise MisuseError(
                f"{len(self._current)} records were drawn for this step, and the model has now been run on {known}: a "
                "record would count twice, or was not drawn, and the clip norm would not bound its contribution. "
                "Run the model once on every row of the loader's batch before optimizer.step()"
            )
        self._passes.append(passed)
        return passed.outputs

    def _run_empty(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An empty batch has empty outputs; whatever their loss is, it reaches no parameter."""
        with torch.no_grad():
            outputs = self.gradients.module(*args, **kwargs)
        return batches.apply(lambda t: t.requires_grad_() if t.is_floating_point() else t, outputs)

    # ── the optimizer's side ─────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """`zero_grad`: gradients that have arrived are dropped; a forward pass without any goes on."""
        self._passes = [p for p in self._passes if not p.backward_done]

    def fold(self) -> None:
        """Add up what has arrived: the rows of a physical batch make room for the next."""
        assert self._sum is not None
        for passed in self._passes:
            if not passed.backward_done:
                raise MisuseError(
                    "optimizer.step() was called after a forward pass without backward: its records would be missing "
                    "from the sum. Call loss.backward() on the loss of these outputs first"
                )
            tape = passed.tape(float(passed.rows) if self._mean else 1.0)
            self._sum.add(self._taped, tape, None)
        self._passes = []

    def release(self) -> dict[str, Tensor]:
        """The noisy gradient of this step; the draw is used up."""
        if self._current is None or self._sum is None:
            raise MisuseError(
                "optimizer.step() without a batch: a step is accounted for every batch of the private loader, and this "
                "one was released already. Take the next batch first"
            )
        self.fold()
        missing = len(self._current) - self._sum.records
        if missing:
            raise MisuseError(
                f"{missing} of {len(self._current)} drawn records had no forward and backward pass: leaving some out "
                "by hand changes who is sampled. Run the model on the whole batch of the loader"
            )
        update = self.mechanism.release_sum(self._sum)
        self._current = self._sum = None
        return update

    def _forget(self) -> None:
        self._ahead.clear()
        self._passes = []
        self._current = self._sum = None


def _no_full_pass() -> Tensor:
    raise MisuseError("a loop that is not ours cannot be asked for the norms of all records")
