"""The pages as a browser lays them out: on a phone, on a desk, on paper."""

import html
import json
import re
import shutil
import subprocess

import pytest

from dpis.app.page import read_run, render_run
from reproduction.pages import render_page

from .made_up import many_rows
from .test_run_page import make_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed"),
]

MEASURE = """
<script>
onload = () => {
  const facts = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const sizes = [...page.querySelectorAll("svg.chart")].map(chart => chart.getBoundingClientRect());
    const texts = [...page.querySelectorAll("svg.chart text")].map(text => {
      const inner = text.getBoundingClientRect(), outer = text.closest("svg").getBoundingClientRect();
      return Math.max(outer.left - inner.left, inner.right - outer.right);
    });
    return {
      name: frame.title, inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth,
      charts: sizes.length, smallest: Math.min(...sizes.map(size => Math.min(size.width, size.height))),
      widest: Math.max(...sizes.map(size => size.right)), overhang: Math.max(...texts),
      fetched: frame.contentWindow.performance.getEntriesByType("resource").length,
      ink: getComputedStyle(page.body).color, paper: getComputedStyle(page.body).backgroundColor,
    };
  });
  document.body.innerHTML = "<pre id=facts>" + JSON.stringify(facts) + "</pre>";
};
</script>
"""


def browse(profile, *arguments):
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    return {
        "run": render_run(read_run(run)),
        "reproduction": render_page(many_rows()),
        "empty": render_page([]),
    }


@pytest.fixture(scope="module")
def layouts(pages, tmp_path_factory):
    """Every page in frames of two widths, measured in one start of the browser."""
    folder = tmp_path_factory.mktemp("browser")
    frames = "".join(
        f'<iframe title="{name} {width}" style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in (360, 1200)
    )
    (folder / "all.html").write_text(f"<!DOCTYPE html><body>{frames}{MEASURE}")
    dom = browse(folder / "profile", "--dump-dom", f"file://{folder / 'all.html'}")
    found = re.search(r'<pre id="facts">(.*?)</pre>', dom, re.S)
    assert found, dom[-500:]
    return {fact["name"]: fact for fact in json.loads(html.unescape(found[1]))}


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["run", "reproduction", "empty"])
def test_a_page_fits_its_window(layouts, name, width):
    fact = layouts[f"{name} {width}"]
    assert fact["inner"] == width
    assert fact["scroll"] <= width
    assert fact["charts"] >= (3 if name == "run" else 4)
    assert fact["smallest"] > 150
    assert fact["widest"] <= width
    assert fact["overhang"] < 2  # no label is cut off
    assert fact["fetched"] == 0


def test_words_differ_from_their_background(layouts):
    for fact in layouts.values():
        ink, paper = (
            [int(n) for n in re.findall(r"\d+", fact[key])[:3]] for key in ("ink", "paper")
        )
        assert abs(sum(ink) - sum(paper)) > 450


@pytest.mark.parametrize("name", ["run", "reproduction"])
def test_a_page_prints(pages, tmp_path, name):
    page, paper = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(pages[name])
    browse(
        tmp_path / "profile",
        "--no-pdf-header-footer",
        f"--print-to-pdf={paper}",
        f"file://{page}",
    )
    contents = paper.read_bytes()
    assert contents.startswith(b"%PDF")
    sheets = len(re.findall(rb"/Type\s*/Page\b", contents))
    assert 1 <= sheets <= (4 if name == "run" else 14)
