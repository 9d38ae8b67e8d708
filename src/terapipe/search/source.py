"""Sources of costs: a described cluster, or a measured profile."""

from dataclasses import dataclass, replace
from typing import Protocol

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import Cost, Memory
from terapipe.planning.fitted import FittedCost
from terapipe.planning.hardware import Cluster, usable_memory
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.profile import STATE, Profile
from terapipe.presets import GPTConfig


class Source(Protocol):
    """What the planner needs to know about devices and model."""

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> int: ...

    @property
    def devices(self) -> int: ...

    @property
    def budget(self) -> int | None:
        """Usable memory of a device in bytes, if known."""

    def cost(self, layout: Layout) -> Cost: ...

    def memory(self, layout: Layout) -> Memory: ...

    @property
    def tile(self) -> int:
        """Slice lengths are multiples of this many tokens, unless the request has a tile."""

    @property
    def dtype(self) -> str:
        """The dtype of parameters and activations."""

    def tensor_degrees(self) -> list[int]:
        """The possible degrees of tensor parallelism."""


@dataclass(frozen=True)
class ClusterSource:
    """A described cluster, which need not exist. Costs are computed from its specifications."""

    config: GPTConfig
    cluster: Cluster
    ends: bool = True  # whether embedding, head and loss count

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def layers(self) -> int:
        return self.config.layers

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def budget(self) -> int:
        return usable_memory(self.cluster.host.device)

    def cost(self, layout: Layout) -> Cost:
        return AnalyticCost(self.config, self.cluster, layout, ends=self.ends)

    def memory(self, layout: Layout) -> Memory:
        device = self.cluster.host.device
        return ShapeMemory(
            self.config, device.element, device.state, layout.tp, shards=layout.shards, replicas=layout.dp
        )

    @property
    def tile(self) -> int:
        return self.cluster.host.device.tile

    @property
    def dtype(self) -> str:
        return {2: "bfloat16", 4: "float32", 8: "float64"}[self.cluster.host.device.element]

    def tensor_degrees(self) -> list[int]:
        heads = self.config.num_kv_heads
        return [t for t in range(1, self.cluster.host.devices + 1) if self.cluster.host.devices % t == heads % t == 0]


@dataclass(frozen=True)
class ProfileSource:
    """A measured machine. ``ranks`` may be more than were measured; they are assumed to be equally fast.

    A profile is measured without tensor parallelism, so a group of ``tp`` ranks is planned as one measured device.
    Slicings then compare correctly, but the predicted step time is too long.
    """

    profile: Profile
    ranks: int
    tp: int = 1

    @property
    def name(self) -> str:
        return f"the profiled machine ({self.ranks} ranks)"

    @property
    def layers(self) -> int:
        return self.profile.config.layers

    @property
    def devices(self) -> int:
        return self.ranks

    @property
    def budget(self) -> int | None:
        """Memory per rank: that of its GPU. Without GPUs, the ranks of a host share its memory."""
        machine = self.profile.machine
        if "device_memory" in machine:
            return int(machine["device_memory"])
        memory = machine.get("memory")
        return int(memory) // self.profile.ranks_per_host if memory else None

    @property
    def tile(self) -> int:
        return 8 if self.profile.machine.get("device", "cpu") == "cpu" else 128

    @property
    def dtype(self) -> str:
        return self.profile.dtype

    def cost(self, layout: Layout) -> Cost:
        return FittedCost(self.profile, layout=replace(layout, tp=1))

    def memory(self, layout: Layout) -> Memory:
        profile = self.profile
        state = STATE[profile.dtype]
        return ShapeMemory(profile.config, profile.element, state, shards=layout.shards, replicas=layout.dp)

    def tensor_degrees(self) -> list[int]:
        return [self.tp]
