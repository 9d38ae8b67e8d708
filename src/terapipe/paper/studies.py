"""Studies beyond the paper: every order in its settings, larger batches, modern models on modern clusters."""

from dataclasses import dataclass, replace

from terapipe.paper.published import Setting
from terapipe.paper.reproduce import request_of, source_of
from terapipe.planning.cost import StageSpec
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory
from terapipe.presets import PRESETS
from terapipe.search.choose import choose
from terapipe.search.compare import compare
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource


@dataclass(frozen=True)
class Estimate:
    name: str
    step_time: float
    peak_bytes: int
    note: str


def estimates(source: ClusterSource, request: Request) -> list[Estimate]:
    """FSDP if there is a sequence for every device, else FSDP with each sequence over a ring of devices."""
    devices, batch_size = source.devices, request.batch_size
    if batch_size % devices == 0:
        return [_sharded(source, request, batch_size // devices, 1)]
    if devices % batch_size == 0 and request.seq_len % (devices // batch_size) == 0:
        return [_sharded(source, request, 1, devices // batch_size)]
    return []


def _sharded(source: ClusterSource, request: Request, sequences: int, ring: int) -> Estimate:
    """``sequences`` per device, or each sequence over ``ring`` devices."""
    config, host = source.config, source.cluster.host
    length = request.seq_len // ring
    cost = source.cost(Layout(), recompute=True)
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
    memory = ShapeMemory(config, host.device.element, host.device.state, 1, recompute=True)
    layer = StageSpec(1)
    activations = config.layers * float(memory.activations(layer, sequences, length)) / 2
    working = float(memory.workspace(layer, sequences, length)[1]) + 2 * config.layer_parameters * host.device.element
    logits = float(memory.workspace(StageSpec(1, last=True), sequences, min(length, 2048))[0])
    peak = memory.model_state(whole) / source.devices + activations + working + logits
    note = "traffic taken to overlap" if compute >= max(passed, gathered) else "bound by its traffic"
    name = "FSDP (estimate)" if ring == 1 else f"FSDP, rings of {ring} (estimate)"
    return Estimate(name, max(compute, passed, gathered) + per_step, round(peak), note)


GROWTH = (1, 2, 4, 8, 16)


def orders(setting: Setting, growth: int = 1) -> list[PlanEstimate]:
    """The best plan of every order in the published layout, within a V100's memory and with recomputation allowed.

    GPipe needs much memory, which 1F1B avoids. This study answers whether 1F1B, slices, or both together are best.
    """
    request = request_of(setting).fixed(batch_size=setting.batch_size * growth, budget=None, recompute=None)
    return compare(source_of(setting), request)


def largest_throughput(setting: Setting) -> dict[str, PlanEstimate]:
    """For each order its highest throughput with batches of 1 to 16 times the published size, of plans that fit."""
    best: dict[str, PlanEstimate] = {}
    for growth in GROWTH:
        for choice in orders(setting, growth):
            known = best.get(choice.name)
            if choice.fits and (known is None or choice.tokens_per_second > known.tokens_per_second):
                best[choice.name] = choice
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
    Case("llama3-70b", "dgx-h100:16", 1, 131072),
    Case("llama3-405b", "dgx-h100:64", 64, 8192),
    Case("llama3-405b", "dgx-h100:64", 4, 131072),
    Case("llama3-405b", "dgx-h100:512", 512, 8192),
)


@dataclass(frozen=True)
class Outcome:
    case: Case
    planned: PlanEstimate
    best_1f1b: PlanEstimate | None  # in any layout; None if none fits
    others: list[Estimate]


def outcome(case: Case) -> Outcome:
    request = Request(case.batch_size, case.seq_len, tile=max(8, case.seq_len // 1024))
    planned = choose(case.source, request).estimate
    try:
        best_1f1b = choose(case.source, request.fixed(order="1f1b")).estimate
    except ValueError:
        best_1f1b = None
    return Outcome(case, planned, best_1f1b, estimates(case.source, request))
