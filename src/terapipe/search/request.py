"""What is asked of the planner: a source of costs, a batch, and what the user has fixed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from terapipe.planning.layout import Layout
from terapipe.planning.order import order_named
from terapipe.search.source import Source


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
    tile: int | None = None  # slice lengths are multiples of it; the source's own where not given
    min_slice: int = 1  # tokens: the model is not exact with shorter slices
    can_recompute: bool = True  # whether the model can compute a slice again
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
        if self.tile is not None and self.tile > self.seq_len:
            raise ValueError(
                f"a slice of {self.tile} tokens does not fit into sequences of {self.seq_len}; use a smaller tile"
            )
        if self.recompute and not self.can_recompute:
            raise ValueError("the model cannot compute slices again; leave recompute out, or set it to False")
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
        if lengths is not None and len(lengths) > 1 and min(lengths) < self.min_slice:
            raise ValueError(f"the model takes slices of at least {self.min_slice} tokens, got {list(lengths)}")
        if count is not None and count > self.seq_len:
            raise ValueError(f"the number of slices must be between 1 and the {self.seq_len} tokens, got {count}")
        whole = self.order is not None and not order_named(self.order).sliced
        if whole and (count or len(lengths or (1,))) > 1:
            raise ValueError(
                f"order {self.order!r} takes whole sequences, got {count or len(lengths or ())} slices; "
                "use terapipe or terapipe-1f1b, or leave slices out"
            )

    def tile_for(self, *, tile: int, tp: int) -> int:
        """What slice lengths are multiples of: ``tile`` where the request has none; and ``tp``, for sequence parallel.
        No slice is shorter than ``min_slice``, the last one, which takes the rest, included."""
        unit = lcm(min(tile, self.seq_len) if self.tile is None else self.tile, tp)
        for tile in range(unit, self.seq_len, unit):
            if tile >= self.min_slice and (self.seq_len % tile == 0 or self.seq_len % tile >= self.min_slice):
                return tile
        return self.seq_len  # whole sequences

    @property
    def fixed_slices(self) -> bool:
        return self.num_slices is not None or self.slice_lengths is not None

    def fixed(self, **stage_specs: object) -> "Request":
        return replace(self, **stage_specs)  # type: ignore[arg-type]


_POSITIVE = (
    "batch_size", "seq_len", "dp", "pp", "tp", "num_slices", "microbatch_size", "chunks", "tile", "distinct", "budget",
    "min_slice",
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
