"""The plan of a run: given, chosen by measurements, or equal slices; saved in the run's folder for when it goes on.

::

    plan.file set?               -> from_file      what `terapipe plan --save` wrote
    plan.json of the same keys?  -> resume         a run that goes on keeps its plan, whatever a new measurement says
    plan.profile set?            -> from_profile   the fastest by simulation
    plan.seconds > 0?            -> measure, from_profile
    otherwise                    -> equal_slices   also for models of one's own, which cannot be measured

Results are `PlanResult`: the plan, its layout, what was predicted and from which costs.
"""

import json
from dataclasses import asdict
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
from terapipe.runtime import Transport
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.training.config import PlanConfig, RunConfig
from terapipe.training.model import RunModel

LEAST = 64  # tokens of a slice, where its cost was not measured
FILE = "plan.json"  # in the run's folder
LAYOUT = ("dp", "pp", "tp", "shard")


def ranks_wanted(config: PlanConfig) -> int:
    """Returns how many processes a run starts by itself: those that are asked for, or that the plan's layout has.

    Args:
        config: The [plan] section.
    """
    if config.ranks:
        return config.ranks
    if config.file:
        return _load(config, None).layout.devices
    return (config.dp or 1) * (config.pp or 1) * config.tp


def _load(config: PlanConfig, ranks: int | None) -> PlanResult:
    """The plan of plan.file. Keys of [plan] may repeat what it says, not change it: a key without effect is a mistake
    that nobody would notice. Of a bare plan they, and the number of ranks if there is one, say the layout."""
    fixed = ["profile", *(name for name in names_of(PlanOptions) if name not in (*LAYOUT, "tile"))]
    if ignored := [f"plan.{name}" for name in fixed if getattr(config, name)]:
        raise ValueError(f"{' and '.join(ignored)} would have no effect beside plan.file; leave out one or the other")

    def layout(plan: Plan) -> Layout:
        pp = plan.num_ranks
        return Layout(config.dp or 1, pp, config.tp, config.shard) if ranks is None else layout_of(config, ranks, pp)

    try:
        result = PlanResult.from_json(files.read(Path(config.file)), layout)
    except ValueError as error:
        raise ValueError(f"plan.file {config.file}: {error}") from None
    for name in LAYOUT:
        asked, value = getattr(config, name), getattr(result.layout, name)
        if asked not in (None, False, getattr(PlanConfig, name), value):
            raise ValueError(
                f"{config.file} is for {name} {value}, plan.{name} says {asked}; leave that key out, or plan again"
            )
    return result


def layout_of(config: PlanConfig, ranks: int, pp: int | None) -> Layout:
    """Returns the layout: what is fixed, and the rest so that all ranks have work. Stages come before replicas: a
    pipeline is what this is about.

    Args:
        config: The [plan] section; dp and tp of it.
        ranks: How many processes there are.
        pp: Stages, by plan.pp or by a plan; None: as many as there are ranks for.
    """
    fixed = (config.dp or 1) * (pp or 1) * config.tp
    if ranks % fixed:
        raise ValueError(
            f"dp x pp x tp must be the number of processes, got {config.dp or 'any'} x {pp or 'any'} x "
            f"{config.tp} and {ranks}; change the keys of [plan] or start another number"
        )
    free = ranks // fixed
    if free > 1 and pp and config.dp:
        raise ValueError(f"plan.dp x plan.pp x plan.tp is {fixed}, but there are {ranks} processes")
    dp, pp = (config.dp or (free if pp else 1)), pp or free
    return Layout(dp, pp, config.tp, shard=config.shard and dp > 1)


def from_file(config: RunConfig, ranks: int) -> PlanResult | None:
    """Loads the plan of plan.file. Its prediction is left out, because it may be of another machine.

    Args:
        config: Of the run; batch and sequence length must be those of the plan.
        ranks: How many processes there are.

    Returns:
        None if the configuration names no file.
    """
    if not config.plan.file:
        return None
    saved = _load(config.plan, ranks)
    plan, layout = saved.plan, saved.layout
    if layout.devices != ranks:
        raise ValueError(f"{config.plan.file} is for {layout}, {layout.devices} processes; there are {ranks}")
    if (plan.batch_size * layout.dp, plan.seq_len) != (config.data.batch_size, config.data.seq_len):
        raise ValueError(
            f"{config.plan.file} is for {plan.batch_size} sequences of {plan.seq_len} tokens to each of {layout.dp} "
            f"replicas, data.batch_size and data.seq_len ask for {config.data.batch_size} of {config.data.seq_len}; "
            "change them or plan again"
        )
    return PlanResult.of_plan(plan, layout, dtype=config.model.dtype, documents=saved.document_costs)


def resume(config: RunConfig, ranks: int) -> PlanResult | None:
    """Loads the plan that this run had before, from plan.json: what goes on after a stop goes on alike, unless
    something else is asked.

    Args:
        config: Of the run.
        ranks: How many processes there are.

    Returns:
        None if there is none, or it was chosen for other keys.
    """
    try:
        result = PlanResult.load(config.folder / FILE)
    except (OSError, ValueError):
        return None
    return result if result.saved.get("asked") == request_key(config, ranks) else None


def save(config: RunConfig, ranks: int, result: PlanResult) -> None:
    """Writes the plan to the run's folder, with what it was chosen for.

    Args:
        config: Of the run.
        ranks: How many processes there are.
        result: The plan.
    """
    profile = config.plan.profile or config.folder / "profile.json"
    result.save(config.folder / FILE, profile=profile, asked=request_key(config, ranks))


def request_key(config: RunConfig, ranks: int) -> dict[str, Any]:
    """Returns all that the choice of a plan depends on, as JSON gives it back, to be compared with plan.json.

    Args:
        config: Of the run.
        ranks: How many processes there are.
    """
    sections = {"plan": asdict(config.plan), "model": asdict(config.model)}
    del sections["plan"]["per_batch"]  # whether batches are cut anew changes nothing of the plan
    asked = {**sections, "tokens": config.data.seq_len, "batch": config.data.batch_size, "ranks": ranks}
    plain: dict[str, Any] = json.loads(json.dumps(asked))
    return plain


def equal_slices(config: RunConfig, model: RunModel, ranks: int) -> PlanResult:
    """Makes a plan of equal slices: where nothing is known of their costs.

    Args:
        config: Of the run. Keys of [plan] that are set hold; the others get a guess.
        model: Says where layers may be cut.
        ranks: How many processes there are.
    """
    wanted, tokens = config.plan, config.data.seq_len
    layout = layout_of(wanted, ranks, wanted.pp)
    order = order_named(wanted.order or "terapipe-1f1b")
    chunks = wanted.chunks or order.chunks or 1
    batch = config.data.batch_size // layout.dp
    size = wanted.microbatch_size or 1
    sizes = tuple(min(size, batch - row) for row in range(0, batch, size))
    lengths = _lengths(wanted, tokens, layout, model.min_slice) if order.sliced else (tokens,)
    mode = "none" if config.model.recompute == "auto" else config.model.recompute
    plan = Plan(sizes, (lengths,) * len(sizes), model.split(layout.pp * chunks), order.name, chunks, mode)
    return PlanResult.of_plan(plan, layout, dtype=config.model.dtype)


def _lengths(wanted: PlanConfig, tokens: int, layout: Layout, min_slice: int) -> tuple[int, ...]:
    """Four slices for each stage, but none shorter than LEAST tokens: with N slices and P stages about (P - 1) / (N + P
    - 1) of the time is idle, less than a fifth at N = 4 P, and shorter slices use a device badly."""
    if wanted.slice_lengths:
        return tuple(wanted.slice_lengths)
    count = wanted.num_slices or max(1, min(4 * layout.pp, tokens // LEAST))
    tile = _tile(wanted, layout, tokens, min_slice)
    return even_lengths(tokens, count, tile if tokens >= tile * count else 1)


def _tile(wanted: PlanConfig, layout: Layout, tokens: int, min_slice: int) -> int:
    """What lengths of slices are multiples of, so that kernels get even shapes and tensor-parallel ranks equal
    parts."""
    return Request(1, tokens, min_slice=min_slice).tile_for(tile=wanted.tile, tp=layout.tp)


def measure(config: RunConfig, model: RunModel, world: Transport) -> Profile:
    """Profiles the model on this machine. All ranks call it together; each gets the first one's account.

    Args:
        config: How long to measure, and for which sequences.
        model: To measure.
        world: Connects the ranks.
    """
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
    """What the planner must know of the model. Linear layers of a GPT stay outside of what is compiled; those of other
    models are compiled with their layers."""
    if model.shape is None:
        return None
    spec = model.model.planning_spec()
    frozen, bare_ends = None if spec is None else spec.frozen, model.model.has_bare_ends
    spec = ModelSpec(model.shape, model.min_slice, model.recompute_modes, bare_ends=bare_ends, frozen=frozen)
    return spec.compiled(fused=isinstance(model.model, GPT)) if config.model.compile else spec


def from_profile(config: RunConfig, model: RunModel, profile: Profile, ranks: int) -> PlanResult:
    """Searches the fastest plan, by simulation, that the model can run.

    Args:
        config: Of the run; keys of [plan] that are set narrow the search.
        model: What it can do.
        profile: Measured costs.
        ranks: How many processes there are.
    """
    wanted = config.plan
    if ranks % wanted.tp:
        raise ValueError(f"plan.tp must divide the number of processes, got {wanted.tp} and {ranks}")
    batch_size, seq_len = config.data.batch_size, config.data.seq_len
    options = values_of(wanted, PlanOptions)
    options["recompute"] = None if config.model.recompute == "auto" else config.model.recompute
    options["tile"] = min(wanted.tile, seq_len)
    if config.optimizer.name != "adamw":  # whose state counts if nothing is said
        options["optimizer"] = config.optimizer.name
    return api.plan(_spec(config, model), profile, batch_size=batch_size, seq_len=seq_len, devices=ranks, **options)


def document_planner(config: RunConfig, model: RunModel, run_plan: PlanResult) -> tuple[DocumentPlanner | None, str]:
    """Makes what cuts every batch by its documents, if that is possible.

    Args:
        config: Of the run.
        model: Its shape gives costs where the plan has none.
        run_plan: The plan of whole sequences.

    Returns:
        The planner, None if all batches are cut alike; and which of the two and why, in words for the log.
    """
    wanted, plan = config.plan, run_plan.plan
    if config.data.packing != "packed" or not wanted.per_batch or max(map(len, plan.lengths)) == 1:
        return None, ""
    costs = run_plan.document_costs or (None if model.shape is None else DocumentCosts.of_shape(model.shape))
    reasons = {
        "plan.num_slices is set": wanted.num_slices,
        "plan.slice_lengths is set": wanted.slice_lengths,
        "model.compile would compile the layers anew for every length": config.model.compile,
        "nothing is known of the costs of this model": costs is None,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        return None, f"all batches are cut alike, whatever their documents: {reason}"
    assert costs is not None
    planner = DocumentPlanner(plan, costs, tile=_tile(wanted, run_plan.layout, plan.seq_len, model.min_slice))
    most, fewest = max(planner.counts[0]), max(planner.counts[-1])
    return planner, (
        f"every batch is cut by the costs of its own documents, a sequence into {fewest} to {most} slices; "
        "plan.per_batch = false would cut all alike"
    )
