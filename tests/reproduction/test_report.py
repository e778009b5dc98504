import re

import pytest

from dpis.app.page.charts import figure
from dpis.errors import InputError
from reproduction.figures import (
    epsilon_charts,
    kappa_charts,
    noise_charts,
    work_charts,
)
from reproduction.noise_causes import causes_of
from reproduction.pages import render_page, render_text
from tests.app.page.html_checks import check_page
from tests.app.page.made_up import adaptive_history, many_rows, row
from tests.app.page.test_charts import HOSTILE


@pytest.fixture(scope="module")
def rows():
    return many_rows()


@pytest.fixture(scope="module")
def page(rows):
    return render_page(rows)


def plain(page):
    return " ".join(" ".join(check_page(page).text).split())


def test_the_page_shows_ours_beside_the_paper(page):
    shown = plain(page)
    assert "83.86 paper 86.6 −2.74 std 0.13, 3 seeds" in shown
    assert "89.16 paper 88.8 +0.36" in shown
    assert re.search(r'<span class="up">\+0\.36</span>', page)
    assert "DPSUR its accounting is disputed" in shown
    assert "not run paper 62.2" in shown


def test_the_page_says_where_all_comes_from(page, rows):
    shown = plain(page)
    assert f"{len(rows)} rows" in shown
    assert "Commits: 0000000" in shown
    assert "made up, 2 cores" in shown
    assert "4 h 30 min of wall time" in shown
    assert "dpis train imdb --method dpis-adaptive --epsilon 4 --seed 2" in shown


def test_without_rows_the_page_says_what_to_run():
    shown = plain(render_page([]))
    assert "Nothing has been run yet. Run python -m reproduction table3" in shown
    assert "not run paper 86.6" in shown
    assert "0 runs" in shown
    assert "Nothing has been run yet: run `python -m reproduction table3`" in render_text([])


def test_rows_that_are_not_counted_are_not_hidden():
    shown = plain(render_page([row(verified=False, command="dpis train this-one")]))
    assert "Not counted: 1 of 1 rows." in shown
    assert "dpis train this-one" in shown
    assert "50.00 not counted" in shown


def test_hostile_names_stay_text():
    hostile = dict.fromkeys(
        ("dataset", "recipe", "command", "commit", "machine", "method"), HOSTILE
    )
    one = row(**hostile, options={"clip_norm": HOSTILE})
    check_page(render_page([one, one]))
    check_page(
        render_page([row(recipe=HOSTILE, history=[{"epoch": HOSTILE}], claim={"x": HOSTILE})])
    )
    text = render_text([row(recipe="a|b`<i>\n# c")])
    assert "a\\|b\\`\\<i\\> # c" in text


def test_the_text_has_the_same_tables(rows):
    text = render_text(rows)
    assert "| DPIS (dpis-adaptive) | **81.86** (std 0.13; 3 seeds), paper 84.6, −2.74 |" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count(" | ") for line in table.splitlines()}) == 1


def test_noise_is_split_where_the_row_says_enough(rows):
    charts = list(noise_charts(rows))
    assert [len(chart.series) for chart in charts] == [3, 3, 3]
    assert "the other" in charts[2].note
    assert "The paper states 0.81 to 0.42" in charts[2].note


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"history": []}, "without epochs"),
        ({"claim": None}, "epsilon must be a number, found None"),
        ({"history": [{"sampling_rate": 0.1, "kappa": "much"}]}, "kappa must be a number"),
        ({"options": {"normalise": "channel"}}, "channel statistics"),
    ],
    ids=str,
)
def test_a_run_whose_noise_cannot_be_explained_says_why(changes, why):
    made = {"history": adaptive_history(4.0), **changes}
    odd = row(method="dpis-adaptive", epsilon=4.0, **made)
    with pytest.raises(InputError, match=why):
        causes_of(odd)
    if made["history"]:
        chart = list(noise_charts([odd]))[2]
        assert re.search(f"Not drawn, .* seed 1: .*{why}", str(figure(chart)))


def test_rows_of_the_figure_itself_come_first():
    short = adaptive_history(4.0, (1.0, 0.5))
    rows = [
        row(method="dpis-adaptive", epsilon=4.0, history=adaptive_history(4.0), seed=0),
        row(method="dpis-adaptive", epsilon=4.0, history=short, table="figure1", seed=7),
    ]
    chart = list(noise_charts(rows))[2]
    assert len(chart.series[0].points) == 2
    assert "2 epochs, seed 7" in chart.note


def test_other_figures_take_their_points_from_rows(rows):
    epsilon = {chart.key: chart for chart in epsilon_charts(rows)}
    ours = epsilon["epsilon-fmnist"].series[0].points
    assert ours[1] == (1.0, pytest.approx(83.86))
    assert epsilon["epsilon-cifar10"].series[0].points == []
    kappa = {chart.key: chart for chart in kappa_charts(rows)}
    assert [len(series.points) for series in kappa["kappa-fmnist"].series] == [16] * 5
    work = {chart.key: chart for chart in work_charts(rows)}["work-fmnist"]
    assert (310_000, pytest.approx(81.2)) in [series.points[0] for series in work.series]
    assert list(kappa_charts([])) == list(work_charts([])) == []


def test_work_and_accuracy_are_of_the_same_rows():
    older = row(seed=1, gradient_evaluations=9_000_000, options={"lr": 1.0})
    newer = row(seed=2, gradient_evaluations=1_000_000, options={"lr": 2.0}, test_accuracy=0.8)
    (chart,) = work_charts([older, newer, row(method="dp-sgd-hf")])
    assert [(1_000_000, pytest.approx(80.0))] in [series.points for series in chart.series]
