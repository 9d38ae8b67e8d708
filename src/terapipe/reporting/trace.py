"""Runs as a trace-event file for Perfetto (ui.perfetto.dev, chrome://tracing), where millions of events can be
searched, measured and compared with a trace of torch's profiler.

    process   predicted                          a process for each run
      thread    rank 0             [F 0][F 1] ...        its computations
      thread    rank 0 transfers     [send ->            its sends, receives and copies, in as many threads as overlap
      thread    rank 1             ->[F 0] ...           an arrow from each send to its receive
      counter   memory of rank 0   bytes over time

The format is the JSON of Chrome's tracing: a list of records, of which ``ph`` says what each is ("X" an event with a
duration, "M" a name, "s" and "f" the ends of an arrow, "C" a counter). Times are microseconds.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from terapipe.reporting.style import OP_NAMES, TRANSFER_NAMES
from terapipe.reporting.view import RunView, transfers
from terapipe.scheduling.actions import COMPUTE, COPIES
from terapipe.scheduling.timeline import Event

Record = dict[str, Any]

_LANES = 64  # thread ids per rank: one for computations, the others for transfers


def trace(runs: Sequence[RunView]) -> str:
    """Writes runs as one JSON text. Their ids are chosen so that viewers sort runs and ranks as they are.

    Args:
        runs: Each becomes a process of the trace.
    """
    records = [record for pid, run in enumerate(runs, 1) for record in _process(pid, run)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": records}, separators=(",", ":"))


def _process(pid: int, run: RunView) -> Iterator[Record]:
    """All records of one run: names and order of its threads, then events, arrows and counters."""
    yield _name_event("process_name", pid, 0, run.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    lanes = _lanes(run)
    ranks = run.timeline.plan.num_ranks
    threads = {rank * _LANES: f"rank {rank}" for rank in range(ranks)}
    threads |= {
        lane: f"rank {lane // _LANES} transfers" + (f" {lane % _LANES}" if lane % _LANES > 1 else "")
        for lane in lanes.values()
        if lane % _LANES
    }
    for tid in sorted(threads):
        yield _name_event("thread_name", pid, tid, threads[tid])
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for event, tid in lanes.items():
        yield _duration(pid, tid, event)
    yield from _flows(pid, run, lanes)
    yield from _memory(pid, run)


def _lanes(run: RunView) -> dict[Event, int]:
    """The thread of each event. Viewers nest events of a thread that overlap as if one called the other, so transfers
    that overlap get threads of their own: each takes the first that is free, and the last takes what is left over."""
    lanes: dict[Event, int] = {}
    free: dict[int, list[float]] = {}  # per rank: when each of its transfer lanes is free again
    for event in run.timeline.events:
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
    """An event with what a viewer shows on a click: stage, microbatch, slice, its tokens and those before it."""
    op, stage, s = event.action
    name = OP_NAMES.get(op) or TRANSFER_NAMES[op]
    return {
        "ph": "X",
        "name": f"{name} {s}",
        "cat": "compute" if op in COMPUTE else "copy" if op in COPIES else "transfer",
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


def _flows(pid: int, run: RunView, lanes: dict[Event, int]) -> Iterator[Record]:
    """An arrow from each send to its receive. Viewers bind an end to the event around it, so both lie inside theirs.

        send      |==s=====|            s: the start of the send
        receive      |......f..|        f: between the send's start, or the receive's if that is later, and its end

    Args:
        pid: Of the run's process in the trace.
        run: With its transfers.
        lanes: The thread of each event.
    """
    numbers = count()
    for send, receive in transfers(run.timeline):
        if send and receive:
            arrow = {"name": "transfer", "cat": "transfer", "id": f"{pid}.{next(numbers)}", "pid": pid}
            inside = (max(receive.start, min(send.start, receive.end)) + receive.end) / 2
            yield {"ph": "s", **arrow, "tid": lanes[send], "ts": _microseconds(send.start)}
            yield {"ph": "f", "bp": "e", **arrow, "tid": lanes[receive], "ts": _microseconds(inside)}


def _memory(pid: int, run: RunView) -> Iterator[Record]:
    """A rank's bytes over time as a counter, which viewers draw as a curve."""
    for rank, steps in enumerate(run.memory):
        for at, size in steps:
            yield {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "pid": pid,
                "tid": rank * _LANES,
                "ts": _microseconds(at),
                "args": {"bytes": int(size)},
            }


def _name_event(kind: str, pid: int, tid: int, name: str) -> Record:
    """The record that names a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    """Seconds in the trace's unit, to the nanosecond: more digits would only make the file longer."""
    return round(seconds * 1e6, 3)
