"""The library as functions: verify, profile, calibrate, plan, compare, estimate, simulate, document_planner, dry_run.
The command line and the trainer use them.

Importing this module does not load torch. ``verify``, ``profile``, ``calibrate`` and ``dry_run`` load it, and so does
planning for a model that is not a preset.

``plan`` and ``compare`` take every knob of ``planning/options.py`` as an argument. Their signatures are made from those
dataclasses, for the type checker as well (a ``ParamSpec`` takes over the arguments of the dataclass's constructor), so
that a knob is written once:

    class PlanCall(CostOptions, PlanOptions)        plan(model, costs, *, batch_size, seq_len, dp=None, ...)
           |                                                           |
           +---- takes(PlanCall) around plan(model, costs, call) ------+
"""

import inspect
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from terapipe.planning.cost import with_recompute
from terapipe.planning.documents import DocumentCosts, DocumentPlanner
from terapipe.planning.hardware import Cluster, with_attention
from terapipe.planning.layout import Layout
from terapipe.planning.limits import LARGEST
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.options import CompareOptions, CostOptions, PlanOptions, explain, values_of
from terapipe.planning.presets import PRESETS, GPTConfig, ModelSpec, gpt_config
from terapipe.planning.profile import ELEMENT, Profile
from terapipe.planning.slices import Plan
from terapipe.scheduling.footprint import peaks
from terapipe.scheduling.simulator import program
from terapipe.scheduling.timeline import Timeline
from terapipe.search.candidates import Candidate, candidates
from terapipe.search.choose import choose, refuse_budget, refuse_orders
from terapipe.search.choose import compare as compare_orders
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.result import ClusterComparison, Comparison, PlanResult, with_seconds
from terapipe.search.rivals import rivals
from terapipe.search.smallest import longest as longest_that_fits
from terapipe.search.source import ClusterSource, ProfileSource, Source
from terapipe.search.table import CostTable, choose_by_table
from terapipe.search.throughput import parse_tokens

if TYPE_CHECKING:
    from terapipe.modeling.stage import PipelineModel
    from terapipe.modeling.verification import Verification
    from terapipe.runtime.calibration import Calibration
    from terapipe.runtime.comm.transport import Transport
    from terapipe.runtime.dry_run import DryRun

Costs = Profile | Cluster | CostTable | str
Progress = Callable[[float], None]
BLOCK = 1024  # tokens; `longest` counts in these
MOST_TOKENS = LARGEST["max_seq_len"] // 2

P = ParamSpec("P")
Call = TypeVar("Call")
Result = TypeVar("Result", covariant=True)


class Planner(Protocol[P, Result]):
    """A function of a model, costs, and the arguments of an options class."""

    def __call__(self, model: Any, costs: Costs, *args: P.args, **options: P.kwargs) -> Result: ...


def takes(kind: Callable[P, Call]) -> Callable[[Callable[[Any, Costs, Call], Result]], Planner[P, Result]]:
    """Decorates a function of a model, costs and an options object: callers pass the options one by one.

    ``help`` and editors see the options as keyword arguments, each with its text in the docstring. A wrong name fails
    as it would with a plain signature, under the function's own name.

    Args:
        kind: The options class, a dataclass. Its fields become the arguments.
    """

    def wrap(function: Callable[[Any, Costs, Call], Result]) -> Planner[P, Result]:
        @wraps(function)
        def call(model: Any, costs: Costs, *args: P.args, **options: P.kwargs) -> Result:
            return function(model, costs, kind(*args, **options))

        kind.__init__.__qualname__ = function.__name__  # what Python calls it in a TypeError
        call.__doc__ = f"{inspect.getdoc(function)}\n{_argument_texts(kind)}"
        call.__signature__ = _signature(function, kind)  # type: ignore[attr-defined]
        return call

    return wrap


def _argument_texts(kind: Any) -> str:
    """The options as lines of an ``Args:`` section."""
    texts = []
    for entry in sorted(fields(kind), key=lambda entry: "group" in entry.metadata):
        text = explain(entry)
        text = text[0].upper() + text[1:]
        if entry.default is None and entry.metadata.get("unset", "any") != "any":
            text += f". By default {entry.metadata['unset']}"
        texts.append(textwrap.fill(f"{entry.name}: {text}.", 100, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(texts)


def _signature(function: Any, kind: Any) -> inspect.Signature:
    """The function's own arguments, then every field of ``kind`` as a keyword argument, required ones first."""
    whole, options = inspect.signature(function), inspect.signature(kind).parameters.values()
    required = sorted(options, key=lambda parameter: parameter.default is not parameter.empty)
    return whole.replace(parameters=[*list(whole.parameters.values())[:2], *required])


def argument(doc: str, **default: Any) -> Any:
    """A field of a call that is no knob: it says what to plan for, or how to tell. Command line and run.toml have their
    own forms of these.

    Args:
        doc: Its text in the docstring.
        **default: ``default=`` if it may be left out.
    """
    return field(**default, metadata={"doc": doc, "choices": None})


def no_progress(share: float) -> None:
    """Tells nobody: the default of ``progress``.

    Args:
        share: The completed share.
    """


@dataclass(frozen=True, kw_only=True)
class BatchCall:
    """What every call of the planner is given beside its knobs."""

    batch_size: int = argument("sequences per step, over all replicas")
    seq_len: int = argument("tokens per sequence")
    progress: Progress = argument(  # noqa: RUF009
        "called with the completed share, between 0 and 1", default=no_progress
    )


@dataclass(frozen=True, kw_only=True)
class PlanCall(CostOptions, PlanOptions, BatchCall):
    """The keyword arguments of ``plan``."""


@dataclass(frozen=True, kw_only=True)
class CompareCall(CostOptions, CompareOptions, BatchCall):
    """The keyword arguments of ``compare``."""

    same_layout: bool = argument(
        "compare the orders in the layout of the fastest one, instead of each in its own best layout, without rivals",
        default=False,
    )
    tokens: str | float | None = argument(
        "a number of tokens to train on, such as 50B, for days and cost", default=None
    )
    price: float | None = argument("price of one device for one hour, for the cost", default=None)


def profile(
    model: "PipelineModel | GPTConfig | str | Path",
    *,
    seq_len: int,
    microbatch_sizes: Sequence[int] = (1,),
    seconds: float = 45.0,
    layers: int | None = None,
    dtype: str | None = None,
    max_tokens: int | None = None,
    progress: Progress = no_progress,
    transport: "Transport | None" = None,
) -> Profile:
    """Measures a model on this machine. Under torchrun all ranks must call it together; otherwise one process measures.

    Args:
        model: A model that ``Pipeline`` takes, a GPTConfig, a preset or shape by name, a Hugging Face config.json or
            folder.
        seq_len: Tokens per sequence.
        microbatch_sizes: Sequences per microbatch to measure.
        seconds: About how long to measure, at most. It ends earlier if the measurements are precise enough.
        layers: Number of layers that each rank measures, by default all layers divided by the ranks.
        dtype: Such as "bfloat16", for a model that is given by name or path.
        max_tokens: Saves time by skipping points where a microbatch has more tokens, context included. It does not
            apply to the first microbatch size.
        progress: Called with the completed share, between 0 and 1.
        transport: Of a program that has met the other ranks before; by default they meet here.

    Returns:
        The measurements, the same on every rank.
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


def calibrate(cluster: str | None = None, *, seconds: float = 60.0, progress: Progress = no_progress) -> "Calibration":
    """Measures one device of this machine, for plans of a cluster of it: no model is needed, and no other ranks.

    Args:
        cluster: Describes the host whose device is measured, for its links and the number of its devices, such as
            ``"dgx-h100"`` or ``"h100:8,nvlink,8x400Gb"``. By default what this machine seems to be.
        seconds: About how long to measure, at most.
        progress: Called with the completed share, between 0 and 1.

    Returns:
        The host with its measured device. ``save`` writes a file that may stand wherever a cluster is named.
    """
    import torch

    from terapipe.runtime.calibration import Calibrator, host_here
    from terapipe.runtime.comm.environment import local_device

    host, device = host_here(cluster), local_device()
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)  # a device of such a host is a core
        return Calibrator(device, host, seconds).run(progress)
    finally:
        torch.set_num_threads(threads)


def verify(
    model: "PipelineModel", *, num_stages: int = 2, slice_lengths: Sequence[int] = (9, 1, 12, 7)
) -> "Verification":
    """Tests in this process whether a model of your own is exact: loss and gradients in slices and stages equal those
    of the whole model.

    A model of up to 64M parameters is copied in float64, a larger one runs as it is. ``Pipeline`` runs a shorter form
    of this check before the first step.

    Args:
        model: A model that ``Pipeline`` takes. Its weights, gradients, buffers and modes stay as they are.
        num_stages: Number of stages to cut it into.
        slice_lengths: Tokens of the slices. Take others if your layers need longer slices or multiples of a length.

    Returns:
        What differs, in which layer, and the likely mistake.
    """
    from terapipe.modeling.verification import verify as verify_model

    return verify_model(model, num_stages=num_stages, slice_lengths=slice_lengths)


@takes(PlanCall)
def plan(model: Any, costs: Costs, call: PlanCall) -> PlanResult:
    """Chooses the fastest plan that fits into memory, by simulation. Arguments that are None are chosen.

    Args:
        model: A model that ``Pipeline`` takes, a GPTConfig, a preset or shape by name, a Hugging Face config.json or
            folder. It may be None if ``costs`` is a Profile or a CostTable.
        costs: A Profile, a Cluster or its name (``"dgx-h100:8"``), or a CostTable.
    """
    spec = model_spec(model)
    request = _request(spec, call.batch_size, call.seq_len, **values_of(call, PlanOptions))
    if isinstance(costs, CostTable):
        return with_seconds(lambda: choose_by_table(costs, request))
    source = source_of(spec, costs, request, call)
    return with_seconds(lambda: _with_price_of_reserve(choose(source, request, call.progress)))


def _with_price_of_reserve(result: PlanResult) -> PlanResult:
    """The result with its step time relative to that with all memory, if part of it was left for other things."""
    request, source, layout = result.request, result.source, result.layout
    if request.budget is not None or not isinstance(source, ClusterSource):
        return result
    memory = source.cluster.host.device.memory
    if memory == source.budget or (result.plan.recompute == "none" and result.peak_bytes < 0.9 * (source.budget or 0)):
        return result
    whole = request.fixed(memory=memory, **asdict(layout), order=result.plan.order)
    return replace(result, reserve=max(1.0, result.step_time / choose(source, whole).step_time))


def longest(model: Any, costs: Costs, *, batch_size: int = 1, **options: Any) -> PlanResult:
    """Finds the longest sequences that fit into memory, to a multiple of 1024 tokens (of ``tile`` or ``num_slices``, if
    that is more) and to 2 %, and plans for them.

    More tokens need more memory, so it is a bisection. It counts the bytes of the smallest plans and searches for the
    fastest only once, for the length that it ends with.

    Args:
        model: As for ``plan``.
        costs: As for ``plan``; not a CostTable, which knows no memory.
        batch_size: Sequences per step, over all replicas.
        **options: As for ``plan``, without ``seq_len``.

    Returns:
        The fastest plan for the longest sequences; ``result.plan.seq_len`` says how long they are.

    Raises:
        ValueError: Not even 1024 tokens fit.
    """

    if isinstance(costs, CostTable):
        raise ValueError("a cost table knows no memory, so nothing is too long for it; give a Cluster or a Profile")
    spec = model_spec(model)
    block = max(BLOCK, *(int(options.get(name) or 0) for name in ("tile", "num_slices")))

    def candidates_for(blocks: int) -> list[Candidate]:
        call = PlanCall(batch_size=batch_size, seq_len=blocks * block, **options)
        request = _request(spec, batch_size, call.seq_len, **values_of(call, PlanOptions))
        source = source_of(spec, costs, request, call)
        return candidates(source, request) or refuse_orders(source, request)

    blocks = max(1, longest_that_fits(candidates_for, MOST_TOKENS // block))  # if nothing fits, the plan says why
    try:
        return plan(model, costs, batch_size=batch_size, seq_len=blocks * block, **options)
    except ValueError:  # counted whole it may be a little larger than a part of it said
        if blocks == 1:
            raise
    return plan(model, costs, batch_size=batch_size, seq_len=(blocks - max(1, blocks // 50)) * block, **options)


@takes(CompareCall)
def compare(model: Any, costs: Costs, call: CompareCall) -> Comparison:
    """Finds the best plan of every order on the same devices, each with the layout, microbatches, chunks and
    recomputation that suit it best. Orders that can be sliced have a row with slices and one with whole sequences.
    Beside them stand estimates of what there is without a pipeline (``rivals``): DDP, FSDP2, context parallel, tensor
    parallel. Where only these fit into memory, the rows are the smallest plans, and say how much memory they lack.

    Args:
        model: As for ``plan``.
        costs: A Profile, or a Cluster or its name.
    """
    if isinstance(costs, CostTable):
        raise ValueError("a cost table knows one kind of stage and no memory; compare with a Cluster or a Profile")
    if call.tokens is not None:
        parse_tokens(call.tokens)
    if call.price is not None and (call.tokens is None or not call.price > 0):
        raise ValueError(f"a price is a positive number and needs a number of tokens, got {call.price!r}; give tokens")
    spec = model_spec(model)
    began = time.perf_counter()
    request = _request(spec, call.batch_size, call.seq_len, **values_of(call, CompareOptions))
    source = source_of(spec, costs, request, call)
    rows = tuple(compare_orders(source, request, same_layout=call.same_layout, progress=call.progress))
    others = () if call.same_layout else tuple(rivals(source, request))
    if not any(row.fits for row in rows) and not any(rival.fits for rival in others):
        refuse_budget(rows)
    seconds = time.perf_counter() - began
    return Comparison(rows, request, source, call.same_layout, seconds, others, call.tokens, call.price)


def compare_clusters(
    model: Any, clusters: Sequence[str | Cluster], *, progress: Progress = no_progress, **options: Any
) -> ClusterComparison:
    """Compares the same training on several clusters: on each the best plan of every order, and its rivals.

    Args:
        model: As for ``plan``.
        clusters: Descriptions, such as ``["dgx-h100:8", "dgx-a100:16"]``.
        progress: As for ``plan``.
        **options: As for ``compare``. With ``tokens`` and ``price``, days and cost are side by side.
    """
    comparisons, failures = dict[str, Comparison](), dict[str, str]()
    for i, one in enumerate(clusters):
        cluster, done = Cluster(one) if isinstance(one, str) else one, i / len(clusters)
        part = partial(_part_of, progress, done, 1 / len(clusters))
        try:
            comparisons[cluster.name] = compare(model, cluster, progress=part, **options)
        except ValueError as error:
            failures[cluster.name] = str(error)
    if not comparisons:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in failures.items()) or "name at least one cluster")
    return ClusterComparison(comparisons, failures)


def _part_of(progress: Progress, done: float, part: float, share: float) -> None:
    """Tells the progress of one of several works."""
    progress(done + part * share)


def estimate(
    plan: Plan | PlanResult,
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
    memory: str | int | None = None,
    layers_only: bool = False,
    autocast: bool = False,
) -> PlanResult:
    """Predicts step time and memory of a plan, without choosing anything.

    Args:
        plan: A result of ``plan``, also one that was loaded from a file, has its layout and costs. A Plan alone is for
            one replica, unless ``layout`` says otherwise.
        costs: A Profile, or a Cluster or its name, in place of the result's own costs.
        model: As for ``plan``. Needed with a Cluster.
        layout: In place of the result's own layout. It has as many pipeline ranks as the plan.
        memory: Memory budget per device, in bytes or as ``"80GiB"``, in place of the result's own.
        layers_only: As for ``plan``.
        autocast: As for ``plan``.
    """
    result = plan if isinstance(plan, PlanResult) else PlanResult.of_plan(plan, layout or Layout(1, plan.num_ranks, 1))
    bare, layout = result.plan, layout or result.layout
    if layout.pp != bare.num_ranks:
        raise ValueError(f"the plan is for {bare.num_ranks} pipeline ranks, the layout has pp {layout.pp}")
    request = Request(
        bare.batch_size * layout.dp,
        bare.seq_len,
        dp=layout.dp,
        pp=layout.pp,
        tp=layout.tp,
        shard=layout.shard,
        tile=1,
        memory=result.request.memory if memory is None else memory,
    )
    options = CostOptions(layers_only=layers_only, autocast=autocast)
    source = result.known_source() if costs is None else source_of(model_spec(model), costs, request, options)
    _check_fit(bare, layout, source)
    evaluator = PlanEvaluator(source, request, layout, bare.recompute_modes[-1])
    return with_seconds(lambda: PlanResult(evaluator.confirm(evaluator.evaluate(bare)), (), request, source))


def simulate(
    plan: Plan | PlanResult,
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
) -> Timeline:
    """Simulates one step of a plan.

    Args:
        plan: As for ``estimate``.
        costs: As for ``estimate``.
        model: As for ``estimate``.
        layout: As for ``estimate``.

    Returns:
        When each action starts and ends, without the work done once per step (gradient all-reduce, optimizer).
    """
    return estimate(plan, costs, model=model, layout=layout).simulate()


def document_planner(
    plan: Plan | PlanResult,
    costs: Costs | None = None,
    *,
    model: Any = None,
    layout: Layout | None = None,
    tile: int | None = None,
) -> DocumentPlanner:
    """Makes plans for batches of packed documents, each cut by the costs of its own documents.

    Args:
        plan: A plan for batches of whole sequences, as for ``estimate``.
        costs: As for ``estimate``.
        model: As for ``estimate``.
        layout: As for ``estimate``.
        tile: Slice lengths are multiples of it. By default as in ``plan`` with these costs.
    """
    result = estimate(plan, costs, model=model, layout=layout)
    source = result.source
    assert source is not None
    if tile is None:
        spec = None if model is None else model_spec(model)
        request = _request(spec, 1, result.plan.seq_len)
        request = plan.request if isinstance(plan, PlanResult) else request
        tile = request.tile_for(tile=source.tile, tp=result.layout.tp)
    cost = with_recompute(source.cost(result.layout), result.plan.recompute_modes[-1])
    return DocumentPlanner(result.plan, DocumentCosts.of(cost, result.plan), tile=tile)


def dry_run(model: Any, plan: Plan | PlanResult, *, layout: Layout | None = None, rank: int | None = None) -> "DryRun":
    """Executes one rank's whole step on fake tensors, at real size, without memory or other ranks: whether shapes and
    dtypes fit, what would make the host wait for the device, and how many bytes are alive at most.

    Args:
        model: As for ``plan``. A model of your own must be on the meta device.
        plan: A result of ``plan`` has its layout and dtype, whether products are autocast, and the planner's count of
            bytes to compare with. With a bare Plan, the caller's ``torch.autocast`` counts.
        layout: As for ``estimate``.
        rank: Of the pipeline; by default the one that needs most memory, or else the last.
    """
    import torch

    import terapipe.runtime.dry_run as dry

    result = plan if isinstance(plan, PlanResult) else PlanResult.of_plan(plan, layout or Layout(1, plan.num_ranks, 1))
    bare, layout = result.plan, layout or result.layout
    memory = None if result.source is None else result.memory
    predicted = peaks(program(bare), bare, memory) if memory is not None else None
    if rank is None:
        rank = bare.num_ranks - 1 if predicted is None else max(range(len(predicted)), key=predicted.__getitem__)
    if not 0 <= rank < bare.num_ranks:
        raise ValueError(f"the pipeline has ranks 0 to {bare.num_ranks - 1}, got {rank}")
    built = _model_object(model, bare.seq_len, result.dtype)
    device = {name: getattr(memory, name) for name in ("state", "attention", "blas") if hasattr(memory, name)}
    is_cast = isinstance(memory, ShapeMemory) and memory.autocast and memory.element == ELEMENT["bfloat16"]
    measured = dry.dry_run(built, bare, layout, rank, autocast=torch.bfloat16 if is_cast else None, **device)
    return replace(measured, predicted=None if predicted is None else predicted[rank])


def predicted_peaks(config: GPTConfig, plan: Plan, dtype: str, attention: str, blas: int) -> list[int]:
    """The bytes of every pipeline rank, by the planner, without optimizer state: what a measured step is compared with.

    Args:
        config: The model's shape.
        plan: Of the step.
        dtype: Of weights and activations, such as "bfloat16".
        attention: The name of the attention kernel, which decides what it saves for backward.
        blas: Bytes of cuBLAS's workspaces, 0 on CPUs.
    """
    return peaks(program(plan), plan, ShapeMemory(config, ELEMENT[dtype], 0, attention=attention, blas=blas))


def _check_fit(plan: Plan, layout: Layout, source: Source) -> None:
    if plan.num_layers != source.layers:
        raise ValueError(f"the plan splits {plan.num_layers} layers, the model has {source.layers}")
    if layout.tp not in source.tensor_degrees():
        raise ValueError(f"tp must be one of {source.tensor_degrees()} on {source.name}, got {layout.tp}")
    if layout.devices > source.devices:
        raise ValueError(f"{layout} needs {layout.devices} devices, {source.name} has {source.devices}")


# Models and costs


def model_spec(model: Any) -> ModelSpec | None:
    """What the planner must know about a model: its shape, its shortest slice, how it can be recomputed.

    Args:
        model: As for ``plan``.

    Returns:
        None if the model does not say; planning then needs a Profile.
    """
    if isinstance(model, str | Path):
        model = _model_of_name(str(model))
    if model is None or isinstance(model, ModelSpec):
        return model
    if isinstance(model, GPTConfig):
        return ModelSpec(model, bare_ends=True)
    from terapipe.modeling.stage import require_model

    return require_model(model).planning_spec()


def source_of(spec: ModelSpec | None, costs: Costs, request: Request, options: CostOptions) -> Source:
    """Where the planner gets its costs from.

    Args:
        spec: What the model says of itself. With a Profile it may be None.
        costs: As for ``plan``, without a table.
        request: What is fixed.
        options: How to read the costs.
    """
    fused, frozen = (True, None) if spec is None else (spec.fused_grads, spec.frozen)
    if isinstance(costs, str):
        costs = Cluster(costs)
    if isinstance(costs, Profile):
        if spec is not None:
            costs.check_model(spec.config)
        if options.autocast and costs.autocast is None:
            raise ValueError(
                f"the profile was measured in {costs.dtype} without autocast; measure again under torch.autocast, or "
                "leave autocast out"
            )
        if options.attention is not None:
            raise ValueError(f"the profile was measured with attention kernel {costs.attention}; leave attention out")
        fixed = (request.dp or 1) * (request.pp or 0) * (request.tp or 1)
        ranks = options.devices or fixed or costs.ranks
        element, cast = ELEMENT[costs.autocast or costs.dtype], costs.autocast is not None
        kept = None if spec is None or spec.layer_bytes is None else spec.layer_bytes(element, cast)
        return ProfileSource(costs, ranks, request.tp or 1, fused, options.optimizer, frozen, kept)
    if not isinstance(costs, Cluster):
        raise ValueError(f"costs are a Profile, a Cluster or its name, or a CostTable, got {type(costs).__name__}")
    if spec is None:
        raise ValueError("a Cluster says nothing of the model; give a preset, a GPTConfig, or a model to plan for")
    if options.attention is not None:
        device = with_attention(costs.host.device, options.attention)
        costs = Cluster(costs.name, replace(costs.host, device=device), costs.hosts)
    if options.autocast and costs.host.device.element != 2:
        raise ValueError(f"autocast is for devices that compute in half precision, {costs.name} does not")
    config = spec.config
    if config.max_seq_len > 1:  # else positions are rotated, which takes no parameters
        config = replace(config, max_seq_len=max(config.max_seq_len, request.seq_len))
    ends, autocast = not options.layers_only, options.autocast
    kept = None if spec.layer_bytes is None else spec.layer_bytes(costs.host.device.element, autocast)
    return ClusterSource(
        config, costs, ends, fused, autocast, optimizer=options.optimizer, frozen=frozen, layer_bytes=kept
    )


def _request(spec: ModelSpec | None, batch_size: int, seq_len: int, **options: Any) -> Request:
    """With what the model cannot do, so that no caller can forget it."""
    if spec is not None:
        options |= {name: getattr(spec, name) for name in ("min_slice", "recompute_modes", "bare_ends")}
    return Request(batch_size, seq_len, **options)


def _model_of_name(text: str, dtype: str | None = None) -> Any:
    """A GPTConfig for a preset or shape, a Decoder without weights for a Hugging Face config.json or folder."""
    if text in PRESETS or not Path(text).exists():
        return gpt_config(text)
    from terapipe.hf.decoder import decoder_from

    return decoder_from(Path(text), dtype)


def _model_object(model: Any, seq_len: int, dtype: str | None) -> "PipelineModel":
    """A model that can be run. A shape becomes a GPT without weights (on the meta device), with enough positions."""
    if isinstance(model, str | Path):
        model = _model_of_name(str(model), dtype)
    if not isinstance(model, GPTConfig):
        built: PipelineModel = model
        return built
    import torch

    from terapipe.modeling.gpt import GPT

    config, numbers = replace(model, max_seq_len=max(seq_len, model.max_seq_len)), getattr(torch, dtype or "float32")
    with torch.device("meta"):
        gpt = GPT(config).to(numbers)
    if model.max_seq_len == 1:  # positions are rotated, which takes no parameters
        from terapipe.runtime.dry_run import NoPositions

        gpt.positions = NoPositions(numbers)  # type: ignore[assignment]
    return gpt
