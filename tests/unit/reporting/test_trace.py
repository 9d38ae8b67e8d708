"""The trace-event file."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from terapipe import Plan
from terapipe.reporting.trace import trace
from terapipe.reporting.view import RunView
from tests.unit.reporting.runs import stages, stepped, view

PLAN = Plan((1, 1), ((4, 2), (4, 2)), stages(2))
RUNS = [view("predicted", stepped(PLAN)), view("measured", stepped(PLAN, 1.25))]


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trace(RUNS))["traceEvents"]
    return found


def test_runs_are_processes_and_ranks_are_threads(records: list[dict[str, Any]]) -> None:
    names = [(r["name"], r["pid"], r["args"]["name"]) for r in records if r["ph"] == "M" and "name" in r["args"]]
    threads = ["rank 0", "rank 0 transfers", "rank 1", "rank 1 transfers"]
    assert [n for kind, _, n in names if kind == "process_name"] == ["predicted", "measured"]
    for pid in (1, 2):
        assert [n for kind, p, n in names if kind == "thread_name" and p == pid] == threads


def test_every_event_is_there_in_microseconds(records: list[dict[str, Any]]) -> None:
    durations = [r for r in records if r["ph"] == "X" and r["pid"] == 1]
    assert len(durations) == len(RUNS[0].timeline.events)
    first = durations[0]
    assert (first["name"], first["ts"], first["dur"]) == ("forward 0.0", 0.0, 4e6)
    second = next(r for r in durations if r["name"] == "forward 0.1" and r["tid"] == first["tid"])
    assert second["args"] == {"stage": 0, "microbatch": 0, "slice": 1, "tokens": 2, "context": 4}


def test_events_of_a_thread_lie_apart() -> None:
    """Long transfers overlap, so they need several lanes."""
    timeline = stepped(PLAN)
    longer = tuple(e._replace(end=e.end + 3.0) if e.action.op.startswith("RECV") else e for e in timeline.events)
    threads = defaultdict(list)
    for r in json.loads(trace([RunView("x", type(timeline).of(PLAN, longer))]))["traceEvents"]:
        if r["ph"] == "X":
            threads[r["tid"]].append((r["ts"], r["ts"] + r["dur"]))
    assert len(threads) > 4
    assert all(a[1] <= b[0] for spans in threads.values() for a, b in pairwise(sorted(spans)))


def test_arrows_lead_from_sends_to_receives(records: list[dict[str, Any]]) -> None:
    spans = {(r["pid"], r["tid"], r["ts"], r["ts"] + r["dur"]): r for r in records if r["ph"] == "X"}
    starts = {r["id"]: r for r in records if r["ph"] == "s"}
    ends = {r["id"]: r for r in records if r["ph"] == "f"}
    assert len(starts) == len(ends) == 2 * 8

    def around(r: dict[str, Any]) -> dict[str, Any]:
        (found,) = [s for (p, t, a, b), s in spans.items() if (p, t) == (r["pid"], r["tid"]) and a <= r["ts"] < b]
        return found

    for number, start in starts.items():
        send, receive = around(start), around(ends[number])
        assert send["name"].startswith("send")
        assert receive["name"].startswith("receive")
        assert send["name"].split()[-1] == receive["name"].split()[-1]
        assert start["ts"] <= ends[number]["ts"]


def test_memory_is_counted(records: list[dict[str, Any]]) -> None:
    counted = [r for r in records if r["ph"] == "C" and r["pid"] == 1 and r["name"] == "memory of rank 1"]
    assert max(r["args"]["bytes"] for r in counted) == 12
    assert len(counted) == len(RUNS[0].memory[1])
