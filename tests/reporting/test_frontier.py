"""Step time against peak memory."""

import random
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from terapipe.reporting import svg
from terapipe.reporting.frontier import Box, label_boxes, pareto
from terapipe.reporting.palette import TONES

GIB = 2.0**30
POINTS = {"small": (2 * GIB, 3.0), "worse": (3 * GIB, 3.5), "fast": (8 * GIB, 1.0), "large": (20 * GIB, 0.5)}


def test_the_frontier_is_what_fits_and_none_beats() -> None:
    assert pareto(POINTS, 16 * GIB) == ["small", "fast"]
    assert pareto(POINTS) == ["small", "fast", "large"]
    assert pareto(POINTS, GIB) == []


def test_equal_points_are_named_once_on_the_frontier() -> None:
    assert pareto({"a": (1, 1), "b": (1, 1), "c": (1, 2)}) == ["a"]


def test_what_does_not_fit_is_pale() -> None:
    root = ET.fromstring(svg.frontier(POINTS, "peak memory", "step time", 16 * GIB))
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
    root = ET.fromstring(svg.frontier(points, "x", "y"))
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(texts.count(name) == 1 for name in points)


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        svg.frontier({}, "x", "y")
