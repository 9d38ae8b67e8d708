"""Charts are checked for what they say, not how they look."""

import random
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from terapipe.reporting import charts
from terapipe.reporting.charts import Box, Point, curves, label_boxes
from terapipe.reporting.style import TONES, memory
from tests.unit.reporting.test_svg import words

_SVG = "{http://www.w3.org/2000/svg}"
_LINE = _SVG + "polyline"
GIB = 2.0**30
POINTS = {"small": (2 * GIB, 3.0), "worse": (3 * GIB, 3.5), "fast": (8 * GIB, 1.0), "large": (20 * GIB, 0.5)}


def test_lines_pass_over_what_is_not_finite() -> None:
    drawn = charts.lines({"loss": [3.0, float("nan"), 1.25, float("inf")]}, "loss")
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


def test_groups_of_bars_share_one_scale() -> None:
    picture = charts.groups({"a": (1.0, 2.0), "b & c": (0.5, 4.0)}, ("published", "simulated"), "times")
    assert picture.count("<rect") == 1 + 1 + 2 + 4  # pattern, paper, legend, bars
    assert "b &amp; c" in picture
    with pytest.raises(ValueError, match="positive, finite"):
        charts.groups({"a": (0.0,)}, ("x",), "times")


def test_lines_need_a_finite_value() -> None:
    with pytest.raises(ValueError, match="at least one finite value"):
        charts.lines({"loss": [float("nan")]}, "loss")


def test_what_does_not_fit_is_pale() -> None:
    root = ET.fromstring(charts.frontier(POINTS, ["small", "fast"], "peak memory", "step time", 16 * GIB))
    texts = {e.text: e.attrib for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"peak memory", "step time", "budget 16 GiB"} <= set(texts)
    assert {name: texts[name]["fill"] for name in POINTS} == {
        "small": TONES["ink"],
        "worse": TONES["faint"],
        "fast": TONES["ink"],
        "large": TONES["pale"],
    }
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "fast: 8 GiB, 1 s" in titles


@pytest.mark.parametrize("seed", range(5))
def test_names_do_not_lie_on_each_other(seed: int) -> None:
    dice = random.Random(seed)
    placed = {f"candidate {i}": (dice.uniform(90, 900), dice.uniform(40, 350)) for i in range(25)}
    placed["twin"] = placed["candidate 0"]
    boxes = label_boxes(placed)
    assert all(a.overlap(b) == 0 for a, b in combinations(boxes.values(), 2))
    assert all(box.overlap(Box(x - 5, y - 5, x + 5, y + 5)) == 0 for box in boxes.values() for x, y in placed.values())


@pytest.mark.parametrize("points", [{"one": (1.0, 1.0)}, {"a": (0.0, 0.0)}, {"a": (1.0, 2.0), "b": (1.0, 2.0)}])
def test_few_or_equal_points_are_drawn(points: dict[str, tuple[float, float]]) -> None:
    root = ET.fromstring(charts.frontier(points, list(points)[:1], "x", "y"))
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(texts.count(name) == 1 for name in points)


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        charts.frontier({}, [], "x", "y")
