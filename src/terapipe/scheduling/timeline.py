"""Timelines: when each action of a step starts and ends, simulated or measured, and why ranks are idle."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from terapipe.planning.cost import Memory
from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, COPIES, Action, Op, completes, dependencies

Content = TypeVar("Content", str, bytes)


class Event(NamedTuple):
    """One action of one rank, with the time at which it began and ended."""

    rank: int
    action: Action
    start: float  # seconds since the step began
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, sorted by rank and start."""

    plan: Plan
    events: tuple[Event, ...]

    @classmethod
    def of(cls, plan: Plan, events: Iterable[Event]) -> Self:
        """Sorts the events and shifts them so that the first computation starts at zero."""
        listed = sorted(events, key=lambda e: (e.rank, e.start, e.end))
        zero = min((e.start for e in listed if e.action.op in COMPUTE), default=0.0)
        return cls(plan, tuple(e._replace(start=e.start - zero, end=e.end - zero) for e in listed))

    @cached_property
    def computations(self) -> tuple[Event, ...]:
        """The events without transfers and copies."""
        return tuple(e for e in self.events if e.action.op in COMPUTE)

    @cached_property
    def copies(self) -> tuple[Event, ...]:
        """The copies of offloaded slices to the host, and back."""
        return tuple(e for e in self.events if e.action.op in COPIES)

    @cached_property
    def by_rank(self) -> tuple[tuple[Event, ...], ...]:
        """The computations of each rank."""
        ranks: list[list[Event]] = [[] for _ in range(self.plan.num_ranks)]
        for event in self.computations:
            ranks[event.rank].append(event)
        return tuple(map(tuple, ranks))

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first computation to the end of the last."""
        return max((e.end for e in self.computations), default=0.0)

    @cached_property
    def idle(self) -> float:
        """The share of ``makespan * num_ranks`` in which ranks compute nothing: the bubble."""
        total = self.makespan * self.plan.num_ranks
        return 1.0 - sum(e.end - e.start for e in self.computations) / total if total else 0.0

    def to_json(self) -> str:
        """The timeline as JSON: ``from_json`` reads it."""
        events = [[e.rank, e.action.to_text(), e.start, e.end] for e in self.events]
        return json.dumps({"plan": self.plan.to_dict(), "events": events})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a timeline that ``to_json`` wrote.

        Args:
            text: The JSON.
        """
        try:
            data: Any = json.loads(text)
            plan = Plan.from_dict(data["plan"])
            rows = [(int(r), Action.from_text(a, plan), float(t0), float(t1)) for r, a, t0, t1 in data["events"]]
        except (TypeError, KeyError, json.JSONDecodeError, RecursionError):
            raise ValueError("a timeline is a JSON object with the keys 'plan' and 'events'") from None
        if any(not 0 <= rank < plan.num_ranks or not 0 <= end - start < inf for rank, _, start, end in rows):
            raise ValueError(f"a timeline has events of ranks 0 to {plan.num_ranks - 1} that end after they begin")
        return cls(plan, tuple(Event(*row) for row in rows))

    # Drawing. ``terapipe.reporting`` draws a Timeline and so imports this module: it is imported here when it is used.
    # ``others`` are timelines to draw with this one on the same time scale, for example a measured step by its
    # prediction: ``predicted.to_html("step.html", name="predicted", others={"measured": measured})``.

    def to_text(self, width: int = 100) -> str:
        """One line of text per rank. Digits are forwards, letters backwards, both by slice; dots are idle time."""
        from terapipe.reporting.text import draw

        return draw(self, width)

    def to_svg(
        self, path: Path | str | None = None, *, name: str = "step", others: Mapping[str, "Timeline"] = {}
    ) -> str:
        """An SVG picture with a row per rank, also written to ``path``."""
        from terapipe.reporting.svg import timelines

        return _write(path, timelines(self._with(name, others)))

    def to_png(
        self, path: Path | str | None = None, *, name: str = "step", others: Mapping[str, "Timeline"] = {}
    ) -> bytes:
        """The picture of ``to_svg`` as PNG, also written to ``path``. Needs the extra ``png``."""
        from terapipe.reporting.svg import to_png

        return _write(path, to_png(self.to_svg(name=name, others=others)))

    def to_perfetto(
        self, path: Path | str | None = None, *, name: str = "step", others: Mapping[str, "Timeline"] = {}
    ) -> str:
        """A trace for ui.perfetto.dev or chrome://tracing (JSON), also written to ``path``."""
        from terapipe.reporting.trace import trace
        from terapipe.reporting.view import RunView

        return _write(path, trace([RunView.of(*run) for run in self._with(name, others).items()]))

    def to_html(
        self,
        path: Path | str | None = None,
        *,
        title: str = "Pipeline step",
        name: str = "step",
        others: Mapping[str, "Timeline"] = {},
        memory: Memory | None = None,
        budget: int | None = None,
    ) -> str:
        """A self-contained interactive page, also written to ``path``: timeline, idle time by cause, slices.

        Given a memory model it also shows each rank's bytes over time, against a ``budget`` in bytes if there is one.
        """
        from terapipe.reporting.page import report
        from terapipe.reporting.style import seconds, share
        from terapipe.reporting.view import RunView

        if budget is not None and memory is None:
            raise ValueError(
                f"a budget is drawn with curves of memory, got {budget} bytes and no memory model; give both"
            )
        runs = [RunView.of(*run, memory) for run in self._with(name, others).items()]
        time, idle = seconds(self.makespan), share(self.idle)
        lead = f"{self.plan.order} on {self.plan.num_ranks} ranks: {time} per step, {idle} idle"
        return _write(path, report(title, lead, runs, budget=budget))

    def _with(self, name: str, others: Mapping[str, "Timeline"]) -> dict[str, "Timeline"]:
        if name in others:
            raise ValueError(f"timelines in one drawing need different names, got {name!r} twice; give another name=")
        return {name: self, **others}


def _write(path: Path | str | None, content: Content) -> Content:
    """The content, also written to the path if there is one."""
    if path is not None:
        from terapipe.files import write

        write(Path(path), content)
    return content


class Idle(NamedTuple):
    """Seconds in which one rank computes nothing, by cause."""

    fill: float = 0.0  # warm-up: waiting for the input of its first forward or first backward to be computed
    drain: float = 0.0  # after its last computation, while other ranks still work
    imbalance: float = 0.0  # later waits for an input that another rank is still computing
    transfer: float = 0.0  # the input is computed but has not arrived

    @property
    def total(self) -> float:
        """Seconds of all causes together."""
        return sum(self)


def idle_by_cause(timeline: Timeline) -> tuple[Idle, ...]:
    """One entry per rank. Their sum is the share ``timeline.idle`` of ``makespan * num_ranks``."""
    ends = {completes(e.action): e.end for e in timeline.computations}
    per_rank = []
    for events in timeline.by_rank:
        idle = Idle()
        clock = 0.0
        directions_seen: set[bool] = set()  # True: a forward has run, False: a backward has run
        for _, action, start, end in events:
            # A gap has two parts: until `ready` the input is being computed, from then on it is in transfer.
            gap = max(0.0, start - clock)
            ready = min(max(_ready(action, timeline, ends), clock), start)
            forward = action.op is Op.F
            computing = ready - clock if gap else 0.0
            if forward in directions_seen:
                idle = idle._replace(imbalance=idle.imbalance + computing)
            else:
                idle = idle._replace(fill=idle.fill + computing)
            idle = idle._replace(transfer=idle.transfer + gap - computing)
            directions_seen.add(forward)
            clock = max(clock, end)
        per_rank.append(idle._replace(drain=timeline.makespan - clock))
    return tuple(per_rank)


def _ready(action: Action, timeline: Timeline, ends: dict[Action, float]) -> float:
    """When the last computation that the action depends on ended, on any rank."""
    latest = 0.0
    for need in dependencies(action, timeline.plan):
        while need.op not in COMPUTE:  # follow a receive to its send, and that to the computation
            (need,) = dependencies(need, timeline.plan)
        latest = max(latest, ends.get(need, 0.0))
    return latest
