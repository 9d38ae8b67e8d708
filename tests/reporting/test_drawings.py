"""Pictures are checked for what they say, not how they look."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from terapipe import Event, Op, Plan, Timeline, files, schedule
from terapipe.reporting import html, svg
from terapipe.reporting.charts import Point, curves
from terapipe.reporting.units import memory
from tests.reporting.runs import crowd, stages, stepped

_SVG = "{http://www.w3.org/2000/svg}"
_LINE = _SVG + "polyline"


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


def test_each_half_of_a_backward_has_its_colour() -> None:
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
    with pytest.raises(ValueError, match="at least one finite value"):
        svg.lines({"loss": [float("nan")]}, "loss")


def test_lines_pass_over_what_is_not_finite() -> None:
    drawn = svg.lines({"loss": [3.0, float("nan"), 1.25, float("inf")]}, "loss")
    (line,) = ET.fromstring(drawn).iter(_SVG + "polyline")
    assert len(line.attrib["points"].split()) == 2
    assert "loss 1.25" in words(drawn)


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(x, y, y, y) for x, y in pairs]


def test_curves_have_each_its_own_steps_on_one_scale() -> None:
    drawn = curves({"training": points((1, 8), (2, 6), (3, 5), (5, 4)), "evaluation": points((3, 7))}, "loss")
    root = ET.fromstring(drawn)
    first, second = ([tuple(map(float, p.split(","))) for p in e.attrib["points"].split()] for e in root.iter(_LINE))
    assert second[0][0] == first[2][0]
    assert first[0][0] < first[1][0] < first[3][0]
    assert (first[3][0] - first[2][0]) == pytest.approx(2 * (first[1][0] - first[0][0]), abs=0.2)
    assert first[0][1] < second[0][1] < first[1][1]
    assert len(list(root.iter(_SVG + "circle"))) == 5
    assert {"loss", "training 4", "evaluation 7", "step", "1", "2", "5", "8"} <= set(words(drawn))


def test_a_curve_of_means_has_a_band_from_lowest_to_highest() -> None:
    drawn = curves({"": [Point(x, 2, 1, 3) for x in range(100)]}, "x", zero=True)
    (band,) = ET.fromstring(drawn).iter(_SVG + "polygon")
    assert len(band.attrib["points"].split()) == 200
    assert "<circle" not in drawn  # too many to show each
    assert "0" in words(drawn)
    assert "<polygon" not in curves({"": points((1, 2), (2, 3))}, "x")


def test_what_lies_above_the_scale_is_drawn_at_its_edge() -> None:
    drawn = curves({"": points((1, 1), (2, 900), (3, 2))}, "x", zero=True, top=4)
    (line,) = ET.fromstring(drawn).iter(_LINE)
    heights = [float(p.split(",")[1]) for p in line.attrib["points"].split()]
    assert heights[1] == 50.0
    assert heights[0] > heights[2] > heights[1]
    assert "800" not in words(drawn)


@pytest.mark.parametrize("value", [0.0, 3e-4, -2.0, 5.0e9])
def test_a_curve_may_be_flat_or_a_single_point(value: float) -> None:
    for given in (points((7, value)), points((7, value), (8, value))):
        for zero in (False, True):
            assert "nan" not in curves({"a": given, "b": []}, "x", zero=zero)


def test_a_long_legend_takes_several_rows_and_the_scale_counts_in_its_unit() -> None:
    shown = {f"rank {i}": points((1, i * 2.0**28), (2, i * 2.0**28)) for i in range(1, 7)}
    drawn = curves(shown, "in use", memory, unit=2.0**30, zero=True, width=300)
    places = {e.attrib["y"] for e in ET.fromstring(drawn).iter(_SVG + "text") if (e.text or "").startswith("rank")}
    assert len(places) > 1
    assert {"512 MiB", "1 GiB"} <= set(words(drawn))


def test_curves_of_nothing_are_refused() -> None:
    for given in ({}, {"a": []}, {"a": points((1, float("nan")))}):
        with pytest.raises(ValueError, match="at least one point and finite values"):
            curves(given, "x")


def test_pictures_follow_the_colours_of_a_page() -> None:
    """Every tone that a picture names has a rule in the style sheet, and no text has a fixed dark colour."""
    drawn = svg.timelines({"x": TIMELINE}) + svg.lines({"a": [1, 2]}, "b") + svg.frontier({"a": (1, 1)}, "x", "y", 3)
    drawn += curves({"a": [Point(1, 2, 1, 3)]}, "c")
    sheet = html.asset("page.css")
    for classes in re.findall(r"class='([\w ]+)'", drawn):
        assert all(re.search(rf"svg [\w]*\.{name} ", sheet) for name in classes.split())
    assert "fill='#1f2933'" not in re.sub(r"class='ink[^>]*", "", drawn)


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = html.page(
        "T & co", "lead", [("Steps", html.table(["a"], [["<b>"]])), ("Lines", svg.lines({"": [1.0]}, "x"))]
    )
    files.write(tmp_path / "new" / "report.html", page)
    written = (tmp_path / "new" / "report.html").read_text()
    assert "T &amp; co" in written
    assert "<td>&lt;b&gt;</td>" in written
    assert "default-src 'none'" in written
    assert not re.search(r"(src|href)=|url\((?!#)", written)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]


def test_groups_of_bars_share_one_scale() -> None:
    picture = svg.groups({"a": (1.0, 2.0), "b & c": (0.5, 4.0)}, ("published", "simulated"), "times")
    assert picture.count("<rect") == 1 + 1 + 2 + 4  # pattern, paper, legend, bars
    assert "b &amp; c" in picture
    with pytest.raises(ValueError, match="positive, finite"):
        svg.groups({"a": (0.0,)}, ("x",), "times")
