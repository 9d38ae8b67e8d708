import json
from pathlib import Path

import pytest

from terapipe import Action, Event, Op, Plan, Timeline
from tests.support.costs import SimpleMemory

PLAN = Plan((1,), ((2, 2),), (0, 1, 2))
A, B = PLAN.slices


def example() -> Timeline:
    events = [
        Event(1, Action(Op.F, 1, A), 12.0, 14.0),
        Event(0, Action(Op.F, 0, A), 10.0, 12.0),
        Event(1, Action(Op.RECV_F, 1, A), 9.0, 12.0),
    ]
    return Timeline.of(PLAN, events)


def test_time_starts_with_the_first_computation() -> None:
    timeline = example()
    assert timeline.makespan == 4.0
    assert [e.start for e in timeline.computations] == [0.0, 2.0]
    assert timeline.idle == 0.5


def test_json_round_trip() -> None:
    assert Timeline.from_json(example().to_json()) == example()


def test_a_malformed_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="'plan' and 'events'"):
        Timeline.from_json("{}")


def test_a_timeline_draws_itself(tmp_path: Path) -> None:
    """Each method returns what it also writes. How drawings look is tested with reporting."""
    timeline = example()
    assert timeline.to_text(4).splitlines() == ["rank 0 │00··│", "rank 1 │··00│"]
    drawn = {
        "a.svg": timeline.to_svg(tmp_path / "a.svg"),
        "a.json": timeline.to_perfetto(str(tmp_path / "a.json")),
        "new/a.html": timeline.to_html(tmp_path / "new" / "a.html"),
    }
    for name, content in drawn.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == content
    assert drawn["a.svg"].startswith("<svg")
    assert json.loads(drawn["a.json"])["traceEvents"]
    assert "Idle time by cause" in drawn["new/a.html"]
    assert timeline.to_svg() == drawn["a.svg"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.html", "a.json", "a.svg", "new"]


def test_timelines_draw_on_one_scale() -> None:
    timeline = example()
    others = {"measured": timeline}
    page = timeline.to_html(title="Two runs", name="predicted", others=others, memory=SimpleMemory(), budget=5)
    assert "<h2>Predicted against measured</h2>" in page
    assert "<h2>Memory</h2>" in page
    assert "budget 5 B" in page
    assert "4 s per step, 50% idle" in page
    assert "measured" in timeline.to_svg(others=others)
    assert "measured" in timeline.to_perfetto(others=others)


def test_a_name_is_drawn_once() -> None:
    with pytest.raises(ValueError, match="different names, got 'step' twice"):
        example().to_svg(others={"step": example()})


def test_a_budget_needs_a_memory_model() -> None:
    with pytest.raises(ValueError, match="got 5 bytes and no memory model; give both"):
        example().to_html(budget=5)


def test_a_timeline_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    pytest.importorskip("font_roboto")
    picture = example().to_png(tmp_path / "a.png")
    assert picture.startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == picture
