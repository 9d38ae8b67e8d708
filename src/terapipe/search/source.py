"""Sources of costs: a described cluster, or a measured profile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import Cost, Memory, StageSpec
from terapipe.planning.device import usable_memory, usable_of_measured
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory, parameters
from terapipe.planning.optimizer_state import state_bytes
from terapipe.planning.presets import FrozenLayers, GPTConfig, LayerBytes
from terapipe.planning.profile import ELEMENT, STATE, FittedCost, Profile


class Source(Protocol):
    """What the planner needs to know about devices and model."""

    @property
    def name(self) -> str:
        """For messages and reports."""

    @property
    def layers(self) -> int:
        """Layers of the model."""

    @property
    def devices(self) -> int:
        """The number of devices."""

    @property
    def budget(self) -> int | None:
        """Usable memory of a device in bytes, if known."""

    @property
    def host_budget(self) -> int | None:
        """Bytes of the host's memory that offloaded slices of a device may take. None where the device is the host:
        what is offloaded stays in the same memory."""

    @property
    def optimizer(self) -> str | None:
        """Whose state counts, one of ``OPTIMIZERS``; None: that of the description or of the profile's dtype."""

    def host_state(self, layout: Layout, stages: Sequence[StageSpec]) -> float:
        """Bytes of the host's memory that the optimizer takes for the parameters of one rank's stages."""

    @property
    def knows_host(self) -> bool:
        """Whether the host's memory and the link to it are known, so that slices may be offloaded without being asked
        for it."""

    def cost(self, layout: Layout) -> Cost:
        """Seconds of computations and transfers in a layout."""

    def memory(self, layout: Layout) -> Memory:
        """Bytes of slices and stages in a layout."""

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
    fused: bool = True  # see ModelSpec.fused_grads
    autocast: bool = False  # whether weights are float32, and products autocast to the device's dtype
    sequence_parallel: bool = True  # see AnalyticCost
    scatter: bool = True
    batched: bool = False
    optimizer: str | None = None  # see planning/optimizer_state.py
    frozen: FrozenLayers | None = None  # see ModelSpec.frozen
    layer_bytes: LayerBytes | None = None  # see ModelSpec.layer_bytes

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

    @property
    def host_budget(self) -> int | None:
        host = self.cluster.host
        return host.memory_per_device if host.device.accelerator else None

    @property
    def _weight(self) -> int:
        """Bytes of a parameter."""
        return 4 if self.autocast else self.cluster.host.device.element

    def host_state(self, layout: Layout, stages: Sequence[StageSpec]) -> float:
        return _host_state(self.optimizer, self._weight, self.config, layout, stages)

    @property
    def knows_host(self) -> bool:
        """The types of ``HOSTS`` say how much memory they have; of a host in words it is an assumption."""
        return bool(self.cluster.host.device.accelerator and self.cluster.host.memory)

    def cost(self, layout: Layout) -> Cost:
        return AnalyticCost(
            self.config,
            self.cluster,
            layout,
            ends=self.ends,
            fused=self.fused,
            autocast=self.autocast,
            sequence_parallel=self.sequence_parallel,
            scatter=self.scatter,
            batched=self.batched,
            optimizer=self.optimizer,
        )

    def memory(self, layout: Layout) -> Memory:
        device = self.cluster.host.device
        return ShapeMemory(
            self.config,
            device.element,
            self._state,
            layout.tp,
            shards=layout.shards,
            replicas=layout.dp,
            autocast=self.autocast,
            attention=device.attention_kernel,
            blas=device.blas,
            fused=self.fused,
            frozen=self.frozen,
            layer_bytes=self.layer_bytes,
        )

    @property
    def _state(self) -> float:
        """Bytes of optimizer state on the device for each parameter."""
        if self.optimizer is not None:
            return state_bytes(self.optimizer, self._weight, master=True).device
        return STATE["float32"] if self.autocast else self.cluster.host.device.state

    @property
    def tile(self) -> int:
        return self.cluster.host.device.tile

    @property
    def dtype(self) -> str:
        if self.autocast:
            return "float32"
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
    fused: bool = True  # see ModelSpec.fused_grads
    optimizer: str | None = None  # see planning/optimizer_state.py
    frozen: FrozenLayers | None = None  # see ModelSpec.frozen
    layer_bytes: LayerBytes | None = None  # see ModelSpec.layer_bytes

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
        """Memory per rank: that of its GPU, less what was measured to be taken by others. Without GPUs, the ranks of a
        host share its memory. Older profiles have a reserve already taken off."""
        machine = self.profile.machine
        if "reserved" in machine:
            return usable_of_measured(int(machine["device_memory"]) - int(machine["reserved"]))
        if "device_memory" in machine:
            return int(machine["device_memory"])
        memory = machine.get("memory")
        return int(memory) // self.profile.ranks_per_host if memory else None

    @property
    def host_budget(self) -> int | None:
        """Three quarters of a rank's share: the rest is for data, the framework and others."""
        memory = int(self.profile.machine.get("memory", 0))
        return memory * 3 // 4 // self.profile.ranks_per_host if self.profile.on_gpu else None

    def host_state(self, layout: Layout, stages: Sequence[StageSpec]) -> float:
        return _host_state(self.optimizer, self.profile.element, self.profile.config, layout, stages)

    @property
    def knows_host(self) -> bool:
        """Older profiles do not say how fast copies are."""
        machine = self.profile.machine
        return bool(self.profile.on_gpu and machine.get("memory") and machine.get("copies"))

    @property
    def tile(self) -> int:
        return 128 if self.profile.on_gpu else 8

    @property
    def dtype(self) -> str:
        return self.profile.dtype

    def cost(self, layout: Layout) -> Cost:
        return FittedCost(self.profile, layout=replace(layout, tp=1), fused=self.fused)

    def memory(self, layout: Layout) -> Memory:
        profile, state = self.profile, STATE[self.profile.dtype]
        if self.optimizer is not None:
            state = state_bytes(self.optimizer, profile.element, master=True).device
        return ShapeMemory(
            profile.config,
            ELEMENT[profile.autocast or profile.dtype],
            state,
            shards=layout.shards,
            replicas=layout.dp,
            autocast=profile.autocast is not None,
            attention=profile.attention,
            blas=int(profile.machine.get("blas", 0)),
            fused=self.fused,
            frozen=self.frozen,
            layer_bytes=self.layer_bytes,
        )

    def tensor_degrees(self) -> list[int]:
        return [self.tp]


def _host_state(
    optimizer: str | None, element: int, config: GPTConfig, layout: Layout, stages: Sequence[StageSpec]
) -> float:
    if optimizer is None:
        return 0.0
    return state_bytes(optimizer, element, master=True).host * parameters(config, stages) / layout.tp / layout.shards
