"""The plan of a run: given, chosen by measurements, or equal slices; kept in the run's folder for when it goes on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terapipe import api, files
from terapipe.modeling.gpt import GPT
from terapipe.planning.documents import DocumentCosts, DocumentPlanner
from terapipe.planning.layout import Layout
from terapipe.planning.options import PlanOptions, names_of, values_of
from terapipe.planning.order import order_named
from terapipe.planning.presets import ModelSpec
from terapipe.planning.profile import Profile
from terapipe.planning.slices import Plan, even_lengths
from terapipe.runtime.comm.transport import Transport
from terapipe.scheduling.timeline import Timeline
from terapipe.search.request import Request
from terapipe.search.saved import SavedPlan
from terapipe.training.config import PlanConfig, RunConfig
from terapipe.training.model import RunModel

LEAST = 64  # tokens of a slice, where nothing is known of its cost
FILE = "planned.json"


@dataclass(frozen=True)
class RunPlan:
    """A layout, each replica's plan in it, and how long a step should take."""

    layout: Layout
    plan: Plan
    seconds: float | None = None  # None: nothing was measured
    once: float = 0.0  # of these, what comes once per step however many batches are accumulated
    documents: DocumentCosts | None = None  # by the same costs as the plan, if they are known

    def step_time(self, accumulate: int) -> float | None:
        return None if self.seconds is None else (self.seconds - self.once) * accumulate + self.once

    def to_dict(self) -> dict[str, Any]:
        times = {"seconds": self.seconds, "once": self.once}
        return {"layout": asdict(self.layout), "plan": self.plan.to_dict(), **times, "documents": self.documents}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "RunPlan":
        costs = found.get("documents")
        documents = None if costs is None else DocumentCosts(*costs)
        return cls(Layout(**found["layout"]), Plan.from_dict(found["plan"]), found["seconds"], found["once"], documents)


def ranks_wanted(config: PlanConfig) -> int:
    """How many processes a run starts by itself."""
    if config.ranks:
        return config.ranks
    if config.file:
        saved = _saved_plan(config.file)
        return _of_file(config, saved).devices
    return (config.dp or 1) * (config.pp or 1) * config.tp


def _saved_plan(file: str) -> SavedPlan:
    try:
        return SavedPlan.from_json(files.read(Path(file)))
    except ValueError as error:
        raise ValueError(f"plan.file {file}: {error}") from None


def _of_file(config: PlanConfig, saved: SavedPlan) -> Layout:
    """What was saved with the plan: keys of [plan] may repeat it, not change it. For a bare plan they say it."""
    pp = saved.plan.num_ranks
    fixed = ["profile", *(name for name in names_of(PlanOptions) if name not in ("dp", "pp", "tp", "shard", "tile"))]
    if ignored := [f"plan.{name}" for name in fixed if getattr(config, name)]:
        raise ValueError(f"{' and '.join(ignored)} would have no effect beside plan.file; leave out one or the other")
    layout = saved.layout or Layout(config.dp or 1, pp, config.tp, config.shard)
    asked = {"dp": config.dp or layout.dp, "pp": config.pp or pp, "shard": config.shard or layout.shard}
    asked["tp"] = config.tp if config.tp > 1 else layout.tp
    for name, value in asked.items():
        if value != getattr(layout, name):
            raise ValueError(
                f"{config.file} is for {name} {getattr(layout, name)}, plan.{name} says {value}; leave that key out, "
                "or plan again"
            )
    return layout


def layout_of(config: PlanConfig, ranks: int, pp: int | None) -> Layout:
    """What is fixed, and the rest so that all ranks have work."""
    known = (config.dp or 1) * (pp or 1) * config.tp
    if ranks % known:
        raise ValueError(
            f"dp x pp x tp must be the number of processes, got {config.dp or 'any'} x {pp or 'any'} x "
            f"{config.tp} and {ranks}; change the keys of [plan] or start another number"
        )
    free = ranks // known
    if free > 1 and pp and config.dp:
        raise ValueError(f"plan.dp x plan.pp x plan.tp is {known}, but there are {ranks} processes")
    dp, pp = (config.dp or (free if pp else 1)), pp or free
    return Layout(dp, pp, config.tp, shard=config.shard and dp > 1)


def from_file(config: RunConfig, ranks: int) -> RunPlan | None:
    """The plan of plan.file."""
    if not config.plan.file:
        return None
    saved = _saved_plan(config.plan.file)
    plan = saved.plan
    layout = _of_file(config.plan, saved)
    if saved.layout is None:
        layout = layout_of(config.plan, ranks, plan.num_ranks)
    elif layout.devices != ranks:
        raise ValueError(f"{config.plan.file} is for {layout}, {layout.devices} processes; there are {ranks}")
    if (plan.batch_size * layout.dp, plan.seq_len) != (config.data.batch_size, config.data.seq_len):
        raise ValueError(
            f"{config.plan.file} is for {plan.batch_size} sequences of {plan.seq_len} tokens to each of {layout.dp} "
            f"replicas, data.batch_size and data.seq_len ask for {config.data.batch_size} of {config.data.seq_len}; "
            "change them or plan again"
        )
    return RunPlan(layout, plan, documents=_saved_costs(saved))


def _saved_costs(saved: SavedPlan) -> DocumentCosts | None:
    """Those that the plan was made with, if the file says which."""
    try:
        return api.document_planner(saved).costs
    except ValueError:
        return None


def resumed(config: RunConfig, ranks: int) -> RunPlan | None:
    """The plan that this run had before: what goes on after a stop goes on alike, unless something else is asked."""
    try:
        found = json.loads((config.folder / FILE).read_text(encoding="utf-8"))
        same = found["asked"] == request_key(config, ranks)
        return RunPlan.from_dict(found) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(config: RunConfig, ranks: int, run_plan: RunPlan) -> None:
    found = {"asked": request_key(config, ranks), **run_plan.to_dict()}
    saved = SavedPlan(run_plan.plan, run_plan.layout, config.model.dtype, step_time=run_plan.seconds)
    files.write(config.folder / "plan.json", saved.to_json() + "\n")
    files.write(config.folder / FILE, json.dumps(found, indent=1) + "\n")


def request_key(config: RunConfig, ranks: int) -> dict[str, Any]:
    """All that a choice depends on, as JSON gives it back."""
    sections = {"plan": asdict(config.plan), "model": asdict(config.model)}
    del sections["plan"]["per_batch"]  # whether batches are cut anew changes nothing of the plan
    told = {**sections, "tokens": config.data.seq_len, "batch": config.data.batch_size, "ranks": ranks}
    found: dict[str, Any] = json.loads(json.dumps(told))
    return found


def equal_slices(config: RunConfig, model: RunModel, ranks: int) -> RunPlan:
    """Equal slices: where nothing is known of their costs."""
    wanted, tokens = config.plan, config.data.seq_len
    layout = layout_of(wanted, ranks, wanted.pp)
    order = order_named(wanted.order or "terapipe-1f1b")
    chunks = wanted.chunks or order.chunks or 1
    batch = config.data.batch_size // layout.dp
    size = wanted.microbatch_size or 1
    sizes = tuple(min(size, batch - row) for row in range(0, batch, size))
    lengths = _lengths(wanted, tokens, layout, model.shortest) if order.sliced else (tokens,)
    mode = "none" if config.model.recompute == "auto" else config.model.recompute
    plan = Plan(sizes, (lengths,) * len(sizes), model.split(layout.pp * chunks), order.name, chunks, mode)
    return RunPlan(layout, plan)


def _lengths(wanted: PlanConfig, tokens: int, layout: Layout, shortest: int) -> tuple[int, ...]:
    if wanted.slice_lengths:
        return tuple(wanted.slice_lengths)
    count = wanted.num_slices or max(1, min(4 * layout.pp, tokens // LEAST))
    tile = _tile(wanted, layout, tokens, shortest)
    return even_lengths(tokens, count, tile if tokens >= tile * count else 1)


def _tile(wanted: PlanConfig, layout: Layout, tokens: int, shortest: int) -> int:
    return Request(1, tokens, min_slice=shortest).tile_for(tile=wanted.tile, tp=layout.tp)


def measure(config: RunConfig, model: RunModel, world: Transport) -> Profile:
    """All ranks together; each gets the first one's account."""
    sizes = (config.plan.microbatch_size,) if config.plan.microbatch_size else _sizes(config)
    seq_len, seconds = config.data.seq_len, config.plan.seconds
    # Of larger microbatches only short slices are measured: those gain by merging.
    return api.profile(
        model.model, seq_len=seq_len, microbatch_sizes=sizes, seconds=seconds, max_tokens=seq_len, transport=world
    )


def _sizes(config: RunConfig) -> tuple[int, ...]:
    """Of microbatches to measure: by one alone, the planner could not know what merging sequences gains."""
    batch = config.data.batch_size // (config.plan.dp or 1)
    return (1,) if batch == 1 else (1, 4 if batch >= 4 else 2)


def _spec(config: RunConfig, model: RunModel) -> ModelSpec | None:
    """Linear layers of a GPT stay outside of what is compiled; those of other models are compiled with their layers."""
    if model.shape is None:
        return None
    fused = isinstance(model.model, GPT) or not config.model.compile
    return ModelSpec(model.shape, model.shortest, model.recompute_modes, fused)


def from_profile(config: RunConfig, model: RunModel, profile: Profile, ranks: int) -> RunPlan:
    """The fastest by simulation that the model can run."""
    wanted = config.plan
    if ranks % wanted.tp:
        raise ValueError(f"plan.tp must divide the number of processes, got {wanted.tp} and {ranks}")
    batch_size, seq_len = config.data.batch_size, config.data.seq_len
    options = values_of(wanted, PlanOptions)
    options["recompute"] = None if config.model.recompute == "auto" else config.model.recompute
    options["tile"] = min(wanted.tile, seq_len)
    result = api.plan(_spec(config, model), profile, batch_size=batch_size, seq_len=seq_len, devices=ranks, **options)
    once = max(0.0, result.step_time - result.simulate().makespan)
    documents = api.document_planner(result).costs
    return RunPlan(result.layout, result.plan, result.step_time, once, documents)


def predicted(profile: Profile, layout: Layout, plan: Plan) -> Timeline:
    return api.simulate(plan, profile, layout=layout)


def document_planner(config: RunConfig, model: RunModel, run_plan: RunPlan) -> tuple[DocumentPlanner | None, str]:
    """What cuts every batch by its documents, or None if all are cut alike; and which of the two, in words."""
    wanted, plan = config.plan, run_plan.plan
    if config.data.packing != "packed" or not wanted.per_batch or max(map(len, plan.lengths)) == 1:
        return None, ""
    costs = run_plan.documents or (None if model.shape is None else DocumentCosts.of_shape(model.shape))
    reasons = {
        "plan.num_slices is set": wanted.num_slices,
        "plan.slice_lengths is set": wanted.slice_lengths,
        "model.compile would compile the layers anew for every length": config.model.compile,
        "nothing is known of the costs of this model": costs is None,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        return None, f"all batches are cut alike, whatever their documents: {reason}"
    assert costs is not None
    planner = DocumentPlanner(plan, costs, tile=_tile(wanted, run_plan.layout, plan.seq_len, model.shortest))
    most, fewest = max(planner.counts[0]), max(planner.counts[-1])
    return planner, (
        f"every batch is cut by the costs of its own documents, a sequence into {fewest} to {most} slices; "
        "plan.per_batch = false would cut all alike"
    )
