"""The published experiments, simulated: GPipe against slices along tokens, in the published layouts.

The published numbers are the ``.toml`` files beside this module, one table each, with its source. `rows` simulates the
main table, `sweep` the one over numbers of slices. The rest asks what the paper leaves open: other orders in its
settings (`orders`, `largest_throughput`), and newer models and clusters (`outcome`).
"""

import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from statistics import fmean
from typing import Any, Self

from terapipe.planning.cost import StageSpec, with_recompute
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import MOST_BYTES, ShapeMemory
from terapipe.planning.presets import PRESETS
from terapipe.planning.slices import even_lengths
from terapipe.search.choose import choose, compare, pick
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource


def _table(name: str) -> dict[str, Any]:
    """A published table: a file of this package, which says where it is from."""
    return tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Setting:
    """One row of the main table: seconds of a step without and with slices along tokens."""

    number: int
    model: str
    hosts: int  # p3.16xlarge
    batch_size: int
    layout: Layout
    without: float
    sliced: float
    scheme: tuple[int, ...] | None = None  # the published slices of one microbatch of one sequence, if any

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """From a row of the data file, in which a scheme is pairs of a count and a length."""
        scheme = tuple(length for count, length in row.get("scheme", ()) for _ in range(count))
        return cls(**{**row, "layout": Layout(*row["layout"]), "scheme": scheme or None})

    @property
    def speedup(self) -> float:
        """The published gain of slices."""
        return self.without / self.sliced


_MAIN, _SWEEP = _table("terapipe_settings"), _table("terapipe_sweep")
TOKENS: int = _MAIN["seq_len"]
SETTINGS = tuple(Setting.of(row) for row in _MAIN["settings"])
SWEPT: int = _SWEEP["setting"]
SWEEP: dict[int, float] = {int(count): seconds for count, seconds in _SWEEP["seconds"].items()}
ONE_LAYER: dict[int, float] = {int(n): ms for n, ms in _table("terapipe_layer")["milliseconds"].items()}

UNLIMITED = MOST_BYTES  # the paper has no memory limit


@dataclass(frozen=True)
class Row:
    """One setting, simulated."""

    setting: Setting
    without: PlanEstimate
    sliced: PlanEstimate
    scheme: PlanEstimate | None  # the published slices, under the same costs

    @property
    def speedup(self) -> float:
        return self.without.step_time / self.sliced.step_time

    @property
    def errors(self) -> tuple[float, float, float]:
        """Relative errors of the step without slices, with slices, and of the speed-up."""
        s = self.setting
        pairs = ((self.without.step_time, s.without), (self.sliced.step_time, s.sliced), (self.speedup, s.speedup))
        without, sliced, speedup = (ours / theirs - 1 for ours, theirs in pairs)
        return without, sliced, speedup

    def to_dict(self) -> dict[str, Any]:
        s = self.setting
        return {
            "id": s.number,
            "model": s.model,
            "without": {"published": s.without, "simulated": self.without.step_time},
            "with": {"published": s.sliced, "simulated": self.sliced.step_time},
            "speedup": {"published": s.speedup, "simulated": self.speedup},
            "published_scheme": None if self.scheme is None else self.scheme.step_time,
            "microbatches": list(self.sliced.plan.sizes),
            "slices": [list(row) for row in self.sliced.plan.lengths],
        }


def source_of(setting: Setting) -> ClusterSource:
    """Without embedding and head, as the paper's timings are; gradients are summed in half precision, and tensor
    parallel ranks repeat norms and residuals, as its code has it."""
    host = Cluster("p3.16xlarge").host
    cluster = Cluster("p3.16xlarge", replace(host, device=replace(host.device, summed=2)), setting.hosts)
    return ClusterSource(PRESETS[setting.model], cluster, ends=False, sequence_parallel=False)


def request_of(setting: Setting) -> Request:
    """The published batch in the published layout, without recomputation and without a memory limit."""
    layout = setting.layout
    return Request(
        batch_size=setting.batch_size,
        seq_len=TOKENS,
        dp=layout.dp,
        pp=layout.pp,
        tp=layout.tp,
        recompute="none",
        memory=UNLIMITED,
    )


def evaluator_of(setting: Setting) -> PlanEvaluator:
    """Evaluates plans in the published layout."""
    return PlanEvaluator(source_of(setting), request_of(setting), setting.layout, "none")


def row(setting: Setting) -> Row:
    """GPipe with microbatches of one sequence, and the planner's slices in the paper's order, one chunk per rank."""
    evaluator = evaluator_of(setting)
    whole = evaluator.evaluate(evaluator.plan("gpipe", 1, (TOKENS,)))
    sliced = choose(evaluator.source, request_of(setting).fixed(order="terapipe", chunks=1)).estimate
    scheme = evaluator.evaluate(evaluator.plan("terapipe", 1, setting.scheme)) if setting.scheme else None
    return Row(setting, whole, sliced, scheme)


def rows() -> list[Row]:
    """All settings, simulated."""
    return [row(setting) for setting in SETTINGS]


def sweep(planned: float) -> list[dict[str, Any]]:
    """Step times of setting 9 by number of equal slices, and with the planner's slices."""
    setting = SETTINGS[SWEPT - 1]
    evaluator = evaluator_of(setting)
    points: list[dict[str, Any]] = [
        {
            "slices": count,
            "published": published,
            "simulated": evaluator.evaluate(evaluator.plan("terapipe", 1, even_lengths(TOKENS, count, 1))).step_time,
        }
        for count, published in SWEEP.items()
    ]
    return [*points, {"slices": "planned", "published": setting.sliced, "simulated": planned}]


def mean_error(settings: list[Row]) -> float:
    """The mean absolute error of all step times, with and without slices, relative to the published ones."""
    return fmean(abs(error) for setting in settings for error in setting.errors[:2])


@dataclass(frozen=True)
class Estimate:
    """What a way to train without a pipeline would take, by a few lines of arithmetic."""

    name: str
    step_time: float  # seconds
    peak_bytes: int  # per device
    note: str  # what bounds it


def estimates(source: ClusterSource, request: Request) -> list[Estimate]:
    """FSDP if there is a sequence for every device, else FSDP with each sequence over a ring of devices. Nothing if the
    batch divides neither way.

    Args:
        source: Model and cluster.
        request: Batch size and sequence length.
    """
    devices, batch_size = source.devices, request.batch_size
    if batch_size % devices == 0:
        return [_estimate_fsdp(source, request, batch_size // devices, 1)]
    if devices % batch_size == 0 and request.seq_len % (devices // batch_size) == 0:
        return [_estimate_fsdp(source, request, 1, devices // batch_size)]
    return []


def _estimate_fsdp(source: ClusterSource, request: Request, sequences: int, ring: int) -> Estimate:
    """``sequences`` per device, or each sequence over ``ring`` devices."""
    config, host = source.config, source.cluster.host
    length = request.seq_len // ring
    cost = with_recompute(source.cost(Layout()), "full")
    whole = StageSpec(config.layers, True, True)
    # Devices of a ring share early and late tokens evenly, so each has the mean context.
    context = (request.seq_len - length) / 2
    compute = float(cost.forward(whole, sequences, length, context) + cost.backward(whole, sequences, length, context))
    link = host.intra_node if ring <= host.devices else host.inter_node
    block = sequences * length * 2 * config.num_kv_heads * config.head_size * host.device.element
    # Keys and values pass the ring in the forward, and again, with their gradients, in the backward.
    passed = 3 * config.layers * (ring - 1) * link.seconds(block) if ring > 1 else 0.0
    # Weights are gathered for forward and backward, gradients scattered: each crosses every host's card once.
    weights = config.parameters * (2 * host.device.element + 4)
    gathered = host.inter_node.seconds(weights) if source.cluster.hosts > 1 else host.intra_node.seconds(weights)
    per_step = cost.per_step([whole]) / source.devices
    kernel, blas = host.device.attention_kernel, host.device.blas
    memory = ShapeMemory(
        config, host.device.element, host.device.state, 1, recompute="full", attention=kernel, blas=blas
    )
    layer = StageSpec(1)
    activations = config.layers * float(memory.activations(layer, sequences, length)) / 2
    # In a ring, attention sees one device's keys at a time.
    gathered_layers = 2 * config.layer_parameters * host.device.element
    working = float(memory.workspace(layer, sequences, length, 0)[1]) + gathered_layers
    logits = float(memory.workspace(StageSpec(1, last=True), sequences, min(length, 2048), 0)[0])
    state = memory.model_state(whole) + memory.gradients(whole).during
    peak = state / source.devices + activations + working + logits + memory.per_rank()
    note = "traffic taken to overlap" if compute >= max(passed, gathered) else "bound by its traffic"
    name = "FSDP (estimate)" if ring == 1 else f"FSDP, rings of {ring} (estimate)"
    return Estimate(name, max(compute, passed, gathered) + per_step, round(peak), note)


GROWTH = (1, 2, 4, 8, 16)


def orders(setting: Setting, growth: int = 1) -> list[PlanEstimate]:
    """The best plan of every order on the published hosts, each in its own best layout, within what is usable of a
    V100's memory and with recomputation allowed.

    GPipe needs much memory, which 1F1B avoids. This study answers whether 1F1B, slices, or both together are best.
    """
    return compare(source_of(setting), Request(setting.batch_size * growth, TOKENS))


def largest_throughput(setting: Setting) -> dict[str, PlanEstimate]:
    """For each order its highest throughput with batches of 1 to 16 times the published size, of plans that fit."""
    best: dict[str, PlanEstimate] = {}
    for growth in GROWTH:
        for choice in orders(setting, growth):
            rival = best.get(choice.title)
            if choice.fits and (rival is None or choice.tokens_per_second > rival.tokens_per_second):
                best[choice.title] = choice
    return best


@dataclass(frozen=True)
class Case:
    """A model on a cluster that the paper does not have."""

    model: str
    where: str
    batch_size: int
    seq_len: int

    @property
    def source(self) -> ClusterSource:
        config = PRESETS[self.model]
        return ClusterSource(replace(config, max_seq_len=max(config.max_seq_len, self.seq_len)), Cluster(self.where))


CASES = (
    Case("llama3-8b", "dgx-a100:1", 8, 8192),
    Case("llama3-8b", "dgx-h100:1", 1, 131072),
    Case("llama3-8b", "dgx-h100:8", 1, 1048576),
    Case("llama3-70b", "dgx-a100:8", 16, 8192),
    Case("llama3-70b", "dgx-h100:8", 4, 32768),
    Case("llama3-70b", "dgx-h100:8", 8, 32768),
    Case("llama3-70b", "dgx-h100:16", 1, 131072),
    Case("llama3-405b", "dgx-h100:64", 64, 8192),
    Case("llama3-405b", "dgx-h100:64", 4, 131072),
    Case("llama3-405b", "dgx-h100:512", 512, 8192),
)


@dataclass(frozen=True)
class Outcome:
    """All of them in their own best layouts."""

    case: Case
    planned: PlanEstimate
    whole: PlanEstimate | None  # the fastest of all orders with whole sequences; None if none fits
    best_1f1b: PlanEstimate | None  # None if none fits
    others: list[Estimate]


def outcome(case: Case) -> Outcome:
    """Plans one case, and compares the plan with what there is without slices.

    Args:
        case: The model, the cluster and the batch.
    """
    request = Request(case.batch_size, case.seq_len)
    rows = [row for row in compare(case.source, request) if row.fits]
    whole = min((row for row in rows if not row.sliced), key=lambda row: row.step_time, default=None)
    best_1f1b = next((row for row in rows if row.name == "1f1b"), None)
    return Outcome(case, pick(rows), whole, best_1f1b, estimates(case.source, request))
