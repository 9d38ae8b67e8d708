"""The page for a step: what it says. How it behaves is in test_browser."""

import json
import re
from typing import Any

import pytest

from terapipe import Plan, Timeline
from terapipe.reporting.page import peaks_by_column, report
from terapipe.reporting.view import RunView
from tests.unit.reporting.runs import stages, stepped, view

PLAN = Plan((1, 1), ((4, 2), (4, 2)), stages(2))
PREDICTED, MEASURED = view("predicted", stepped(PLAN)), view("measured", stepped(PLAN, 1.25))


def data(page: str) -> Any:
    found = re.search(r"<script type='application/json' id='timeline-data'>(.*?)</script>", page, re.DOTALL)
    assert found
    return json.loads(found[1])


def text(page: str) -> str:
    """What a reader sees, without tags."""
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def unpacked(row: list[int]) -> list[tuple[int, int, int]]:
    bars, clock = [], 0
    for code, gap, ticks in zip(row[::3], row[1::3], row[2::3], strict=True):
        bars.append((code, clock + gap, clock + gap + ticks))
        clock = bars[-1][2]
    return bars


def test_a_page_has_every_part() -> None:
    page = report("Step", "Lead.", [PREDICTED, MEASURED], facts={"tokens": "6"}, sections=[("More", "<p>own</p>")])
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["Timeline", "Predicted against measured", "Idle time by cause", "Memory", "Slices", "More"]
    assert "<dt>tokens</dt><dd>6</dd>" in page
    assert "<p>own</p>" in page
    assert not re.search(r"(src|href)=|url\((?!#)|https?://(?!www\.w3\.org)", page)


def test_parts_of_which_nothing_is_known_are_left_out() -> None:
    page = report("Step", "", [RunView("measured", PREDICTED.timeline)])
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Timeline", "The step", "Slices"]
    assert "peak" not in text(page)


def test_every_event_is_in_the_page() -> None:
    embedded = data(report("Step", "", [PREDICTED, MEASURED]))
    for run, given in zip(embedded["runs"], (PREDICTED, MEASURED), strict=True):
        timeline = given.timeline
        names = [name for name, *_ in embedded["ops"]]
        found = set()
        for rank, row in enumerate(run["bars"]):
            for code, start, end in unpacked(row):
                rest, op = divmod(code, len(names))
                number, stage = divmod(rest, run["stages"])
                s = PLAN.slices[number]
                times = round(start * embedded["tick"], 6), round(end * embedded["tick"], 6)
                found.add((rank, names[op], stage, s, *times))
        words = {"F": "forward", "B": "backward"}
        assert found == {
            (e.rank, words[e.action.op], e.action.stage, e.action.slice, e.start, e.end) for e in timeline.computations
        }
        assert run["lengths"] == [[4, 2], [4, 2]]
        # An output to rank 1 and a gradient to rank 0 for each of four slices, each half a second long.
        assert [len(unpacked(row)) for row in run["transfers"]] == [4, 4]


def test_a_transfer_with_one_recorded_end_is_shown_too() -> None:
    timeline = stepped(PLAN)
    for kept in ("SEND", "RECV"):
        events = tuple(e for e in timeline.events if not e.action.op.startswith("RECV" if kept == "SEND" else "SEND"))
        run = data(report("Step", "", [RunView("measured", Timeline(PLAN, events))]))["runs"][0]
        assert [len(unpacked(row)) for row in run["transfers"]] == [4, 4]


def test_predicted_and_measured_are_divided() -> None:
    words = text(report("Step", "", [PREDICTED, MEASURED]))
    assert re.search(r"predicted / measured 0\.8 1 0\.8 0\.8 1", words)


def test_other_runs_are_compared_with_the_fastest() -> None:
    words = text(report("Orders", "", [view("a", PREDICTED.timeline), view("b", MEASURED.timeline)]))
    assert "The runs" in words
    assert re.search(r"a [\d.]+ s 1\.00 x", words)
    assert re.search(r"b [\d.]+ s 1\.25 x", words)


def test_nothing_breaks_out_of_its_place() -> None:
    evil = "</script><script>alert(1)</script><!--' onload='x"
    run = RunView(evil, PREDICTED.timeline, [{evil: 1.0}] * 2, PREDICTED.memory)
    page = report(evil, evil, [run, MEASURED], facts={evil: evil})
    assert page.count("<script>") == 1
    assert page.count("</script>") == 2
    assert "<!--" not in page
    assert data(page)["runs"][0]["name"] == evil
    assert not re.search(r"<[^>]*' onload='x", page)


def test_idle_time_by_cause() -> None:
    page = report("Step", "", [PREDICTED])
    assert re.findall(r"title='(rank \d idle: [^']*)'", page) == [
        "rank 0 idle: drain 13 s",
        "rank 1 idle: fill 4.5 s, drain 8.5 s",
    ]


def test_idle_time_of_many_ranks_is_labeled_here_and_there() -> None:
    page = report("Step", "", [view("x", stepped(Plan((1,), ((1,),), stages(96))))])
    assert "class='ranks many'" in page
    rows = re.findall(r"<div title='rank (\d+) idle: [^']+'><span>(.*?)</span>", page)
    assert len(rows) == 96
    assert [label for _, label in rows if label][:3] == ["rank 0", "rank 6", "rank 12"]


def test_memory_names_peaks_budget_and_the_ranks_it_shows() -> None:
    words = text(report("Step", "", [PREDICTED], budget=16))
    assert words.count("budget 16 B") == 2
    assert words.count("12 B") >= 2
    far = text(report("Step", "", [PREDICTED], budget=2**30))
    assert "The budget of 1 GiB lies far above this scale." in far
    many = report("Step", "", [view("x", stepped(Plan((1,) * 9, ((1,),) * 9, stages(9), "1f1b")))])
    assert re.findall(r"aria-label='memory of (.*?)'", many) == [
        "rank 0, first and highest peak",
        "rank 4, middle",
        "rank 8, last",
    ]


def test_a_thinned_curve_keeps_its_peak_and_its_end() -> None:
    steps = [(i / 1000, 7.0 if i == 501 else i % 3) for i in range(1001)]
    kept = peaks_by_column(steps, 1.0, 50)
    assert len(kept) <= 2 * 51
    assert max(kept, key=lambda step: step[1]) == (0.501, 7.0)
    assert kept[-1] == steps[-1]
    assert kept == sorted(kept)


def test_microbatches_cut_alike_are_drawn_once() -> None:
    plan = Plan((1,) * 4, ((3, 1), (3, 1), (2, 2), (3, 1)), stages(2))
    page = report("Step", "", [view("x", stepped(plan))])
    words = text(page)
    assert "microbatches 0, 1, 3 &times; 3 1 sequence of 4 tokens, 2 slices of 1 to 3" in words
    assert "microbatch 2 1 sequence of 4 tokens, 2 slices of 2" in words
    assert "slice 1: 1 token after 3" in page


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        report("Step", "", [])
    with pytest.raises(ValueError, match="at least one computation, 'x' has none"):
        RunView("x", Timeline(PLAN, ()))
    with pytest.raises(ValueError, match="idle times are given for every rank or for none, got 1 for 2 ranks"):
        RunView("x", PREDICTED.timeline, [{}])
