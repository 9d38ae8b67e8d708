"""Bytes on links: what devices send in a step, inside of their hosts and between them, and how long collectives take.

A ring over devices passes through those of a host one after the other, and leaves the host once. With two hosts of four
devices, and rings over every second device (they are ``inner`` = 2 apart)::

    0 -> 2 => 4 -> 6 => 0      => goes through a card, -> does not; the other ring is 1 -> 3 => 5 -> 7 => 1

so a card carries as many rings as members of one ring are apart, and no more than the host has devices.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from terapipe.planning.cost import stage_specs
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import parameters
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.search.source import ClusterSource

# All-reduces of tensor parallelism that the backward of a layer repeats, of the two in its forward.
REPEATED: dict[Recompute, float] = {"none": 0.0, "light": 1.0, "block": 1.0, "full": 2.0}


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in one step, on average over devices."""

    inside: float = 0.0  # to devices of its own host
    between: float = 0.0  # to other hosts: what a host's cards carry, divided by its devices

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.inside * times, self.between * times)


class Exchange(NamedTuple):
    """A collective operation: its seconds alone on its links, and the bytes of each device."""

    seconds: float = 0.0
    traffic: Traffic = Traffic()


def ring(cluster: Cluster, sent: float, size: int, inner: int = 1) -> Exchange:
    """An exchange in which every member of a ring sends to the next one: all-gather, reduce-scatter, all-reduce, or
    keys and values in ring attention. All rings of the cluster run at the same time.

    Args:
        cluster: Hosts and links.
        sent: Bytes that each member sends in all.
        size: Members of a ring.
        inner: Neighbors on the ring have numbers that are so far apart.
    """
    host = cluster.host
    if size == 1 or not sent:
        return Exchange()
    inside = host.intra_node.seconds(sent) if inner < host.devices else 0.0
    if size * inner <= host.devices:
        return Exchange(inside, Traffic(sent, 0.0))
    rings = min(inner, host.devices)
    through = sent * rings / host.devices
    seconds = max(inside, host.inter_node.seconds(sent * rings / host.rings))
    return Exchange(seconds, Traffic(sent - through, through))


def all_to_all(cluster: Cluster, sent: float, size: int) -> Exchange:
    """An exchange in which every member sends an equal part to every other, as Ulysses does before and after attention.

    Args:
        cluster: Hosts and links.
        sent: Bytes of each member; a part of them stays where it is.
        size: Members, neighbors on their hosts.
    """
    host = cluster.host
    near = min(size, host.devices)
    inside, between = sent * (near - 1) / size, sent * (size - near) / size
    if size == 1 or not sent:
        return Exchange()
    seconds = host.intra_node.seconds(inside)
    if between:
        seconds = max(seconds, host.inter_node.seconds(between * host.devices))
    return Exchange(seconds, Traffic(inside, between))


def tensor_traffic(source: ClusterSource, tp: int, tokens: float, layers: float, repeated: float) -> Traffic:
    """What a tensor parallel rank sends: two all-reduces in the forward of each layer, two in its backward, and those
    that the backward computes again. Its group lies within a host.

    Args:
        source: Model and cluster.
        tp: Ranks of the group.
        tokens: Of all microbatches.
        layers: Of a device.
        repeated: See ``REPEATED``.
    """
    nbytes = tokens * source.config.hidden * source.cluster.host.device.element
    return Traffic((4 + repeated) * layers * 2 * (tp - 1) / tp * nbytes)


def plan_traffic(plan: Plan, layout: Layout, source: ClusterSource) -> Traffic:
    """What a plan's devices send: hidden states and their gradients from stage to stage, all-reduces of tensor
    parallelism, and the sum of gradients over replicas.

    Args:
        plan: Of one replica.
        layout: Replicas and ranks.
        source: Model and cluster.
    """
    config, device = source.config, source.cluster.host.device
    tokens = plan.batch_size * plan.seq_len
    specs, lengths = stage_specs(plan.boundaries), [s.length * s.size for s in plan.slices]
    tensor = Traffic()
    for stage, spec in enumerate(specs):
        modes = plan.recompute_of(stage)
        repeated = sum(REPEATED[mode] * length for mode, length in zip(modes, lengths, strict=True)) / tokens
        tensor += tensor_traffic(source, layout.tp, tokens, spec.layers, repeated)
    per_weight = device.summed + (device.element if layout.shard else device.summed)
    weights = sum(parameters(config, [specs[k] for k in plan.stages_of(rank)]) for rank in range(layout.pp))
    sent = (layout.dp - 1) / layout.dp * per_weight * weights / (layout.pp * layout.tp)
    summed = ring(source.cluster, sent, layout.dp, layout.pp * layout.tp).traffic
    return _messages(plan, layout, source) * (1 / layout.devices) + tensor * (1 / layout.pp) + summed


def _messages(plan: Plan, layout: Layout, source: ClusterSource) -> Traffic:
    """What all devices together send from stage to stage: hidden states there, gradients back. A pipeline rank's tensor
    parallel devices send a part each."""
    device, per_host = source.cluster.host.device, source.cluster.host.devices
    tokens = plan.batch_size * plan.seq_len
    nbytes = 2.0 * tokens * source.config.hidden * max(device.element, 4 * source.autocast)
    neighbors = [(a, b) for a, b in pairwise(map(plan.rank_of, range(plan.num_stages))) if a != b]
    near = 0
    for replica in range(layout.dp):
        first = replica * layout.pp * layout.tp
        near += sum((first + a * layout.tp) // per_host == (first + b * layout.tp) // per_host for a, b in neighbors)
    return Traffic(near * nbytes, (layout.dp * len(neighbors) - near) * nbytes)
