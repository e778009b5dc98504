"""What the claim leaves to an attacker who wants to know whether a record was in the training data; what one found."""

from __future__ import annotations

from collections.abc import Iterator

from dpis.accounting import Mode, Verdict
from dpis.accounting.workload import composition_of
from dpis.app.page.charts import Chart, Series, figure
from dpis.app.page.markup import Markup, tag
from dpis.app.page.page import box, facts
from dpis.app.page.run_files import RunReport
from dpis.auditing.findings import LOW_FALSE_POSITIVE_RATE, Findings, drawn_curve
from dpis.auditing.tradeoff import Curve


def membership(run: RunReport) -> Iterator[Markup]:
    """Derived from the ledger, and measured if the run was audited."""
    if run.verdict is None or run.problem is not None:
        yield tag("p", "Whatever the model shows: there is no claim that could be relied on.")
        return
    curve = curve_of_ledger(run.verdict)
    rate = float(curve.true_positive_rate(LOW_FALSE_POSITIVE_RATE)[0])
    yield tag(
        "p",
        "Whoever attacks, and whatever they know of all other records, the claim bounds how well they can tell whether "
        "one record was in the training data:",
    )
    yield facts(
        [
            ("Membership advantage (TPR - FPR), at most", f"{curve.advantage:.3g}"),
            (
                f"True positive rate at a false positive rate of {LOW_FALSE_POSITIVE_RATE:g}, at most",
                f"{rate:.3g}",
            ),
        ],
        "Membership inference",
    )
    if run.audit is not None:
        yield from _audited(run.audit)
    yield figure(_chart(run.verdict, curve, run.audit))


def curve_of_ledger(verdict: Verdict) -> Curve:
    """By the planned events; of an adaptive run, by (epsilon, delta) alone."""
    header = verdict.ledger.header
    if header.mode is Mode.PREDECLARED:
        return Curve.of_events(composition_of(header.planned))
    return Curve.of_claim(header.claim.epsilon, header.claim.delta)


def _audited(found: Findings) -> Iterator[Markup]:
    yield box(
        "bad" if found.refuted else "warn",
        "The claim does NOT survive the audit."
        if found.refuted
        else "The claim survives the audit.",
        f"{found.canaries:,} canaries were planted in this run, and attacked. That finds leaks; it cannot show that "
        "there are none.",
    )
    pairs = [("Epsilon, claimed", f"{found.epsilon:g}")]
    confidence = f"{100 * found.confidence:g} % confidence"
    pairs.append((f"Epsilon at least, with {confidence}", f"{found.bound:.3g}"))
    if found.curve_bound is not None:
        pairs.append(
            (f"The same by trade-off curves, with {confidence}", f"{found.curve_bound:.3g}")
        )
    pairs.append(("Estimate of epsilon: no bound", f"{found.estimate:.3g}"))
    if found.ceiling is not None:
        pairs.append(("The bound if all leaked that may", f"{found.ceiling:.3g}"))
    if found.guesses is not None:
        pairs.append(("Guesses that were right", f"{found.right:,} of {found.guesses:,}"))
    if found.accuracy is not None:
        audited, plain = found.accuracy
        shown = f"{100 * audited:.1f} % with canaries, {100 * plain:.1f} % without"
        pairs.append(("Accuracy", shown))
    yield facts(pairs, "Audit")


def _chart(verdict: Verdict, curve: Curve, found: Findings | None) -> Chart:
    claim = verdict.ledger.header.claim
    by_claim = drawn_curve(Curve.of_claim(claim.epsilon, claim.delta))
    series = [
        Series("(epsilon, delta) alone", _positive(by_claim), style=1),
        Series(
            "the events of this run, and of DP-SGD at the same rate and noise",
            _positive(drawn_curve(curve)),
        ),
        Series("guessing", [(x, x) for x, _ in _positive(by_claim)], style=2),
    ]
    if found is not None and found.attack_points:
        series.append(Series("the attack", _positive(found.attack_points), style=3, hollow=True))
    return Chart(
        key="tradeoff",
        title="What can be told, at most",
        x="false positive rate",
        y="true positive rate",
        series=series,
        note="No attack lies above the line of the events, but for chance. Sampling by importance moves no line.",
        log_x=True,
        y_from_zero=True,
    )


def _positive(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if x > 0]
