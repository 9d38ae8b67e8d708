"""Pictures are checked for what they say, not how they look."""

import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from terapipe import Event, Op, Plan, Timeline, files, schedule
from terapipe.reporting import charts, style, svg
from terapipe.reporting.charts import Point
from tests.unit.reporting.runs import crowd, stages, stepped

_SVG = "{http://www.w3.org/2000/svg}"


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


def words(drawn: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(drawn).iter(_SVG + "text")]


def test_the_key_says_what_numbers_in_bars_count() -> None:
    """Bars of whole sequences have the numbers of microbatches, and the key called them slices."""
    whole = ideal(Plan((1, 1), ((4,), (4,)), (0, 1, 2)))
    assert "numbers: microbatches" in words(svg.timelines({"whole": whole}))
    assert "numbers: slices or microbatches" in words(svg.timelines({"sliced": TIMELINE, "whole": whole}))


def test_a_legend_goes_on_in_the_next_row() -> None:
    parts, y = svg.legend([("forward", "#123456"), ("backward", "#654321")], 10, 30, right=100)
    assert y == 48
    texts = [ET.fromstring(part) for part in parts if part.startswith("<text")]
    assert [(e.get("x"), e.get("y"), e.text) for e in texts] == [
        ("28.0", "30.0", "forward"),
        ("28.0", "48.0", "backward"),
    ]


def test_timelines_name_every_computation() -> None:
    drawn = svg.timelines({"One <way>": TIMELINE, "Another": TIMELINE})
    titles = [e.text or "" for e in ET.fromstring(drawn).iter(_SVG + "title")]
    assert len(titles) == 2 * 8
    assert "backward: stage 1, microbatch 0, slice 0 (3 tokens), 6 s" in titles
    assert "forward: stage 0, microbatch 0, slice 1 (1 token after 3), 1 s" in titles
    assert {"One <way>", "13 s per step, 7.7% idle", "rank 0", "rank 1", "numbers: slices"} <= set(words(drawn))


def test_bars_are_to_scale() -> None:
    drawn = svg.timelines({"x": TIMELINE})
    widths = [float(w) for w in re.findall(r"<g>.*?width='([\d.]+)'", drawn)]
    assert widths[0] / widths[1] == pytest.approx(3.0, rel=1e-3)


def test_each_half_of_a_backward_has_its_color() -> None:
    whole, halves = Plan((1,), ((2, 2),), stages(2)), Plan((1,), ((2, 2),), stages(2), "terapipe-deferred")
    drawn = svg.timelines({"whole": stepped(whole), "halves": stepped(halves)})
    names = {"forward", "backward", "backward, inputs", "backward, weights", "idle"}
    assert names <= set(words(drawn))
    fills = re.findall(r"height='12.00' rx='2' fill='(.*?)'", drawn)
    assert len(set(fills)) == len(names)


def test_many_ranks_and_slices_stay_small_and_legible() -> None:
    timeline = crowd(64, 1000)
    drawn = svg.timelines({"large": timeline})
    root = ET.fromstring(drawn)
    assert float(root.attrib["height"]) < 800
    assert len(list(root.iter(_SVG + "rect"))) < len(timeline.computations) / 3
    ranks = [w for w in words(drawn) if w.startswith("rank")]
    assert ranks[:2] == ["rank 0", "rank 2"]
    assert "numbers: slices" not in words(drawn)


def test_bars_drawn_together_keep_the_shares_of_the_ops() -> None:
    """Of 800 forwards and 800 backwards, twice as long, on one rank: a third of the drawn bars are forwards."""
    plan = Plan((1,) * 800, ((1,),) * 800, stages(1), "1f1b")
    drawn = svg.timelines({"x": stepped(plan)})
    fills = [rect.split("fill=")[1] for rect in re.findall(r"<rect [^>]*height='34.00' fill='#\w+'", drawn)]
    assert len(set(fills)) == 2
    assert min(map(fills.count, set(fills))) / len(fills) == pytest.approx(1 / 3, abs=0.02)


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one computation"):
        svg.timelines({"x": Timeline(TIMELINE.plan, ())})


def test_pictures_follow_the_colors_of_a_page() -> None:
    """Every tone that a picture names has a rule in the style sheet, and no text has a fixed dark color."""
    drawn = (
        svg.timelines({"x": TIMELINE})
        + charts.lines({"a": [1, 2]}, "b")
        + charts.frontier({"a": (1, 1)}, ["a"], "x", "y", 3)
    )
    drawn += charts.curves({"a": [Point(1, 2, 1, 3)]}, "c")
    sheet = style.asset("page.css")
    for classes in re.findall(r"class='([\w ]+)'", drawn):
        assert all(re.search(rf"svg [\w]*\.{name} ", sheet) for name in classes.split())
    assert "fill='#1f2933'" not in re.sub(r"class='ink[^>]*", "", drawn)


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = style.page(
        "T & co", "lead", [("Steps", style.table(["a"], [["<b>"]])), ("Lines", charts.lines({"": [1.0]}, "x"))]
    )
    files.write(tmp_path / "new" / "report.html", page)
    written = (tmp_path / "new" / "report.html").read_text()
    assert "T &amp; co" in written
    assert "<td>&lt;b&gt;</td>" in written
    assert "default-src 'none'" in written
    assert not re.search(r"(src|href)=|url\((?!#)", written)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]


def test_a_picture_is_rendered_to_scale() -> None:
    pytest.importorskip("resvg_py")
    pytest.importorskip("font_roboto")
    drawn = svg.timelines({"x": TIMELINE})
    for scale in (1.0, 2.0):
        picture = svg.to_png(drawn, scale)
        assert picture.startswith(b"\x89PNG")
        assert struct.unpack(">I", picture[16:20]) == (960 * scale,)


def test_text_is_drawn_without_fonts_of_the_system() -> None:
    """The same picture without its words is another."""
    pytest.importorskip("resvg_py")
    pytest.importorskip("font_roboto")
    named, unnamed = charts.lines({"name": [1.0, 2.0]}, "label"), charts.lines({"    ": [1.0, 2.0]}, "     ")
    assert svg.to_png(named) != svg.to_png(unnamed)


@pytest.mark.parametrize("missing", ["resvg_py", "font_roboto"])
def test_a_missing_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install '\.\[png\]'"):
        svg.to_png(svg.timelines({"x": TIMELINE}))
