"""Pictures are checked for what they say, not how they look."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from terapipe import Event, Op, Plan, Timeline, schedule
from terapipe.reporting import html, svg, text


def ideal(plan: Plan) -> Timeline:
    """A forward takes a second per token, a backward two, each rank one after the other."""
    events = []
    for rank, actions in enumerate(schedule(plan).ranks):
        clock = float(rank)
        for action in actions:
            if action.op in (Op.F, Op.B):
                seconds = action.slice.length * (1.0 if action.op is Op.F else 2.0)
                events.append(Event(rank, action, clock, clock + seconds))
                clock += seconds
    return Timeline.of(plan, events)


TIMELINE = ideal(Plan((1,), ((3, 1),), (0, 1, 2)))


def test_text_shows_each_slice_for_as_long_as_it_took() -> None:
    assert text.draw(TIMELINE, 13).splitlines() == ["rank 0 │0001BBAAAAAA·│", "rank 1 │·0001BBAAAAAA│"]


def test_text_on_a_common_scale_is_shorter() -> None:
    assert text.draw(TIMELINE, 26, scale=26.0).splitlines()[0] == "rank 0 │0001BBAAAAAA·│"
    with pytest.raises(ValueError, match="a width and a duration"):
        text.draw(TIMELINE, 0)


def test_svg_names_every_computation() -> None:
    root = ET.fromstring(svg.timelines({"One <way>": TIMELINE, "Another": TIMELINE}))
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * 8
    assert "backward: stage 1, microbatch 0, slice 0 (3 tokens), 6 s" in titles
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "One <way>" in words
    assert "13 s per step, 8% idle" in words


def test_svg_bars_are_to_scale() -> None:
    drawn = svg.timelines({"x": TIMELINE})
    widths = [float(w) for w in re.findall(r"<g>.*?width='([\d.]+)'", drawn)]
    assert widths[0] / widths[1] == pytest.approx(3.0, rel=1e-3)


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one computation"):
        svg.timelines({"x": Timeline(TIMELINE.plan, ())})
    with pytest.raises(ValueError, match="at least one finite value"):
        svg.lines({"loss": [float("nan")]}, "loss")


def test_lines_pass_over_what_is_not_finite() -> None:
    root = ET.fromstring(svg.lines({"loss": [3.0, float("nan"), 1.0]}, "loss"))
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 2


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = html.page(
        "T & co", "lead", [("Steps", html.table(["a"], [["<b>"]])), ("Lines", svg.lines({"": [1.0]}, "x"))]
    )
    html.write(tmp_path / "new" / "report.html", page)
    written = (tmp_path / "new" / "report.html").read_text()
    assert "T &amp; co" in written
    assert "<td>&lt;b&gt;</td>" in written
    assert not re.search(r"(src|href)=", written)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]
