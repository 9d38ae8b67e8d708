"""The drawing in a terminal."""

import pytest

from terapipe import Plan
from terapipe.reporting import text
from tests.unit.reporting.runs import stages, stepped
from tests.unit.reporting.test_svg import TIMELINE


def test_each_slice_shows_for_as_long_as_it_took() -> None:
    assert text.draw(TIMELINE, 13).splitlines() == ["rank 0 │0001BBAAAAAA·│", "rank 1 │·0001BBAAAAAA│"]


def test_on_a_common_scale_it_is_shorter() -> None:
    assert text.draw(TIMELINE, 26, scale=26.0).splitlines()[0] == "rank 0 │0001BBAAAAAA·│"


def test_weight_halves_have_their_own_mark() -> None:
    drawn = text.draw(stepped(Plan((1,), ((2, 2),), stages(2), "terapipe-deferred")), 40)
    assert all(mark in drawn for mark in "01AB+")


def test_of_many_ranks_the_first_and_last_are_shown() -> None:
    drawn = text.draw(stepped(Plan((1,), ((1,),), stages(20))), 60, rows=5).splitlines()
    assert [line.split("│")[0].strip() for line in drawn] == [
        "rank  0",
        "rank  1",
        "rank  2",
        "⋮ 15 more ranks",
        "rank 18",
        "rank 19",
    ]
    assert len({line.index("│") for line in drawn if "│" in line}) == 1


def test_a_drawing_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a width, two rows and a duration, got 0 columns"):
        text.draw(TIMELINE, 0)
    with pytest.raises(ValueError, match="1 rows"):
        text.draw(TIMELINE, 10, rows=1)
