"""The results of the planner: a chosen plan with its prediction, its one saved form, and comparisons of plans.

    to_json:  {plan ..., "planned": {layout, costs, budget, step_time, once, documents, ...}}
                 |            |
        Plan.from_json    PlanResult.from_json

What a file holds beside the plan lets it be simulated again (``costs``: a whole description of a cluster, or a
profile's path and checksum) and a run go on alike where the profile is gone (``once``, ``documents``).
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from terapipe import files
from terapipe.planning.cost import Memory, by_side, with_recompute
from terapipe.planning.documents import DocumentCosts
from terapipe.planning.hardware import Cluster, Host
from terapipe.planning.layout import Layout
from terapipe.planning.limits import check_whole_number
from terapipe.planning.presets import FrozenLayers, GPTConfig, LayerBytes
from terapipe.planning.profile import Profile
from terapipe.planning.recompute import recompute_title
from terapipe.planning.slices import PLANNED, Plan
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import makespan, simulate
from terapipe.scheduling.timeline import Timeline
from terapipe.search.evaluator import PlanEstimate, pareto_front
from terapipe.search.request import Request
from terapipe.search.rivals import Rival
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
    saved: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the details of a loaded file
    missing: str = field(default="", repr=False)  # why there is no source

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
        source = self.known_source()
        assert isinstance(source, ClusterSource | ProfileSource)
        return source.config if isinstance(source, ClusterSource) else source.profile.config

    @property
    def memory(self) -> Memory:
        return self.known_source().memory(self.layout)

    def simulate(self) -> Timeline:
        """The Timeline of one step, without the work done once per step (gradient all-reduce, optimizer)."""
        cost = self.known_source().cost(self.layout)
        return simulate(schedule(self.plan), cost)

    @property
    def price_of_host(self) -> float:
        """The simulated step relative to one whose devices never wait for their hosts; 1 where hosts take no time."""
        device, host = by_side(self.known_source().cost(self.layout))
        if not host:
            return 1.0
        return makespan(self.plan, self.known_source().cost(self.layout))[0] / makespan(self.plan, device)[0]

    def sensitivity(self) -> "list[Sensitivity]":
        """How much slower the plan would be if a constant of the cluster were assumed wrong."""
        from terapipe.search.sensitivity import sensitivities

        source = self.known_source()
        if not isinstance(source, ClusterSource):
            raise ValueError("the costs of a profile were measured; sensitivity is of a described cluster")
        return list(sensitivities(source, self.request))

    @property
    def predicted(self) -> bool:
        """Whether step time and memory were predicted. They were not for slices that were cut without any costs."""
        return not isnan(self.step_time)

    @property
    def dtype(self) -> str | None:
        """The dtype of parameters and activations, if the costs tell."""
        return self.source.dtype if self.source else self.saved.get("dtype")

    @property
    def once(self) -> float:
        """Seconds of the step that come once, however many batches are accumulated: all-reduce and optimizer."""
        if "once" in self.saved or self.source is None:
            return float(self.saved.get("once", 0.0))
        return max(0.0, self.step_time - makespan(self.plan, self.source.cost(self.layout))[0])

    @property
    def document_costs(self) -> DocumentCosts | None:
        """What packed documents cost, by the same costs as the plan. None if they are not known."""
        if "documents" in self.saved or self.source is None:
            costs = self.saved.get("documents")
            return None if costs is None else DocumentCosts(*costs)
        cost = with_recompute(self.source.cost(self.layout), self.plan.recompute_modes[-1])
        return DocumentCosts.of(cost, self.plan)

    def step_time_of(self, batches: int) -> float | None:
        """Predicted seconds of a step that accumulates so many batches, or None."""
        return (self.step_time - self.once) * batches + self.once if self.predicted else None

    @classmethod
    def of_plan(cls, plan: Plan, layout: Layout, **saved: Any) -> Self:
        """A plan whose step time nobody predicted.

        Args:
            plan: The plan of one replica.
            layout: The layout around it.
            saved: What else is known of it, as ``to_json`` writes it: ``dtype``, ``documents``.
        """
        request = Request(plan.batch_size * layout.dp, plan.seq_len, **asdict(layout))
        return cls(PlanEstimate(layout, plan, nan, nan, 0, True), (), request, saved=saved, missing=NO_COSTS)

    def to_json(self, *, profile: str | Path | None = None, **notes: Any) -> str:
        """The one saved form of a plan. ``Plan.from_json`` reads the same text and returns only the plan.

        Args:
            profile: The path of the profile that the plan was made with. Its costs are read from there again.
            notes: More to save. ``saved`` of the loaded result has it.
        """
        costs = self.saved.get("costs", {})
        if self.source is not None and "costs" not in self.saved:
            costs = origin(self.source, None if profile is None else Path(profile))
        estimate = self.estimate
        details = {
            **self.saved, "layout": asdict(self.layout), "dtype": self.dtype, "costs": dict(costs),
            "budget": self.budget, "step_time": estimate.step_time, "idle": estimate.idle,
            "peak_bytes": estimate.peak_bytes, "host_bytes": estimate.host_bytes, "fits": estimate.fits,
            "once": self.once,
            "documents": self.document_costs, "min_slice": self.request.min_slice, "tile": self.request.tile, **notes,
        }  # fmt: skip
        if not self.predicted:  # JSON has no NaN
            details |= {"step_time": None, "idle": None}
        return json.dumps({**self.plan.to_dict(), PLANNED: details})

    @classmethod
    def from_json(cls, text: str, layout_of: Callable[[Plan], Layout] | None = None) -> Self:
        """Reads what ``to_json`` wrote. Costs that cannot be restored, because a profile is gone or has changed, are
        missed only by what needs them.

        Args:
            text: The text.
            layout_of: Gives the layout of a bare plan, as ``Plan.to_json`` writes it. By default it is refused.
        """
        plan = Plan.from_json(text)
        details = json.loads(text).get(PLANNED)
        if details is None:
            if layout_of is None:
                raise ValueError(
                    "this is a bare plan, without its layout; plan again with terapipe.plan, and save that"
                )
            return cls.of_plan(plan, layout_of(plan))
        try:
            layout = Layout(**details["layout"])
            for name in ("dp", "pp", "tp"):
                check_whole_number(name, getattr(layout, name))
            if layout.pp != plan.num_ranks:
                raise ValueError(f"pp={layout.pp}, where the plan is for {plan.num_ranks} ranks")
            fixed = {**asdict(layout), "memory": details["budget"], "tile": details["tile"]}
            request = Request(plan.batch_size * layout.dp, plan.seq_len, details["min_slice"], **fixed)
            seconds, idle = (nan if details[name] is None else details[name] for name in ("step_time", "idle"))
            needs = details["peak_bytes"], details["fits"], details.get("host_bytes", 0)
            estimate = PlanEstimate(layout, plan, seconds, idle, *needs)
            source, missing = restore(details["costs"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"what was saved beside this plan lacks or misnames {error}; plan again") from None
        return cls(estimate, (), request, source, saved=details, missing=missing)

    def save(self, path: str | Path, *, profile: str | Path | None = None, **notes: Any) -> None:
        """Writes a file for ``terapipe train run.toml plan.file=PATH``, ``terapipe simulate PATH``, ``load`` and
        ``Plan.from_json``.

        Args:
            path: The file.
            profile: As for ``to_json``.
            notes: As for ``to_json``.
        """
        files.write(Path(path), self.to_json(profile=profile, **notes) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file that ``save`` wrote."""
        return cls.from_json(files.read(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        price = {} if self.price is None else {"price_of_distinct": self.price}
        if self.reserve is not None:
            price["price_of_reserve"] = self.reserve
        return {**self.estimate.to_dict(), "budget": self.budget, **price, "seconds_to_plan": self.seconds}

    def __str__(self) -> str:
        from terapipe.reporting.plans import explain

        return explain(self)

    def known_source(self) -> Source:
        """The source of the costs. Raises ValueError if there is none."""
        if self.source is None:
            table = "a cost table knows no memory and no transfers; plan with a Cluster or a Profile"
            raise ValueError(self.missing or table)
        return self.source


@dataclass(frozen=True)
class Comparison:
    """The best plan of every order, with slices and with whole sequences, and what there is without a pipeline.
    ``print`` shows a table. Iterating gives the plans, then their rivals.

    Attributes:
        rows: The plans.
        request: The batch, and what was fixed.
        source: Model and devices.
        same_layout: Whether all plans are in one layout, instead of each in its best one. There are no rivals then.
        seconds: Time that the comparison took.
        rivals: Ways to train without a pipeline, each the best of its kind: estimates.
        tokens: To train on, for days and cost in tables; such as ``"50B"``.
        price: Of a device for an hour, for the cost.
    """

    rows: tuple[PlanEstimate, ...]
    request: Request
    source: Source
    same_layout: bool = False
    seconds: float = 0.0
    rivals: tuple[Rival, ...] = ()
    tokens: str | float | None = None
    price: float | None = None

    @property
    def budget(self) -> int | None:
        """Memory budget per device in bytes, if known."""
        return self.request.budget or self.source.budget

    @property
    def where(self) -> str:
        """Name of the cluster or machine."""
        return self.source.name

    def __iter__(self) -> Iterator[PlanEstimate | Rival]:
        return iter((*self.rows, *self.rivals))

    def __len__(self) -> int:
        return len(self.rows) + len(self.rivals)

    @property
    def front(self) -> list[PlanEstimate | Rival]:
        """The Pareto front of step time and peak memory, among those that fit."""
        return pareto_front(e for e in self if e.fits)

    @property
    def too_large(self) -> list[str]:
        """A sentence for each order of which no plan fits: its smallest plan, and how much memory that lacks. All
        layouts, modes of recomputation, microbatches and numbers of slices that the request leaves open were tried."""
        sentences = []
        for e in self.rows:
            if not e.fits and self.budget is not None:
                over, mode = (e.peak_bytes - self.budget) / 2**30, recompute_title(e.plan.recompute)
                sentences.append(
                    f"{e.title} fits in no layout: its smallest plan, {e.layout} with microbatches of "
                    f"{e.plan.sizes[0]} seq, {len(e.plan.lengths[0])} slices and "
                    f"recomputation {mode}, is {over:.2f} GiB over"
                )
        return sentences

    @property
    def fastest(self) -> PlanEstimate:
        """The fastest plan that fits."""
        return min(self.rows, key=lambda e: (not e.fits, e.step_time))

    @property
    def unsliced(self) -> PlanEstimate | None:
        """The fastest plan with whole sequences that fits, if there is one."""
        return min((e for e in self.rows if e.fits and not e.sliced), key=lambda e: e.step_time, default=None)

    @property
    def pipeline(self) -> PlanEstimate | None:
        """The fastest plan with more than one pipeline rank that fits, if there is one."""
        return min((e for e in self.rows if e.fits and e.layout.pp > 1), key=lambda e: e.step_time, default=None)

    @property
    def without_pipeline(self) -> PlanEstimate | Rival | None:
        """The fastest that fits and is no pipeline: a rival, or a plan with one pipeline rank."""
        ways = (e for e in self if e.fits and not (isinstance(e, PlanEstimate) and e.layout.pp > 1))
        return min(ways, key=lambda e: e.step_time, default=None)

    @property
    def best(self) -> PlanEstimate | Rival:
        """The fastest of all that fits, ours or not."""
        return min(self, key=lambda e: (not e.fits, e.step_time))

    def to_svg(self, path: str | Path | None = None) -> str:
        """A chart of step time against peak memory.

        Args:
            path: A file to write it to, also.
        """
        from terapipe.reporting.comparison import comparison_chart

        return _write(path, comparison_chart(self))

    def to_html(self, path: str | Path | None = None, model: str = "The model") -> str:
        """A page with chart, table and the constants behind it.

        Args:
            path: A file to write it to, also.
            model: How the page calls the model.
        """
        from terapipe.reporting.comparison import comparison_page

        return _write(path, comparison_page([self], model))

    def __str__(self) -> str:
        from terapipe.reporting.comparison import comparison_parts
        from terapipe.reporting.plans import as_text

        return as_text(comparison_parts(self))


@dataclass(frozen=True)
class ClusterComparison:
    """The same training on several clusters. ``print`` shows the best plan and the best rival on each.

    Attributes:
        comparisons: By the name of the cluster.
        failures: Clusters on which no plan fits, and why.
    """

    comparisons: Mapping[str, Comparison]
    failures: Mapping[str, str]

    def to_html(self, path: str | Path | None = None, model: str = "The model") -> str:
        """A page with the clusters side by side, then each with its chart, table and constants.

        Args:
            path: A file to write it to, also.
            model: How the page calls the model.
        """
        from terapipe.reporting.comparison import comparison_page

        return _write(path, comparison_page(list(self.comparisons.values()), model, self.failures))

    def __str__(self) -> str:
        from terapipe.reporting.comparison import cluster_parts
        from terapipe.reporting.plans import as_text

        return as_text(cluster_parts(list(self.comparisons.values()), self.failures))


def _write(path: str | Path | None, text: str) -> str:
    if path is not None:
        files.write(Path(path), text)
    return text


def with_seconds(plan: Callable[[], PlanResult]) -> PlanResult:
    """Calls ``plan`` and records how long it took."""
    began = time.perf_counter()
    return replace(plan(), seconds=time.perf_counter() - began)


# Costs in a file

NO_COSTS = "the costs of this plan are not in the file; give a cluster and a model, or a profile"


def restore(costs: Mapping[str, Any]) -> tuple[Source | None, str]:
    """The costs that a plan was made with, or None and why the file does not determine them."""
    if "cluster" in costs:
        return _cluster_source(costs), ""
    if "profile" not in costs:
        return None, NO_COSTS
    try:
        return _profile_source(costs), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def origin(source: Source, file: Path | None = None) -> dict[str, Any]:
    """What is saved to restore the costs: the whole description of a cluster, or a profile's path and checksum."""
    if isinstance(source, ClusterSource):
        host = source.cluster.host.to_dict()
        cluster = {"cluster": source.cluster.name, "hosts": source.cluster.hosts, "host": host}
        model = {"model": asdict(source.config), "layers_only": not source.ends, "fused_grads": source.fused}
        return {**cluster, **model, "autocast": source.autocast, **_state_origin(source)}
    assert isinstance(source, ProfileSource)
    measured = {"profile": str(file or ""), "checksum": _checksum(source.profile)}
    of_ranks = {"ranks": source.ranks, "tp": source.tp, "fused_grads": source.fused}
    return {**measured, **of_ranks, **_state_origin(source)}


def _state_origin(source: ClusterSource | ProfileSource) -> dict[str, Any]:
    """What is saved of the optimizer, of frozen layers if there are any, and of what a layer of another model keeps."""
    frozen = {} if source.frozen is None else {"frozen": asdict(source.frozen)}
    kept = {} if source.layer_bytes is None else {"layer_bytes": source.layer_bytes._asdict()}
    return {"optimizer": source.optimizer, **frozen, **kept}


def _state_of(costs: Mapping[str, Any]) -> dict[str, Any]:
    """The same, as sources take it."""
    kept = LayerBytes(**costs["layer_bytes"]) if costs.get("layer_bytes") else None
    return {"optimizer": costs.get("optimizer"), "frozen": _frozen_of(costs), "layer_bytes": kept}


def _frozen_of(costs: Mapping[str, Any]) -> FrozenLayers | None:
    return FrozenLayers(**costs["frozen"]) if costs.get("frozen") else None


def _checksum(profile: Profile) -> int:
    return zlib.crc32(profile.to_json().encode())


def _cluster_source(costs: Mapping[str, Any]) -> ClusterSource:
    try:
        host = Host.from_dict(costs["host"])
        config = GPTConfig(**costs["model"])
        cluster, ends = Cluster(costs["cluster"], host, costs["hosts"]), not costs["layers_only"]
        fused, autocast = costs.get("fused_grads", True), costs.get("autocast", False)
        return ClusterSource(config, cluster, ends, fused, autocast, **_state_of(costs))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the saved description of the cluster lacks or misnames {error}; plan again") from None


def _profile_source(costs: Mapping[str, Any]) -> ProfileSource:
    path = Path(str(costs["profile"]))
    if not path.is_file():
        raise ValueError(f"the costs of this plan came from the profile {path}, which is not here; give the profile")
    profile = Profile.from_json(files.read(path))
    if _checksum(profile) != costs.get("checksum"):
        raise ValueError(f"{path} has changed since this plan was made with it; plan again, or give the profile")
    ranks = costs.get("ranks")
    tp = costs.get("tp", 1)
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else profile.ranks
    fused = bool(costs.get("fused_grads", True))
    return ProfileSource(profile, ranks, tp, fused, **_state_of(costs))
