"""The results of the planner: a chosen plan with its prediction, and comparisons of plans."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe import files
from terapipe.planning.cost import Memory, by_side
from terapipe.planning.layout import Layout
from terapipe.planning.presets import GPTConfig
from terapipe.planning.slices import Plan
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import makespan, simulate
from terapipe.scheduling.timeline import Timeline
from terapipe.search.evaluator import PlanEstimate, pareto_front
from terapipe.search.request import Request
from terapipe.search.saved import SavedPlan, origin
from terapipe.search.source import ClusterSource, ProfileSource, Source

if TYPE_CHECKING:
    from terapipe.search.sensitivity import Sensitivity


@dataclass(frozen=True)
class PlanResult:
    """The chosen plan and its prediction. ``print`` it for an explanation; give ``plan`` to ``Pipeline``."""

    estimate: PlanEstimate
    runners_up: tuple[PlanEstimate, ...]  # the best of every other order, sliced and not, that fits; fastest first
    request: Request
    source: Source | None = None  # of the costs; None: a cost table
    price: float | None = None  # with a limit on distinct lengths: step time relative to that without the limit
    seconds: float = 0.0  # time that planning took
    reserve: float | None = None  # step time relative to that with all memory of a device, same order and layout

    @property
    def plan(self) -> Plan:
        return self.estimate.plan

    @property
    def layout(self) -> Layout:
        return self.estimate.layout

    @property
    def step_time(self) -> float:
        return self.estimate.step_time

    @property
    def idle(self) -> float:
        return self.estimate.idle

    @property
    def peak_bytes(self) -> int:
        return self.estimate.peak_bytes

    @property
    def unsliced(self) -> PlanEstimate | None:
        """The best plan with whole sequences, if there is one."""
        return next((e for e in (self.estimate, *self.runners_up) if not e.sliced), None)

    @property
    def budget(self) -> int | None:
        """Memory budget per device in bytes, if known."""
        return self.request.budget or (self.source.budget if self.source else None)

    @property
    def model_config(self) -> GPTConfig:
        """The shape that the costs are for."""
        source = self._known_source()
        assert isinstance(source, ClusterSource | ProfileSource)
        return source.config if isinstance(source, ClusterSource) else source.profile.config

    @property
    def memory(self) -> Memory:
        return self._known_source().memory(self.layout)

    def simulate(self) -> Timeline:
        """The Timeline of one step, without the work done once per step (gradient all-reduce, optimizer)."""
        cost = self._known_source().cost(self.layout)
        return simulate(schedule(self.plan), cost)

    @property
    def price_of_host(self) -> float:
        """The simulated step relative to one whose devices never wait for their hosts; 1 where hosts take no time."""
        device, host = by_side(self._known_source().cost(self.layout))
        if not host:
            return 1.0
        return makespan(self.plan, self._known_source().cost(self.layout))[0] / makespan(self.plan, device)[0]

    def sensitivity(self) -> "list[Sensitivity]":
        """How much slower the plan would be if a constant of the cluster were assumed wrong."""
        from terapipe.search.sensitivity import sensitivities

        source = self._known_source()
        if not isinstance(source, ClusterSource):
            raise ValueError("the costs of a profile were measured; sensitivity is of a described cluster")
        return list(sensitivities(source, self.request))

    def saved(self, profile: str | Path | None = None) -> SavedPlan:
        """The plan with its layout and costs. ``profile`` is the path of the profile that it was made with."""
        if self.source is None:
            return SavedPlan(self.plan, self.layout, step_time=self.step_time)
        costs = origin(self.source, None if profile is None else Path(profile))
        return SavedPlan(self.plan, self.layout, self.source.dtype, costs, self.budget, self.step_time)

    def save(self, path: str | Path, *, profile: str | Path | None = None) -> None:
        """Writes a file for ``terapipe train run.toml plan.file=PATH``, ``terapipe simulate PATH`` and
        ``Plan.from_json``."""
        files.write(Path(path), self.saved(profile).to_json() + "\n")

    def to_dict(self) -> dict[str, Any]:
        price = {} if self.price is None else {"price_of_distinct": self.price}
        if self.reserve is not None:
            price["price_of_reserve"] = self.reserve
        return {**self.estimate.to_dict(), "budget": self.budget, **price, "seconds_to_plan": self.seconds}

    def __str__(self) -> str:
        from terapipe.reporting.plans import explain

        return explain(self)

    def _known_source(self) -> Source:
        if self.source is None:
            raise ValueError("a cost table knows no memory and no transfers; plan with a Cluster or a Profile")
        return self.source


@dataclass(frozen=True)
class Comparison:
    """The best plan of every order, with slices and with whole sequences. ``print`` shows a table."""

    rows: tuple[PlanEstimate, ...]
    request: Request
    source: Source
    same_layout: bool = False  # whether all are in one layout, instead of each in its best one
    seconds: float = 0.0  # time that the comparison took

    @property
    def budget(self) -> int | None:
        """Memory budget per device in bytes, if known."""
        return self.request.budget or self.source.budget

    @property
    def where(self) -> str:
        """Name of the cluster or machine."""
        return self.source.name

    def __iter__(self) -> Iterator[PlanEstimate]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def front(self) -> list[PlanEstimate]:
        """The Pareto front of step time and peak memory, among those that fit."""
        return pareto_front(e for e in self.rows if e.fits)

    @property
    def fastest(self) -> PlanEstimate:
        """The fastest plan that fits."""
        return min(self.rows, key=lambda e: (not e.fits, e.step_time))

    @property
    def unsliced(self) -> PlanEstimate | None:
        """The fastest plan with whole sequences that fits, if there is one."""
        return min((e for e in self.rows if e.fits and not e.sliced), key=lambda e: e.step_time, default=None)

    def to_svg(self, path: str | Path | None = None) -> str:
        """A chart of step time against peak memory, also written to ``path`` if given."""
        from terapipe.reporting.plans import comparison_chart

        return _written(path, comparison_chart(self))

    def to_html(self, path: str | Path | None = None, model: str = "The model") -> str:
        """A page with chart and table, also written to ``path`` if given."""
        from terapipe.reporting.plans import comparison_page

        return _written(path, comparison_page(self, model))

    def __str__(self) -> str:
        from terapipe.reporting.plans import comparison_text

        return comparison_text(self)


def _written(path: str | Path | None, text: str) -> str:
    if path is not None:
        files.write(Path(path), text)
    return text


def timed(plan: Callable[[], PlanResult]) -> PlanResult:
    """Calls ``plan`` and records how long it took."""
    began = time.perf_counter()
    return replace(plan(), seconds=time.perf_counter() - began)
