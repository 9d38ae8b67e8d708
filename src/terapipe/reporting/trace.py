"""Runs as a trace-event file, which chrome://tracing and ui.perfetto.dev open."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from terapipe.reporting.shown import Shown
from terapipe.reporting.transfers import transfers
from terapipe.reporting.words import NAMES, TRANSFERS
from terapipe.scheduling.actions import COMPUTE
from terapipe.scheduling.timeline import Event

Record = dict[str, Any]

_LANES = 64  # thread numbers set aside for each rank: its computations, then as many lanes of transfers as it needs


def trace(shown: Sequence[Shown]) -> str:
    """JSON: a process for each run; in it, for each rank, a thread that computes and lanes for its transfers."""
    records = [record for pid, run in enumerate(shown, 1) for record in _run(pid, run)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": records}, separators=(",", ":"))


def _run(pid: int, shown: Shown) -> Iterator[Record]:
    yield _named("process_name", pid, 0, shown.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    lanes = _lanes(shown)
    ranks = shown.timeline.plan.num_ranks
    threads = {rank * _LANES: f"rank {rank}" for rank in range(ranks)}
    threads |= {
        lane: f"rank {lane // _LANES} transfers" + (f" {lane % _LANES}" if lane % _LANES > 1 else "")
        for lane in lanes.values()
        if lane % _LANES
    }
    for tid in sorted(threads):
        yield _named("thread_name", pid, tid, threads[tid])
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for event, tid in lanes.items():
        yield _duration(pid, tid, event)
    yield from _flows(pid, shown, lanes)
    yield from _memory(pid, shown)


def _lanes(shown: Shown) -> dict[Event, int]:
    """The thread of each event. Viewers need the events of a thread to be apart, so transfers may take several."""
    lanes: dict[Event, int] = {}
    free: dict[int, list[float]] = {}  # for each rank, when each of its lanes of transfers is free again
    for event in shown.timeline.events:
        if event.action.op in COMPUTE:
            lanes[event] = event.rank * _LANES
            continue
        ends = free.setdefault(event.rank, [])
        lane = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        lane = min(lane, _LANES - 2)
        ends[lane : lane + 1] = [event.end]
        lanes[event] = event.rank * _LANES + 1 + lane
    return lanes


def _duration(pid: int, tid: int, event: Event) -> Record:
    op, stage, s = event.action
    name = NAMES.get(op) or TRANSFERS[op]
    return {
        "ph": "X",
        "name": f"{name} {s}",
        "cat": "compute" if op in COMPUTE else "transfer",
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(event.start),
        "dur": _microseconds(event.end) - _microseconds(event.start),
        "args": {
            "stage": stage,
            "microbatch": s.microbatch,
            "slice": s.number,
            "tokens": s.length,
            "context": s.context,
        },
    }


def _flows(pid: int, shown: Shown, lanes: dict[Event, int]) -> Iterator[Record]:
    """An arrow from each send to its receive. It binds to the event in which it lies, so both ends must be inside."""
    numbers = count()
    for send, receive in transfers(shown.timeline):
        if send and receive:
            arrow = {"name": "transfer", "cat": "transfer", "id": f"{pid}.{next(numbers)}", "pid": pid}
            inside = (max(receive.start, min(send.start, receive.end)) + receive.end) / 2
            yield {"ph": "s", **arrow, "tid": lanes[send], "ts": _microseconds(send.start)}
            yield {"ph": "f", "bp": "e", **arrow, "tid": lanes[receive], "ts": _microseconds(inside)}


def _memory(pid: int, shown: Shown) -> Iterator[Record]:
    for rank, steps in enumerate(shown.memory):
        for at, size in steps:
            yield {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "pid": pid,
                "tid": rank * _LANES,
                "ts": _microseconds(at),
                "args": {"bytes": int(size)},
            }


def _named(kind: str, pid: int, tid: int, name: str) -> Record:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
