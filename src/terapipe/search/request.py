"""What is asked of the planner: a source of costs, a batch, and what the user has fixed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import Cost, Memory
from terapipe.planning.fitted import FittedCost
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.order import order_named
from terapipe.planning.profile import STATE, Profile
from terapipe.presets import GPTConfig


class Source(Protocol):
    """Where costs come from: a described cluster, or measurements."""

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> int: ...

    @property
    def devices(self) -> int: ...

    @property
    def budget(self) -> int | None:
        """Bytes of each device, if known."""

    def cost(self, layout: Layout, recompute: bool) -> Cost: ...

    def memory(self, layout: Layout, recompute: bool) -> Memory: ...

    def tensor_degrees(self) -> list[int]:
        """How many devices may share an operator."""


@dataclass(frozen=True)
class ClusterSource:
    """A cluster that may not exist yet: costs from first principles."""

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
        return self.cluster.host.device.memory

    def cost(self, layout: Layout, recompute: bool) -> Cost:
        return AnalyticCost(self.config, self.cluster, layout, recompute, self.ends)

    def memory(self, layout: Layout, recompute: bool) -> Memory:
        device = self.cluster.host.device
        return ShapeMemory(self.config, device.element, device.state, layout.tensor, recompute, layout.sharers)

    def tensor_degrees(self) -> list[int]:
        heads = self.config.num_kv_heads
        return [t for t in range(1, self.cluster.host.devices + 1) if self.cluster.host.devices % t == heads % t == 0]


@dataclass(frozen=True)
class ProfileSource:
    """A machine that was measured. ``ranks`` may be more than measured; they are taken to be as fast."""

    profile: Profile
    ranks: int

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
        """Ranks of one host share its memory."""
        memory = self.profile.machine.get("memory")
        return int(memory) // self.profile.ranks_per_host if memory else None

    def cost(self, layout: Layout, recompute: bool) -> Cost:
        return FittedCost(self.profile, recompute, layout)

    def memory(self, layout: Layout, recompute: bool) -> Memory:
        profile = self.profile
        return ShapeMemory(
            profile.config, profile.element, STATE[profile.dtype], recompute=recompute, sharers=layout.sharers
        )

    def tensor_degrees(self) -> list[int]:
        return [1]


@dataclass(frozen=True)
class Request:
    """``None`` means: choose. ``slices`` is a number of equal slices or the lengths themselves."""

    batch: int
    tokens: int
    data: int | None = None
    pipe: int | None = None
    tensor: int | None = None
    order: str | None = None
    slices: int | tuple[int, ...] | None = None
    microbatch: int | None = None
    chunks: int | None = None
    recompute: bool | None = None
    shard: bool = False  # whether replicas share out their state
    tile: int = 8  # slices are multiples of it
    distinct: int | None = None  # at most so many different lengths
    budget: int | None = None  # bytes; the source's own where not given

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "data", "pipe", "tensor", "microbatch", "chunks", "tile", "distinct", "budget"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.order is not None:
            order_named(self.order)
        if self.data is not None and self.batch % self.data:
            raise ValueError(
                f"every replica takes the same number of sequences: a batch of {self.batch} is not divisible by "
                f"data {self.data}; try --data {_nearest_divisor(self.batch, self.data)} or "
                f"--batch {-(-self.batch // self.data) * self.data}"
            )
        if self.tile > self.tokens:
            raise ValueError(
                f"a slice of {self.tile} tokens does not fit into sequences of {self.tokens}; lower --tile"
            )
        self._check_slices()

    def _check_slices(self) -> None:
        slices = self.slices
        if isinstance(slices, tuple) and (sum(slices) != self.tokens or any(n < 1 for n in slices)):
            raise ValueError(
                f"slice lengths must be positive and sum to the {self.tokens} tokens of a sequence, got "
                f"{list(slices)}, which sum to {sum(slices)}"
            )
        if isinstance(slices, int) and not 1 <= slices <= self.tokens:
            raise ValueError(f"the number of slices must be between 1 and the {self.tokens} tokens, got {slices}")
        whole = self.order is not None and not order_named(self.order).sliced
        if whole and slices is not None and slices not in (1, (self.tokens,)):
            raise ValueError(
                f"order {self.order!r} takes whole sequences, got slices {slices}; "
                "use terapipe or terapipe-1f1b, or leave slices out"
            )

    def fixed(self, **parts: object) -> "Request":
        return replace(self, **parts)  # type: ignore[arg-type]


def _nearest_divisor(n: int, wanted: int) -> int:
    return max(d for d in range(1, wanted + 1) if n % d == 0)


def layouts(source: Source, request: Request) -> list[Layout]:
    """All layouts that use every device and respect what is fixed; a layout fixed in full may use fewer."""
    if request.data and request.pipe and request.tensor:
        found = [Layout(request.data, request.pipe, request.tensor)]
        if found[0].devices > source.devices:
            raise ValueError(
                f"{found[0]} needs {found[0].devices} devices, {source.name} has {source.devices}; "
                "lower one of --data, --pipe, --tensor or take more hosts"
            )
    else:
        found = list(_factors(source, request))
    found = [replace(layout, shard=request.shard and layout.data > 1) for layout in found]
    found = [layout for layout in found if layout.pipe <= source.layers]
    if request.tensor and request.tensor not in source.tensor_degrees():
        raise ValueError(
            f"tensor must be one of {source.tensor_degrees()} here (it divides the heads and the devices of a host), "
            f"got {request.tensor}"
        )
    found = [layout for layout in found if layout.tensor in source.tensor_degrees()]
    if not found:
        raise ValueError(
            f"no layout data x pipe x tensor uses all {source.devices} devices of {source.name} with at most "
            f"{source.layers} stages, data dividing the batch of {request.batch}, tensor in "
            f"{source.tensor_degrees()} and what is fixed (data {request.data}, pipe {request.pipe}, "
            f"tensor {request.tensor}); fix less, change the batch, or fix all three to use fewer devices"
        )
    return found


def _factors(source: Source, request: Request) -> Iterator[Layout]:
    for tensor in [request.tensor] if request.tensor else source.tensor_degrees():
        rest, left = divmod(source.devices, tensor)
        if left:
            continue
        for pipe in [request.pipe] if request.pipe else range(1, rest + 1):
            data, left = divmod(rest, pipe)
            fits = left == 0 and data >= 1 and request.batch % data == 0
            if fits and request.data in (None, data):
                yield Layout(data, pipe, tensor)
