"""The page in a browser: it draws, it answers the mouse and the keyboard, and it asks nobody for anything."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from terapipe import Plan, files
from terapipe.reporting.page import report
from terapipe.reporting.view import RunView
from tests.unit.reporting.browser import CHROMIUM, Browser
from tests.unit.reporting.runs import crowd, stages, stepped, view

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH")

PLAN = Plan((1,), ((400, 300, 200, 100),), stages(2))
FIRST = "forward: stage 0, microbatch 0, slice 0 (400 tokens), 0 to 400 ms"
TIP = "(t => t.hidden ? '' : t.firstChild.data + t.querySelector('b').textContent)(document.querySelector('.tip'))"

# The forwards on the first row: runs of pixels of one blue, as [left, right] in the window.
FORWARDS = """(() => {
  const canvas = document.querySelector("canvas"), place = canvas.getBoundingClientRect();
  const scale = canvas.width / place.width, runs = [];
  const copy = new OffscreenCanvas(canvas.width, 1).getContext("2d");
  copy.drawImage(canvas, 0, -Math.round(36 * scale));
  const row = copy.getImageData(0, 0, canvas.width, 1).data;
  for (let x = 1, from = 0; x <= canvas.width; x++) {
    if ([0, 1, 2].every(c => row[4 * x + c] === row[4 * from + c])) continue;
    const blue = row[4 * from + 2] > row[4 * from] + 60;
    if (blue && x - from > 5) runs.push([place.left + from / scale, place.left + x / scale]);
    from = x;
  }
  return runs;
})()"""
PLACE = "(box => [box.left, box.top, box.height])(document.querySelector('.plot').getBoundingClientRect())"
ROW = "document.querySelector('canvas').getBoundingClientRect().top + 36"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    runs = [view("predicted", stepped(PLAN, 0.001)), view("measured", stepped(PLAN, 0.0012))]
    files.write(tmp_path / "report.html", report("A step", "As it was.", runs, budget=1200))
    with Browser(tmp_path / "profile") as opened:
        opened.open(tmp_path / "report.html")
        yield opened
        assert opened.complaints() == []
        assert opened.requests() == [(tmp_path / "report.html").as_uri()]


def forwards(browser: Browser) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = browser.run(FORWARDS)
    return found


def test_the_timeline_answers(browser: Browser) -> None:
    """One browser for all of it: starting one is what takes time."""
    for ask in (_it_is_drawn, _hovering_names, _wheel_zooms, _drag_pans, _double_click_resets, _keys_walk, _transfers):
        ask(browser)


def _it_is_drawn(browser: Browser) -> None:
    widths = [right - left for left, right in forwards(browser)]
    assert len(widths) == 4
    assert (widths[0] + 2) / (widths[3] + 2) == pytest.approx(4.0, rel=0.1)  # two pixels are blurred edges


def _hover(browser: Browser, x: float, y: float) -> str:
    browser.mouse("mouseMoved", x, y)
    return str(browser.run(TIP))


def _hovering_names(browser: Browser) -> None:
    y, bars = browser.run(ROW), forwards(browser)
    assert _hover(browser, sum(bars[0]) / 2, y) == FIRST
    slice_2 = "forward: stage 0, microbatch 0, slice 2 (200 tokens after 700), 700 ms to 900 ms"
    assert _hover(browser, sum(bars[2]) / 2, y) == slice_2
    assert _hover(browser, bars[3][1] + 30, y) == ""
    assert _hover(browser, bars[0][0] + 30, y + 36) == ""  # rank 1 still waits


def _wheel_zooms(browser: Browser) -> None:
    y, bars = browser.run(ROW), forwards(browser)
    middle = sum(bars[1]) / 2
    browser.mouse("mouseWheel", middle, y, deltaX=0, deltaY=-150)
    wider = next(bar for bar in forwards(browser) if bar[0] < middle < bar[1])
    assert wider[1] - wider[0] > 1.4 * (bars[1][1] - bars[1][0])
    assert "slice 1" in _hover(browser, middle, y)


def _drag_pans(browser: Browser) -> None:
    y, before = browser.run(ROW), forwards(browser)
    x = sum(before[1]) / 2
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    for shift_cuts in (-10, -40):
        browser.mouse("mouseMoved", x + shift_cuts, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 40, y, button="left", clickCount=1)
    assert forwards(browser)[1][0] == pytest.approx(before[1][0] - 40, abs=3)


def _double_click_resets(browser: Browser) -> None:
    y = browser.run(ROW)
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, 500, y, button="left", clickCount=clicks)
    browser.run("0")
    _it_is_drawn(browser)


def _keys_walk(browser: Browser) -> None:
    browser.mouse("mouseMoved", 5, 5)
    browser.run("document.querySelector('.plot').focus()")
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Escape"):
        browser.key(key)
        told.append(browser.run(TIP))
    assert told[0] == FIRST
    assert "stage 0, microbatch 0, slice 1" in told[1]
    assert "forward: stage 1, microbatch 0, slice 0" in told[2]
    assert told[3] == ""


def _transfers(browser: Browser) -> None:
    """Between the rows, where the output of slice 0 goes from rank 0 to rank 1 within half a millisecond."""
    browser.run("document.querySelector('[name=transfers]').click()")
    y, bars = browser.run(ROW), forwards(browser)
    assert _hover(browser, bars[0][1] + 2, y + 38).startswith("output: from stage 0 to stage 1, microbatch 0, slice 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_color_scheme(browser: Browser, scheme: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    browser.until(lambda: len(forwards(browser)) == 4)


def test_it_fits_a_phone(browser: Browser) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    browser.until(lambda: browser.run("document.documentElement.scrollWidth") <= 360)
    # Drawn anew for this width, not only squeezed.
    browser.until(lambda: len(bars := forwards(browser)) == 4 and bars[-1][1] < 360)


def test_a_large_run_is_drawn_and_answers(tmp_path: Path) -> None:
    """96 ranks, on each of them more bars than pixels."""
    files.write(tmp_path / "large.html", report("Large", "", [RunView("x", crowd(96, 400))]))
    with Browser(tmp_path / "profile") as opened:
        opened.open(tmp_path / "large.html")
        left, top, height = opened.run(PLACE)
        assert height < 1000
        found = {_hover(opened, left + 400 + 7 * i, top + 120 + 7 * i).split(":")[0] for i in range(12)}
        assert found & {"forward", "backward"}
        assert opened.complaints() == []
