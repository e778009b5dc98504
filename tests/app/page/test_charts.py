import itertools
import re

import pytest

from dpis.app.page.charts import Chart, Series, figure, free_places, spread
from dpis.app.page.markup import Markup, tag
from dpis.app.page.scales import linear_axis, log_axis, nice_step, tick_text

from .html_checks import Parsed

HOSTILE = "\"><script>alert(1)</script>&'</title></svg><img src=x onerror=a>"


def chart(series, **changes):
    fields = {"key": "c", "title": "T", "x": "epoch", "y": "noise", "series": series}
    return Chart(**{**fields, **changes})


def test_whatever_is_no_markup_is_escaped():
    assert tag("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert tag("p", Markup("<b>x</b>"), None, 3) == "<p><b>x</b>3</p>"
    assert tag("i", class_="a", hidden=True, id=None, off=False) == '<i class="a" hidden></i>'


@pytest.mark.parametrize("lines", [True, False])
def test_a_hostile_name_stays_text_everywhere_in_a_chart(lines):
    series = [Series(HOSTILE, [(1, 2.0), (2, 3.0)], HOSTILE, HOSTILE), Series("b", [(1, 1.0)])]
    made = figure(chart(series, title=HOSTILE, x=HOSTILE, y=HOSTILE, note=HOSTILE, lines=lines))
    parsed = Parsed(made)
    assert not {"script", "img"} & {name for name, _ in parsed.tags}
    assert HOSTILE in "".join(parsed.text)


def test_a_chart_says_what_it_shows_to_those_who_do_not_see_it():
    made = figure(chart([Series("ours", [(1, 0.81), (16, 0.42)])]))
    assert 'role="img"' in made
    assert 'aria-labelledby="c-title c-desc"' in made
    assert "ours: 0.81 at 1, and 0.42 at 16." in made
    assert "<td>0.42</td>" in made  # and as a table


def test_series_differ_by_more_than_colour():
    made = figure(chart([Series(f"s{i}", [(0, i), (1, i)], style=i) for i in range(6)]))
    groups = re.findall(r'<g class="(s\d d\d)">', made)
    assert len(set(groups)) == 6  # the dash follows d0..d5
    forms = {
        re.sub(r"[\d.]+", "#", form) for form in re.findall(r"<(?:circle|polygon)[^>]*>", made)
    }
    assert len(forms) >= 4


def test_marks_and_labels_stay_inside_the_drawing():
    series = [
        Series(f"s{i}", [(e, i) for e in range(1, 41)], "dpis-adaptive", style=i) for i in range(6)
    ]
    made = figure(chart(series, epochs=True))
    for x, y in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"', made):
        assert 0 <= float(x) <= 480
        assert 0 <= float(y) <= 300


def test_nothing_to_draw_is_said():
    assert "not run" in figure(chart([Series("ours", [])]))


@pytest.mark.parametrize("values", [[1.0], [0.0], [1e-9, 2e-9], [-3, 7], [0.3, 0.31], [1e6, 3e6]])
@pytest.mark.parametrize("from_zero", [True, False])
def test_an_axis_holds_its_values_between_round_ticks(values, from_zero):
    axis = linear_axis(values, 0, 100, from_zero=from_zero)
    assert 2 <= len(axis.ticks) <= 8
    for value in values:
        assert -1e-6 <= axis(value) <= 100 + 1e-6
    if from_zero:
        assert 0 <= axis(0) <= 100


@pytest.mark.parametrize(
    ("epochs", "ticks"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 6, 8)), (16, (1, 5, 10, 15))]
)
def test_epochs_have_whole_ticks(epochs, ticks):
    assert linear_axis([float(e) for e in range(1, epochs + 1)], 0, 9, whole=True).ticks == ticks


@pytest.mark.parametrize("values", [[5.0], [310_000, 2.3e6], [1, 1e9]])
def test_a_log_axis_holds_its_values(values):
    axis = log_axis(values, 0, 100)
    assert all(-1e-6 <= axis(value) <= 100 + 1e-6 for value in values)
    assert len(axis.ticks) >= 2


def test_steps_and_ticks_read_well():
    assert [nice_step(x) for x in (0.9, 1.1, 2.1, 3, 6)] == [1, 2, 2.5, 5, 10]
    assert [tick_text(x) for x in (0.5, 200_000, 1e6, 2.5e6, 2000)] == [
        "0.5",
        "200k",
        "1M",
        "2.5M",
        "2000",
    ]


def test_labels_are_moved_apart():
    places = spread([10, 10, 10], 17, 0, 100)
    assert all(b - a >= 16.9 for a, b in itertools.pairwise(places))
    assert spread([], 17, 0, 100) == []
    first, second = free_places([(0, 50, 40), (10, 50, 40)], [])
    assert abs(first - second) >= 12
    assert free_places([(0, 50, 40)], [(20, 50, 12)])[0] != 50
