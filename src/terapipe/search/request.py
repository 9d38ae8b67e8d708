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
        return ShapeMemory(self.config, device.element, device.state, layout.tp, recompute, layout.shards)

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
            profile.config, profile.element, STATE[profile.dtype], recompute=recompute, shards=layout.shards
        )

    def tensor_degrees(self) -> list[int]:
        return [1]


@dataclass(frozen=True)
class Request:
    """``None`` means: choose. Give at most one of ``num_slices`` (equal slices) and ``slice_lengths``."""

    batch_size: int
    seq_len: int
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    order: str | None = None
    num_slices: int | None = None
    slice_lengths: tuple[int, ...] | None = None
    microbatch_size: int | None = None
    chunks: int | None = None
    recompute: bool | None = None
    shard: bool = False  # whether replicas share out their state
    tile: int = 8  # slices are multiples of it
    distinct: int | None = None  # at most so many different lengths
    budget: int | None = None  # bytes; the source's own where not given

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.order is not None:
            order_named(self.order)
        if self.dp is not None and self.batch_size % self.dp:
            raise ValueError(
                f"every replica takes the same number of sequences: a batch of {self.batch_size} is not divisible by "
                f"dp {self.dp}; try dp {_nearest_divisor(self.batch_size, self.dp)} or batch size "
                f"{-(-self.batch_size // self.dp) * self.dp}"
            )
        if self.tile > self.seq_len:
            raise ValueError(
                f"a slice of {self.tile} tokens does not fit into sequences of {self.seq_len}; use a smaller tile"
            )
        self._check_slices()

    def _check_slices(self) -> None:
        count, lengths = self.num_slices, self.slice_lengths
        if count is not None and lengths is not None:
            raise ValueError(f"give num_slices or slice_lengths, not both; got {count} and {list(lengths)}")
        if lengths is not None and (sum(lengths) != self.seq_len or any(n < 1 for n in lengths)):
            raise ValueError(
                f"slice lengths must be positive and sum to the {self.seq_len} tokens of a sequence, got "
                f"{list(lengths)}, which sum to {sum(lengths)}"
            )
        if count is not None and count > self.seq_len:
            raise ValueError(f"the number of slices must be between 1 and the {self.seq_len} tokens, got {count}")
        whole = self.order is not None and not order_named(self.order).sliced
        if whole and (count or len(lengths or (1,))) > 1:
            raise ValueError(
                f"order {self.order!r} takes whole sequences, got {count or len(lengths or ())} slices; "
                "use terapipe or terapipe-1f1b, or leave slices out"
            )

    @property
    def fixed_slices(self) -> bool:
        return self.num_slices is not None or self.slice_lengths is not None

    def fixed(self, **stage_specs: object) -> "Request":
        return replace(self, **stage_specs)  # type: ignore[arg-type]


_POSITIVE = (
    "batch_size", "seq_len", "dp", "pp", "tp", "num_slices", "microbatch_size", "chunks", "tile", "distinct", "budget",
)  # fmt: skip


def _nearest_divisor(n: int, wanted: int) -> int:
    return max(d for d in range(1, wanted + 1) if n % d == 0)


def layouts(source: Source, request: Request) -> list[Layout]:
    """All layouts that use every device and respect what is fixed; a layout fixed in full may use fewer."""
    if request.dp and request.pp and request.tp:
        found = [Layout(request.dp, request.pp, request.tp)]
        if found[0].devices > source.devices:
            raise ValueError(
                f"{found[0]} needs {found[0].devices} devices, {source.name} has {source.devices}; "
                "lower dp, pp or tp, or take more hosts"
            )
    else:
        found = list(_factors(source, request))
    found = [replace(layout, shard=request.shard and layout.dp > 1) for layout in found]
    found = [layout for layout in found if layout.pp <= source.layers]
    if request.tp and request.tp not in source.tensor_degrees():
        raise ValueError(
            f"tp must be one of {source.tensor_degrees()} here (it divides the heads and the devices of a host), "
            f"got {request.tp}"
        )
    found = [layout for layout in found if layout.tp in source.tensor_degrees()]
    if not found:
        raise ValueError(
            f"no layout dp x pp x tp uses all {source.devices} devices of {source.name} with at most "
            f"{source.layers} stages, dp dividing the batch of {request.batch_size}, tp in "
            f"{source.tensor_degrees()} and what is fixed (dp {request.dp}, pp {request.pp}, "
            f"tp {request.tp}); fix less, change the batch, or fix all three to use fewer devices"
        )
    return found


def _factors(source: Source, request: Request) -> Iterator[Layout]:
    for tp in [request.tp] if request.tp else source.tensor_degrees():
        rest, left = divmod(source.devices, tp)
        if left:
            continue
        for pp in [request.pp] if request.pp else range(1, rest + 1):
            dp, left = divmod(rest, pp)
            fits = left == 0 and dp >= 1 and request.batch_size % dp == 0
            if fits and request.dp in (None, dp):
                yield Layout(dp, pp, tp)
