"""The library as functions: verify, profile, plan, compare, estimate, simulate, document_planner, dry_run. The command
line and the trainer use them.

Importing this module does not load torch. ``verify``, ``profile`` and ``dry_run`` load it, and so does planning for a
model that is not a preset.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe.planning.cost import with_recompute
from terapipe.planning.documents import DocumentCosts, DocumentPlanner
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory, parse_bytes
from terapipe.planning.presets import PRESETS, GPTConfig, ModelSpec, gpt_config
from terapipe.planning.profile import ELEMENT, Profile
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.scheduling.simulator import peaks, program
from terapipe.scheduling.timeline import Timeline
from terapipe.search.choose import choose
from terapipe.search.choose import compare as compare_orders
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.result import Comparison, PlanResult, timed
from terapipe.search.saved import SavedPlan
from terapipe.search.source import ClusterSource, ProfileSource, Source
from terapipe.search.table import CostTable, choose_by_table

if TYPE_CHECKING:
    from terapipe.modeling.stage import PipelineModel
    from terapipe.modeling.verification import Verification
    from terapipe.runtime.comm.transport import Transport
    from terapipe.runtime.dry_run import DryRun

Costs = Profile | Cluster | CostTable | str


def profile(
    model: "PipelineModel | GPTConfig | str | Path",
    *,
    seq_len: int,
    microbatch_sizes: Sequence[int] = (1,),
    seconds: float = 45.0,
    layers: int | None = None,
    dtype: str | None = None,
    max_tokens: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
    transport: "Transport | None" = None,
) -> Profile:
    """Measures a model on this machine. Under torchrun all ranks must call it together; otherwise one process measures.

    - ``model``: a model that ``Pipeline`` takes, a GPTConfig, a preset or shape by name, a Hugging Face config.json or
      folder.
    - ``microbatch_sizes``: sequences per microbatch to measure.
    - ``seconds``: about how long to measure, at most. It ends earlier if the measurements are precise enough.
    - ``layers``: number of layers that each rank measures, by default all layers divided by the ranks.
    - ``dtype``: such as "bfloat16", for a model that is given by name or path.
    - ``max_tokens``: saves time by skipping points where a microbatch has more tokens, context included. It does not
      apply to the first microbatch size.
    - ``progress``: called with the completed share, between 0 and 1.
    - ``transport``: of a program that has met the other ranks before; by default they meet here.

    Every rank returns the same Profile.
    """
    from terapipe.runtime.comm.environment import rank_and_size
    from terapipe.runtime.profiler import Profiler

    built = _model_object(model, seq_len, dtype)
    spec = model_spec(built)
    share = layers or max(1, built.num_layers // rank_and_size()[1])
    shape = None if spec is None else spec.config
    sizes = tuple(microbatch_sizes)
    profiler = Profiler(
        built, layers=share, seq_len=seq_len, sizes=sizes, shape=shape, max_tokens=max_tokens, transport=transport
    )
    return profiler.transport.gather(profiler.run(seconds, progress))[0]


def verify(
    model: "PipelineModel", *, num_stages: int = 2, slice_lengths: Sequence[int] = (9, 1, 12, 7)
) -> "Verification":
    """Tests in this process whether a model of your own is exact: loss and gradients in slices and stages equal those
    of the whole model.

    - ``model``: a model that ``Pipeline`` takes. Its weights, gradients, buffers and modes stay as they are.
    - ``num_stages``: number of stages to cut it into.
    - ``slice_lengths``: tokens of the slices. Take others if your layers need longer slices or multiples of a length.

    A model of up to 64M parameters is copied in float64, a larger one runs as it is. The result names what differs, in
    which layer, and the likely mistake; ``Pipeline`` runs a shorter form of this check before the first step.
    """
    from terapipe.modeling.verification import verify as verify_model

    return verify_model(model, num_stages=num_stages, slice_lengths=slice_lengths)


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
    recompute: Recompute | bool | None = None,
    tile: int | None = None,
    distinct: int | None = None,
    devices: int | None = None,
    layers_only: bool = False,
    autocast: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> PlanResult:
    """Chooses the fastest plan that fits into memory, by simulation. Arguments that are None are chosen.

    - ``model``: a model that ``Pipeline`` takes, a GPTConfig, a preset or shape by name, a Hugging Face config.json or
      folder. It may be None if ``costs`` is a Profile or a CostTable.
    - ``costs``: a Profile, a Cluster or its name (``"dgx-h100:8"``), or a CostTable.
    - ``batch_size``: sequences per step, over all replicas.
    - ``memory``: memory budget per device, in bytes or as ``"80GiB"``. By default what a plan can use of the device's
      memory: less a reserve for context, NCCL and fragmentation on a described cluster.
    - ``dp``, ``pp``, ``tp``, ``shard``: the layout, see ``Layout``. ``shard`` is never chosen by the planner.
    - ``order``: the order of forwards and backwards, a key of ``ORDERS``.
    - ``num_slices`` or ``slice_lengths``: cut every sequence into equal slices, or into slices of these lengths.
    - ``microbatch_size``: sequences per microbatch.
    - ``chunks``: stages per pipeline rank.
    - ``recompute``: what backwards compute again, "none", "block" or "full", see ``Plan``. By default the fastest
      that fits, which may differ between stages and slices.
    - ``tile``: slice lengths are multiples of it.
    - ``distinct``: maximum number of different slice lengths.
    - ``devices``: number of ranks to plan for, if a Profile was measured on another number.
    - ``layers_only``: ignore embedding, head and loss, as the TeraPipe paper does (with a Cluster).
    - ``autocast``: weights are float32 and products autocast to the device's half precision (with a Cluster; a Profile
      that was measured under ``torch.autocast`` knows it).
    - ``progress``: called with the completed share, between 0 and 1.
    - ``transport``: of a program that has met the other ranks before; by default they meet here.
    """
    spec = model_spec(model)
    request = _request(
        spec,
        memory,
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
    )
    if isinstance(costs, CostTable):
        return timed(lambda: choose_by_table(costs, request))
    source = source_of(spec, costs, request, devices, layers_only, autocast)
    return timed(lambda: _with_price_of_reserve(choose(source, request, progress)))


def _with_price_of_reserve(result: PlanResult) -> PlanResult:
    """The result with its step time relative to that with all memory, if part of it was left for other things."""
    request, source, layout = result.request, result.source, result.layout
    if request.budget is not None or not isinstance(source, ClusterSource):
        return result
    memory = source.cluster.host.device.memory
    if memory == source.budget or (result.plan.recompute == "none" and result.peak_bytes < 0.9 * (source.budget or 0)):
        return result
    whole = request.fixed(budget=memory, dp=layout.dp, pp=layout.pp, tp=layout.tp, order=result.plan.order)
    return replace(result, reserve=max(1.0, result.step_time / choose(source, whole).step_time))


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
    recompute: Recompute | bool | None = None,
    tile: int | None = None,
    devices: int | None = None,
    layers_only: bool = False,
    autocast: bool = False,
    same_layout: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Comparison:
    """Finds the best plan of every order on the same devices, each with the layout, microbatches, chunks and
    recomputation that suit it best. Orders that can be sliced have a row with slices and one with whole sequences.

    ``same_layout`` asks another question: how the orders compare in the layout of the fastest one. The other arguments
    are as for ``plan``.
    """
    if isinstance(costs, CostTable):
        raise ValueError("a cost table knows one kind of stage and no memory; compare with a Cluster or a Profile")
    spec = model_spec(model)
    began = time.perf_counter()
    request = _request(
        spec,
        memory,
        batch_size=batch_size,
        seq_len=seq_len,
        dp=dp,
        pp=pp,
        tp=tp,
        shard=shard,
        microbatch_size=microbatch_size,
        recompute=recompute,
        tile=tile,
    )
    source = source_of(spec, costs, request, devices, layers_only, autocast)
    rows = tuple(compare_orders(source, request, same_layout=same_layout, progress=progress))
    return Comparison(rows, request, source, same_layout, time.perf_counter() - began)


def estimate(
    plan: "Plan | PlanResult | SavedPlan",
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
    memory: str | int | None = None,
    layers_only: bool = False,
    autocast: bool = False,
) -> PlanResult:
    """Predicts step time and memory of a given plan, without choosing anything.

    A result of ``plan`` or a saved plan has its layout and costs; ``layout`` and ``costs`` replace them. A Plan alone
    is for one replica, unless ``layout`` says otherwise.
    """
    given, saved_layout, saved_source, budget = _parts(plan)
    layout = layout or saved_layout or Layout(1, given.num_ranks, 1)
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
    source = (
        saved_source() if costs is None else source_of(model_spec(model), costs, request, None, layers_only, autocast)
    )
    _check_fit(given, layout, source)
    evaluator = PlanEvaluator(source, request, layout, given.recompute_modes[-1])
    return timed(lambda: PlanResult(evaluator.evaluate(given), (), request, source))


def simulate(
    plan: "Plan | PlanResult | SavedPlan",
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
) -> Timeline:
    """Simulates one step of a plan. Arguments as for ``estimate``."""
    return estimate(plan, costs, model=model, layout=layout).simulate()


def document_planner(
    plan: "Plan | PlanResult | SavedPlan",
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
    tile: int | None = None,
) -> DocumentPlanner:
    """Makes plans for batches of packed documents, each cut by the costs of its own documents. ``plan`` is for batches
    of whole sequences. Arguments as for ``estimate``; slice lengths are multiples of ``tile``, by default as in
    ``plan`` with these costs."""
    known = estimate(plan, costs, model=model, layout=layout)
    source = known.source
    assert source is not None
    if tile is None:
        spec = None if model is None else model_spec(model)
        request = _request(spec, None, batch_size=1, seq_len=known.plan.seq_len)
        request = plan.request if isinstance(plan, PlanResult) else request
        tile = request.tile_for(tile=source.tile, tp=known.layout.tp)
    cost = with_recompute(source.cost(known.layout), known.plan.recompute_modes[-1])
    return DocumentPlanner(known.plan, DocumentCosts.of(cost, known.plan), tile=tile)


def dry_run(
    model: Any, plan: "Plan | PlanResult | SavedPlan", *, layout: Layout | None = None, rank: int | None = None
) -> "DryRun":
    """Executes one rank's whole step on fake tensors, at real size, without memory or other ranks: whether shapes and
    dtypes fit, what would make the host wait for the device, and how many bytes are alive at most.

    - ``model``: as for ``plan``. A model of your own must be on the meta device.
    - ``plan``: a result of ``plan`` has its layout and dtype, and the planner's count of bytes to compare with.
    - ``rank``: of the pipeline; by default the one that needs most memory, or else the last.
    """
    import terapipe.runtime.dry_run as dry

    given, saved_layout, _, _ = _parts(plan)
    layout = layout or saved_layout or Layout(1, given.num_ranks, 1)
    memory = plan.memory if isinstance(plan, PlanResult) else None
    if getattr(memory, "autocast", False):
        raise ValueError("a dry run computes in the dtype of the weights; plan without autocast for it")
    predicted = peaks(program(given), given, memory) if memory is not None else None
    if rank is None:
        rank = given.num_ranks - 1 if predicted is None else max(range(len(predicted)), key=predicted.__getitem__)
    if not 0 <= rank < given.num_ranks:
        raise ValueError(f"the pipeline has ranks 0 to {given.num_ranks - 1}, got {rank}")
    dtype = plan.source.dtype if isinstance(plan, PlanResult) and plan.source else None
    built = _model_object(model, given.seq_len, dtype)
    device = {name: getattr(memory, name) for name in ("state", "attention", "blas") if hasattr(memory, name)}
    found = dry.dry_run(built, given, layout, rank, **device)
    return replace(found, predicted=None if predicted is None else predicted[rank])


def predicted_peaks(config: GPTConfig, plan: Plan, dtype: str, attention: str, blas: int) -> list[int]:
    """The bytes of every pipeline rank, by the planner, without optimizer state. ``attention`` is the kernel, ``blas``
    the bytes of cuBLAS's workspaces."""
    return peaks(program(plan), plan, ShapeMemory(config, ELEMENT[dtype], 0, attention=attention, blas=blas))


def _parts(
    plan: "Plan | PlanResult | SavedPlan",
) -> tuple[Plan, Layout | None, Callable[[], Source], int | None]:
    """Plan, layout, source of the costs and memory budget."""
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
    """What the planner must know about a model. None if the model does not say; planning then needs a Profile."""
    if isinstance(model, str | Path):
        model = _named(str(model))
    if model is None or isinstance(model, ModelSpec):
        return model
    if isinstance(model, GPTConfig):
        return ModelSpec(model)
    from terapipe.modeling.stage import require_model

    return require_model(model).planning_spec()


def source_of(
    spec: ModelSpec | None,
    costs: Costs,
    request: Request,
    devices: int | None = None,
    layers_only: bool = False,
    autocast: bool = False,
) -> Source:
    fused = True if spec is None else spec.fused_grads
    if isinstance(costs, str):
        costs = Cluster(costs)
    if isinstance(costs, Profile):
        if spec is not None:
            costs.check_model(spec.config)
        if autocast and costs.autocast is None:
            raise ValueError(
                f"the profile was measured in {costs.dtype} without autocast; measure again under torch.autocast, or "
                "leave autocast out"
            )
        fixed = (request.dp or 1) * (request.pp or 0) * (request.tp or 1)
        return ProfileSource(costs, devices or fixed or costs.ranks, request.tp or 1, fused)
    if not isinstance(costs, Cluster):
        raise ValueError(f"costs are a Profile, a Cluster or its name, or a CostTable, got {type(costs).__name__}")
    if spec is None:
        raise ValueError("a Cluster says nothing of the model; give a preset, a GPTConfig, or a model to plan for")
    # For sequences longer than the preset's, plan for the same model with more positions.
    config = replace(spec.config, max_seq_len=max(spec.config.max_seq_len, request.seq_len))
    if autocast and costs.host.device.element != 2:
        raise ValueError(f"autocast is for devices that compute in half precision, {costs.name} does not")
    return ClusterSource(config, costs, not layers_only, fused, autocast)


def _request(spec: ModelSpec | None, memory: str | int | None, **given: Any) -> Request:
    """With what the model cannot do, so that no caller can forget it."""
    if spec is not None:
        given |= {"min_slice": spec.min_slice, "recompute_modes": spec.recompute_modes}
    return Request(budget=_nbytes(memory), **given)


def _nbytes(memory: str | int | None) -> int | None:
    return parse_bytes(memory) if isinstance(memory, str) else memory


def _named(text: str, dtype: str | None = None) -> Any:
    """A GPTConfig for a preset or shape, a Decoder without weights for a Hugging Face config.json or folder."""
    if text in PRESETS or not Path(text).exists():
        return gpt_config(text)
    from terapipe.hf.decoder import decoder_from

    return decoder_from(Path(text), dtype)


def _model_object(model: Any, seq_len: int, dtype: str | None) -> "PipelineModel":
    if isinstance(model, str | Path):
        model = _named(str(model), dtype)
    if not isinstance(model, GPTConfig):
        built: PipelineModel = model
        return built
    import torch

    from terapipe.modeling.gpt import GPT

    config = replace(model, max_seq_len=max(seq_len, model.max_seq_len))
    with torch.device("meta"):
        return GPT(config).to(getattr(torch, dtype or "float32"))
