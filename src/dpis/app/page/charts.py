"""Line and scatter charts as SVG inside a page: no script, the page's colours, marks that differ by shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpis.app.page.markup import Child, Markup, join, tag
from dpis.app.page.page import scrolled
from dpis.app.page.scales import Axis, linear_axis, log_axis, tick_text

WIDTH, HEIGHT = 480.0, 300.0
_LEFT, _TOP, _BOTTOM = 50.0, 32.0, 46.0
_LABEL_GAP, _CHARACTER = 17.0, 9.4
"""Room for labels at the size that phones get."""
STYLES = 6
"""So many series can be told apart by colour, shape and dash."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one group of points.

    Attributes:
        name: for the legend.
        points: x and y, finite.
        label: short, beside the line's end or the point; none if empty.
        group: for the legend instead of the name, once for all series of the group.
        style: 0 to `STYLES` - 1: colour and shape.
        hollow: drawn with hollow marks and a dotted line (figures of others).
        dashed: the line's dashes differ by style too.
    """

    name: str
    points: Sequence[tuple[float, float]]
    label: str = ""
    group: str = ""
    style: int = 0
    hollow: bool = False
    dashed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn.

    Attributes:
        key: unique in the page; letters, digits and hyphens.
        title: what is shown.
        note: what to see in it, in a sentence; or why there is nothing.
        x: name of the axis.
        y: name of the axis.
        lines: points are joined.
        x_ticks: instead of chosen ones.
        epochs: x counts from 1 in whole numbers.
        log_x: logarithmic.
        y_from_zero: zero is on the axis.
    """

    key: str
    title: str
    x: str
    y: str
    series: Sequence[Series]
    note: Child = None
    lines: bool = True
    x_ticks: tuple[float, ...] = ()
    epochs: bool = False
    log_x: bool = False
    y_from_zero: bool = False


def figure(chart: Chart) -> Markup:
    """The chart with title, legend, note and its numbers as a table."""
    drawn = [series for series in chart.series if series.points]
    heading = tag("h3", chart.title)
    if not drawn:
        why = chart.note or "Nothing to draw yet: not run."
        return tag("figure", heading, tag("p", why, class_="absent"))
    several = len(drawn) > 1
    return tag(
        "figure",
        heading,
        _svg(chart, drawn),
        _legend(chart, drawn) if several else None,
        tag("figcaption", chart.note) if chart.note else None,
        _numbers(chart, drawn),
    )


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────


def _svg(chart: Chart, drawn: Sequence[Series]) -> Markup:
    xs = [x for series in drawn for x, _ in series.points]
    ys = [y for series in drawn for _, y in series.points]
    longest = max(len(series.label) for series in drawn)
    right = WIDTH - (20 + _CHARACTER * longest if longest and chart.lines else 16)
    x_axis = _x_axis(chart, xs, right)
    y_axis = linear_axis(ys, HEIGHT - _BOTTOM, _TOP, from_zero=chart.y_from_zero)
    title, description = f"{chart.key}-title", f"{chart.key}-desc"
    return tag(
        "svg",
        tag("title", chart.title, id=title),
        tag("desc", _described(chart, drawn), id=description),
        _grid(chart, x_axis, y_axis),
        *(_marks(chart, series, x_axis, y_axis) for series in drawn),
        _labels(chart, drawn, x_axis, y_axis),
        class_="chart",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_labelledby=f"{title} {description}",
    )


def _x_axis(chart: Chart, xs: Sequence[float], right: float) -> Axis:
    inset = 0.0 if chart.epochs or chart.lines else 10.0
    if chart.log_x:
        return log_axis(xs, _LEFT + inset, right - inset)
    if chart.x_ticks:
        low, high = min(*xs, *chart.x_ticks), max(*xs, *chart.x_ticks)
        return Axis(low, high, chart.x_ticks, _LEFT + 8, right)
    return linear_axis(xs, _LEFT + 8, right, whole=chart.epochs)


def _grid(chart: Chart, x_axis: Axis, y_axis: Axis) -> Markup:
    left, right, bottom = f"{_LEFT:g}", f"{x_axis.end:.1f}", HEIGHT - _BOTTOM
    parts: list[Markup] = []
    for tick in y_axis.ticks:
        y = f"{y_axis(tick):.1f}"
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="rule"))
        parts.append(tag("text", tick_text(tick), x=_LEFT - 7, y=y, dy=".32em", text_anchor="end"))
    for tick in x_axis.ticks:
        x = f"{x_axis(tick):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, class_="axis"))
        parts.append(tag("text", tick_text(tick), x=x, y=bottom + 19, text_anchor="middle"))
    parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    middle = (_LEFT + x_axis.end) / 2
    parts.append(
        tag("text", chart.x, x=f"{middle:.1f}", y=HEIGHT - 6, text_anchor="middle", class_="name")
    )
    parts.append(tag("text", chart.y, x=2, y=13, class_="name"))
    return tag("g", *parts, class_="frame", aria_hidden="true")


def _marks(chart: Chart, series: Series, x_axis: Axis, y_axis: Axis) -> Markup:
    places = [(x_axis(x), y_axis(y)) for x, y in series.points]
    parts: list[Markup] = []
    if chart.lines and len(places) > 1:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(tag("polyline", points=points, class_="line"))
    dense = chart.lines and len(places) > 14
    for index, ((x, y), (value_x, value_y)) in enumerate(zip(places, series.points, strict=True)):
        if dense and index % (len(places) // 7) and index != len(places) - 1:
            continue
        hint = f"{series.name}: {chart.x} {value_x:g}, {chart.y} {value_y:.4g}"
        parts.append(tag("g", shape(series.style, x, y), tag("title", hint)))
    return tag("g", *parts, class_=_classes(series))


def shape(style: int, x: float, y: float, size: float = 4.5) -> Markup:
    """A mark: circle, square, triangle, diamond, triangle downwards, cross."""
    kind = style % STYLES
    if kind == 0:
        return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=size, class_="mark")
    corners = {
        1: ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        2: ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
        3: ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        4: ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
        5: (
            *((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4)),
            *((0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
        ),
    }[kind]
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return tag("polygon", points=points, class_="mark")


def _labels(chart: Chart, drawn: Sequence[Series], x_axis: Axis, y_axis: Axis) -> Markup:
    """Beside the last point of each line, or beside each point, moved apart where they would overlap."""
    ends = [(x_axis(s.points[-1][0]), y_axis(s.points[-1][1]), s) for s in drawn if s.label]
    ends.sort(key=lambda end: end[1])
    if chart.lines:
        places = spread([y for _, y, _ in ends], _LABEL_GAP, _TOP, HEIGHT - _BOTTOM)
    else:
        marks = [(x_axis(x) - 6, y_axis(y), 12.0) for s in drawn for x, y in s.points]
        places = free_places([_label_box(x, y, series) for x, y, series in ends], marks)
    texts = []
    for (x, _, series), y in zip(ends, places, strict=True):
        left = not chart.lines and _leftwards(x)
        texts.append(
            tag(
                "text",
                series.label,
                x=f"{x - 9 if left else x + 9:.1f}",
                y=f"{y:.1f}",
                dy=".32em",
                text_anchor="end" if left else None,
                class_=f"s{_n(series)}",
            )
        )
    return tag("g", *texts, class_="labels", aria_hidden="true")


def _leftwards(x: float) -> bool:
    """Points in the right half have their labels on the left, so that they stay in the drawing."""
    return x > (_LEFT + WIDTH) / 2


def _label_box(x: float, y: float, series: Series) -> tuple[float, float, float]:
    width = _CHARACTER * len(series.label)
    return (x - 9 - width if _leftwards(x) else x + 9), y, width


Box = tuple[float, float, float]
"""Left end, middle height, width."""


def free_places(labels: Sequence[Box], marks: Sequence[Box]) -> list[float]:
    """The nearest height for each label at which it hides no mark and no label before it."""
    taken: list[Box] = []

    def hides(left: float, y: float, width: float) -> bool:
        return any(
            abs(y - other_y) < reach and left < other + other_width and other < left + width
            for others, reach in ((taken, 15.0), (marks, 11.0))
            for other, other_y, other_width in others
        )

    for left, y, width in labels:
        shifts = (0, 6, -6, 12, -12, 18, -18, 24, -24, 30, -30)
        at = next((y + shift for shift in shifts if not hides(left, y + shift, width)), y)
        taken.append((left, at, width))
    return [y for _, y, _ in taken]


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places at least ``gap`` apart, moved as little as a few passes need, inside the bounds where they fit."""
    moved = list(places)
    for _ in range(60):
        for i in range(len(moved) - 1):
            short = gap - (moved[i + 1] - moved[i])
            if short > 0:
                moved[i] -= short / 2
                moved[i + 1] += short / 2
        if moved:
            moved[0], moved[-1] = max(moved[0], low), min(moved[-1], high)
    return moved


# ── words around it ──────────────────────────────────────────────────────────────────────────────────


def _n(series: Series) -> int:
    return series.style % STYLES


def _classes(series: Series) -> str:
    dashes = f" d{_n(series)}" if series.dashed else ""
    return f"s{_n(series)}{dashes}" + (" hollow" if series.hollow else "")


def _legend(chart: Chart, drawn: Sequence[Series]) -> Markup:
    def swatch(series: Series) -> Markup:
        line = tag("polyline", points="1,8 27,8", class_="line") if chart.lines else None
        mark = tag("g", line, shape(series.style, 14, 8), class_=_classes(series))
        return tag("svg", mark, viewBox="0 0 28 16", width=28, height=16, aria_hidden="true")

    named = {series.group or series.name: series for series in drawn}
    items = (tag("li", swatch(series), name) for name, series in named.items())
    return tag("ul", *items, class_="legend")


def _described(chart: Chart, drawn: Sequence[Series]) -> str:
    """For those who hear the page: what each line does from end to end."""
    said = [f"{chart.y} by {chart.x}."]
    for series in drawn:
        (x0, y0), (x1, y1) = series.points[0], series.points[-1]
        end = "" if len(series.points) == 1 else f", and {y1:.4g} at {x1:g}"
        said.append(f"{series.name}: {y0:.4g} at {x0:g}{end}.")
    return " ".join(said)


def _numbers(chart: Chart, drawn: Sequence[Series]) -> Markup:
    """Every number of the chart, folded away."""
    if chart.lines:
        columns = sorted({x for series in drawn for x, _ in series.points})
        head = [chart.x, *(series.name for series in drawn)]
        by_x = [dict(series.points) for series in drawn]
        body = [
            [f"{x:g}", *(f"{line[x]:.4g}" if x in line else "" for line in by_x)] for x in columns
        ]
    else:
        head = ["", chart.x, chart.y]
        body = [[s.name, f"{x:,.6g}", f"{y:.4g}"] for s in drawn for x, y in s.points]
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
        tag("tbody", *(tag("tr", *(tag("td", cell) for cell in line)) for line in body)),
        class_="numbers",
    )
    return tag("details", tag("summary", "The numbers"), scrolled(table, chart.title))


def figures(charts: Sequence[Chart]) -> Markup:
    """Charts side by side where there is room."""
    return tag("div", join(figure(chart) for chart in charts), class_="figures")


def over_epochs(
    key: str, title: str, y: str, series: Sequence[Series], *, zero: bool = True, note: Child = None
) -> Chart:
    """What a run did, epoch by epoch."""
    return Chart(
        key=key,
        title=title,
        x="epoch",
        y=y,
        series=series,
        epochs=True,
        y_from_zero=zero,
        note=note,
    )
