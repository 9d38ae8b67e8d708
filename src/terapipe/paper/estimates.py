"""Rough estimates of alternatives on the same devices: FSDP, and FSDP with context parallel (ring attention).

They are counted, not simulated: compute and traffic are assumed to overlap perfectly wherever they can. So they favor
the alternatives.
"""

from dataclasses import dataclass

from terapipe.planning.cost import StageSpec
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory
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
