"""Profile, plan, compare, simulate: the planner as functions. The command line and the trainer are their clients.

Importing this module does not load torch; ``profile`` does, and so does planning for a model that is not a preset.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import parse_bytes
from terapipe.planning.profile import Profile
from terapipe.planning.slices import Plan
from terapipe.presets import PRESETS, GPTConfig, ModelSpec, gpt_config
from terapipe.scheduling.timeline import Timeline
from terapipe.search.choose import choose
from terapipe.search.compare import compare as compare_orders
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.result import Comparison, PlanResult, timed
from terapipe.search.saved import SavedPlan
from terapipe.search.source import ClusterSource, ProfileSource, Source
from terapipe.search.table import CostTable, choose_by_table

if TYPE_CHECKING:
    from terapipe.modeling.stage import Splittable

Costs = Profile | Cluster | CostTable | str


def profile(
    model: "Splittable | GPTConfig | str | Path",
    *,
    seq_len: int,
    microbatch_sizes: Sequence[int] = (1,),
    seconds: float = 45.0,
    layers: int | None = None,
    dtype: str | None = None,
    max_tokens: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Measures a model on the ranks that call this together (all processes of torchrun, or this one alone).

    ``model`` is a model that ``Pipeline`` takes, a preset or shape, or a Hugging Face config.json or folder. Measuring
    stops after about ``seconds``, or sooner when everything is known well enough. ``layers`` is how many layers a rank
    measures, by default its share. ``dtype`` (such as "bfloat16") is that of a model that is made here. Of microbatch
    sizes after the first, ``max_tokens`` leaves out slices that hold more tokens with their context, which saves time.
    Every rank returns the same Profile.
    """
    from terapipe.runtime.profiler import Profiler
    from terapipe.runtime.transport import rank_and_size

    made = _model_object(model, seq_len, dtype)
    spec = model_spec(made)
    share = layers or max(1, made.num_layers // rank_and_size()[1])
    shape = None if spec is None else spec.config
    profiler = Profiler(made, layers=share, seq_len=seq_len, sizes=tuple(microbatch_sizes), shape=shape)
    if max_tokens is not None:
        first = microbatch_sizes[0]
        held = {p: p.size * (p.length + p.context) for p in profiler.points}
        profiler.points = [p for p in profiler.points if p.size == first or held[p] <= max_tokens]
    return profiler.transport.gather(profiler.run(seconds, progress))[0]


def plan(
    model: Any,
    costs: Costs,
    *,
    batch_size: int,
    seq_len: int,
    memory: str | int | None = None,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    shard: bool = False,
    order: str | None = None,
    num_slices: int | None = None,
    slice_lengths: Sequence[int] | None = None,
    microbatch_size: int | None = None,
    chunks: int | None = None,
    recompute: bool | None = None,
    tile: int | None = None,
    distinct: int | None = None,
    devices: int | None = None,
    layers_only: bool = False,
) -> PlanResult:
    """The fastest plan that fits, by simulating the order that will run. What is None is chosen.

    - ``model``: a model that ``Pipeline`` takes, a GPTConfig, a preset or shape by name, a Hugging Face config.json or
      folder; or None where ``costs`` is a Profile or a CostTable.
    - ``costs``: a Profile, a Cluster or its name (``"dgx-h100:8"``), or a CostTable.
    - ``batch_size``: sequences per step, over all replicas.
    - ``memory``: the budget of each device, in bytes or such as ``"80GiB"``; by default what the device has.
    - ``dp``, ``pp``, ``tp``, ``shard``: the layout; see ``Layout``.
    - ``chunks``: stages per rank. ``tile``: slice lengths are multiples of it. ``distinct``: at most so many different
      slice lengths. ``devices``: how many ranks to plan for, where a Profile measured another number.
    - ``layers_only``: leave out embedding, head and loss, as the TeraPipe paper does (with a Cluster).
    """
    spec = model_spec(model)
    request = Request(
        batch_size=batch_size,
        seq_len=seq_len,
        dp=dp,
        pp=pp,
        tp=tp,
        shard=shard,
        order=order,
        num_slices=num_slices,
        slice_lengths=None if slice_lengths is None else tuple(slice_lengths),
        microbatch_size=microbatch_size,
        chunks=chunks,
        recompute=recompute,
        tile=tile,
        distinct=distinct,
        budget=_nbytes(memory),
        min_slice=spec.min_slice if spec else 1,
        can_recompute=spec.can_recompute if spec else True,
    )
    if isinstance(costs, CostTable):
        return timed(lambda: choose_by_table(costs, request))
    return timed(lambda: choose(source_of(spec, costs, request, devices, layers_only), request))


def compare(
    model: Any,
    costs: Costs,
    *,
    batch_size: int,
    seq_len: int,
    memory: str | int | None = None,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    shard: bool = False,
    microbatch_size: int | None = None,
    recompute: bool | None = None,
    tile: int | None = None,
    devices: int | None = None,
    layers_only: bool = False,
) -> Comparison:
    """Every order at its best on the same devices, by time and by memory. Arguments as for ``plan``."""
    if isinstance(costs, CostTable):
        raise ValueError("a cost table knows one kind of stage and no memory; compare with a Cluster or a Profile")
    spec = model_spec(model)
    began = time.perf_counter()
    request = Request(
        batch_size=batch_size,
        seq_len=seq_len,
        dp=dp,
        pp=pp,
        tp=tp,
        shard=shard,
        microbatch_size=microbatch_size,
        recompute=recompute,
        tile=tile,
        budget=_nbytes(memory),
        min_slice=spec.min_slice if spec else 1,
        can_recompute=spec.can_recompute if spec else True,
    )
    source = source_of(spec, costs, request, devices, layers_only)
    rows = tuple(compare_orders(source, request))
    return Comparison(rows, request.budget or source.budget, source.name, time.perf_counter() - began)


def estimate(
    plan: "Plan | PlanResult | SavedPlan",
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
    memory: str | int | None = None,
    layers_only: bool = False,
) -> PlanResult:
    """What a given plan would take, without choosing anything.

    A result of ``plan`` or a saved plan brings its own layout and costs; both can be replaced. A bare Plan is one
    replica, unless ``layout`` says otherwise.
    """
    given, known, saved_source, budget = _parts(plan)
    layout = layout or known or Layout(1, given.num_ranks, 1)
    if layout.pp != given.num_ranks:
        raise ValueError(f"the plan is for {given.num_ranks} pipeline ranks, the layout has pp {layout.pp}")
    request = Request(
        given.batch_size * layout.dp,
        given.seq_len,
        dp=layout.dp,
        pp=layout.pp,
        tp=layout.tp,
        shard=layout.shard,
        tile=1,
        budget=budget if memory is None else _nbytes(memory),
    )
    source = saved_source() if costs is None else source_of(model_spec(model), costs, request, None, layers_only)
    _check_fit(given, layout, source)
    evaluator = PlanEvaluator(source, request, layout, given.recompute)
    return timed(lambda: PlanResult(evaluator.evaluate(given), (), request, source))


def simulate(
    plan: "Plan | PlanResult | SavedPlan",
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
) -> Timeline:
    """One step of a plan, action by action, without running it. Arguments as for ``estimate``."""
    return estimate(plan, costs, model=model, layout=layout).simulate()


def _parts(
    plan: "Plan | PlanResult | SavedPlan",
) -> tuple[Plan, Layout | None, Callable[[], Source], int | None]:
    if isinstance(plan, PlanResult):
        return plan.plan, plan.layout, plan._known_source, plan.request.budget
    if isinstance(plan, SavedPlan):
        return plan.plan, plan.layout, plan.source, plan.budget
    return plan, None, SavedPlan(plan).source, None


def _check_fit(plan: Plan, layout: Layout, source: Source) -> None:
    if plan.num_layers != source.layers:
        raise ValueError(f"the plan splits {plan.num_layers} layers, the model has {source.layers}")
    if layout.tp not in source.tensor_degrees():
        raise ValueError(f"tp must be one of {source.tensor_degrees()} on {source.name}, got {layout.tp}")
    if layout.devices > source.devices:
        raise ValueError(f"{layout} needs {layout.devices} devices, {source.name} has {source.devices}")


# Models and costs


def model_spec(model: Any) -> ModelSpec | None:
    """What the planner must know of a model; None where that is unknown, and only a Profile will do."""
    if isinstance(model, str | Path):
        model = _named(str(model))
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, GPTConfig):
        return ModelSpec(model)
    spec: ModelSpec | None = model.planning_spec() if hasattr(model, "planning_spec") else None
    return spec


def source_of(
    spec: ModelSpec | None, costs: Costs, request: Request, devices: int | None = None, layers_only: bool = False
) -> Source:
    if isinstance(costs, str):
        costs = Cluster(costs)
    if isinstance(costs, Profile):
        if spec is not None:
            costs.check_model(spec.config)
        fixed = (request.dp or 1) * (request.pp or 0) * (request.tp or 1)
        return ProfileSource(costs, devices or fixed or costs.ranks, request.tp or 1)
    if not isinstance(costs, Cluster):
        raise ValueError(f"costs are a Profile, a Cluster or its name, or a CostTable, got {type(costs).__name__}")
    if spec is None:
        raise ValueError("a Cluster says nothing of the model; give a preset, a GPTConfig, or a model to plan for")
    # A plan for longer sequences than a preset has positions for is a plan for such a model.
    config = replace(spec.config, max_seq_len=max(spec.config.max_seq_len, request.seq_len))
    return ClusterSource(config, costs, not layers_only)


def _nbytes(memory: str | int | None) -> int | None:
    return parse_bytes(memory) if isinstance(memory, str) else memory


def _named(text: str, dtype: str | None = None) -> Any:
    """A preset or shape as a GPTConfig, or a Hugging Face config.json or folder as a Decoder without weights."""
    if text in PRESETS or not Path(text).exists():
        return gpt_config(text)
    from terapipe.modeling.hf.load import decoder_from

    return decoder_from(Path(text), dtype)


def _model_object(model: Any, seq_len: int, dtype: str | None) -> "Splittable":
    if isinstance(model, str | Path):
        model = _named(str(model), dtype)
    if not isinstance(model, GPTConfig):
        made: Splittable = model
        return made
    import torch

    from terapipe.modeling.gpt import GPT

    config = replace(model, max_seq_len=max(seq_len, model.max_seq_len))
    with torch.device("meta"):
        return GPT(config).to(getattr(torch, dtype or "float32"))
