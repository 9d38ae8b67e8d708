"""What training without a pipeline would take: FSDP, and FSDP with each sequence over several devices (ring attention).

A few lines of arithmetic, no simulation. All traffic is taken to overlap with computation, which flatters it: a step
takes as long as the largest of computation, keys and values in the ring, and weights through the network.
"""

from dataclasses import dataclass

from terapipe.planning.cost import StageSpec, with_recompute
from terapipe.planning.layout import Layout
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource


@dataclass(frozen=True)
class Estimate:
    """What a way to train without a pipeline would take.

    Attributes:
        name: For tables.
        step_time: Seconds.
        peak_bytes: Of each device; all need the same.
        note: What bounds the time.
    """

    name: str
    step_time: float
    peak_bytes: int
    note: str


def estimates(source: ClusterSource, request: Request) -> list[Estimate]:
    """FSDP if there is a sequence for every device, else FSDP with each sequence over a ring of devices. Nothing if the
    batch divides neither way.

    Args:
        source: Model and cluster.
        request: Batch size and sequence length.
    """
    devices, batch_size = source.devices, request.batch_size
    if batch_size % devices == 0:
        return [estimate_fsdp(source, request, batch_size // devices, 1)]
    if devices % batch_size == 0 and request.seq_len % (devices // batch_size) == 0:
        return [estimate_fsdp(source, request, 1, devices // batch_size)]
    return []


def estimate_fsdp(
    source: ClusterSource, request: Request, sequences: int, ring: int, *, offload: bool = False
) -> Estimate:
    """FSDP with recomputation of every layer, on all devices of a cluster.

    Args:
        source: Model and cluster.
        request: Batch size and sequence length.
        sequences: Of each device, or of each ring.
        ring: Devices that share a sequence; 1 for none.
        offload: Whether what layers keep for the backward is on the host, which is taken to cost no time.
    """
    config, host = source.config, source.cluster.host
    length = request.seq_len / ring
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
    peak = _peak(source, sequences, length, offload)
    note = "traffic taken to overlap" if compute >= max(passed, gathered) else "bound by its traffic"
    name = "FSDP (estimate)" if ring == 1 else f"FSDP, rings of {ring} (estimate)"
    return Estimate(name, max(compute, passed, gathered) + per_step, round(peak), note)


def _peak(source: ClusterSource, sequences: int, length: float, offload: bool) -> float:
    """Bytes of a device: its shard of the model's state, the input of every layer, two layers with gathered weights,
    the activations of one, and logits of at most 2048 tokens at a time."""
    config, element = source.config, source.cluster.host.device.element
    memory = with_recompute(source.memory(Layout()), "full")
    layer, whole = StageSpec(1), StageSpec(config.layers, True, True)
    activations = 0.0 if offload else config.layers * float(memory.activations(layer, sequences, length)) / 2
    # In a ring, attention sees one device's keys at a time.
    working = float(memory.workspace(layer, sequences, length, 0)[1]) + 2 * config.layer_parameters * element
    logits = float(memory.workspace(StageSpec(1, last=True), sequences, min(length, 2048), 0)[0])
    state = memory.model_state(whole) + memory.gradients(whole).during
    return state / source.devices + activations + working + logits + memory.per_rank()
