"""What the operator sees while a run goes on: public or released values, and the time left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dpis.accounting import Terms


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands. Nothing in it depends on the data beyond what was released.

    Attributes:
        terms: of the epoch under way.
        epochs: of the whole run.
        step: steps done.
        steps: of the whole run.
        fraction_spent: of the budget.
        metrics: on held-out data, as of the last epoch that ended.
    """

    terms: Terms
    epochs: int
    step: int
    steps: int
    fraction_spent: float
    metrics: Mapping[str, float]


class Reporter:
    """Is told how a run goes. This one says nothing: override what you want to hear of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step_done(self, standing: Standing) -> None:
        """After every step."""

    def epoch_done(self, standing: Standing) -> None:
        """After every epoch, with fresh metrics."""

    def note(self, text: str) -> None:
        """One line for the operator."""


class Silent(Reporter):
    """Says nothing, and never will."""


class ProgressBar(Reporter):
    """One line that moves, on a terminal; elsewhere one line an epoch."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=20),
            _Field("figures"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, epoch="", figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step_done(self, standing: Standing) -> None:
        """Move the bar."""
        self._bar.update(
            self._task,
            total=standing.steps,
            completed=standing.step,
            epoch=f"epoch {standing.terms.epoch}/{standing.epochs} step {standing.step}/{standing.steps}",
            figures=_figures(standing),
        )

    def epoch_done(self, standing: Standing) -> None:
        """Move the bar; where there is none, a line."""
        self.step_done(standing)
        if not self._console.is_terminal:
            self._console.print(
                f"epoch {standing.terms.epoch}/{standing.epochs}  {_figures(standing)}",
                highlight=False,
                soft_wrap=True,
            )

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)


def _figures(standing: Standing) -> str:
    terms = standing.terms
    parts = []
    if terms.noise_multiplier:
        parts += [
            f"noise {terms.grad_noise_multiplier:.3g}",
            f"kappa {terms.kappa:.2g}",
            f"budget {100 * standing.fraction_spent:.0f} %",
        ]
    parts += [
        f"held-out {name.replace('_', ' ')} {100 * value:.1f} %"
        if name == "accuracy"
        else f"held-out {name.replace('_', ' ')} {value:.4g}"
        for name, value in standing.metrics.items()
    ]
    return "  ".join(parts)


class _Field(ProgressColumn):
    """Text that may be cut, so that the bar stays on one line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def render(self, task: Task) -> Text:
        """The field's text."""
        return Text(str(task.fields[self._name]), overflow="ellipsis", no_wrap=True)
