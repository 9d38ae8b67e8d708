"""A request to the planner: the batch, what the user has fixed, and what the model supports."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from terapipe.planning.layout import Layout
from terapipe.planning.limits import LARGEST, check_whole_number
from terapipe.planning.optimizer_state import WHOLE_PARAMETERS
from terapipe.planning.options import PlanOptions
from terapipe.planning.order import order_named
from terapipe.planning.recompute import MODES, Recompute
from terapipe.search.source import Source


@dataclass(frozen=True)
class Request(PlanOptions):
    """The knobs of ``PlanOptions``, which the planner chooses where they are None, and what they are for.

    Args:
        batch_size: Sequences per step, over all replicas.
        seq_len: Tokens per sequence.
        min_slice: Tokens in the shortest slice with which the model is exact.
        recompute_modes: Modes of recomputation that the model supports.
        bare_ends: Whether the first stage may be the embedding alone, and the last the head alone.
    """

    batch_size: int
    seq_len: int
    min_slice: int = 1
    recompute_modes: tuple[Recompute, ...] = MODES
    bare_ends: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("batch_size", self.batch_size, most=2**20)
        check_whole_number("seq_len", self.seq_len, most=LARGEST["max_seq_len"])
        check_whole_number("min_slice", self.min_slice, most=LARGEST["max_seq_len"])
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
        if self.recompute not in (None, *self.recompute_modes):
            raise ValueError(
                f"the model supports recomputation {' and '.join(self.recompute_modes)}, got {self.recompute}; leave "
                "recompute out, or set it to one of these"
            )
        self._check_slices()

    def _check_slices(self) -> None:
        count, lengths = self.num_slices, self.slice_lengths
        if lengths is not None and sum(lengths) != self.seq_len:
            raise ValueError(
                f"slice_lengths must sum to the {self.seq_len} tokens of a sequence, got "
                f"{list(lengths)}, which sum to {sum(lengths)}"
            )
        if lengths is not None and len(lengths) > 1 and min(lengths) < self.min_slice:
            raise ValueError(f"the model takes slices of at least {self.min_slice} tokens, got {list(lengths)}")
        if count is not None and count > self.seq_len:
            raise ValueError(f"num_slices must be between 1 and the {self.seq_len} tokens, got {count}")
        whole = self.order is not None and not order_named(self.order).sliced
        if whole and (count or len(lengths or (1,))) > 1:
            raise ValueError(
                f"order {self.order!r} takes whole sequences, got {count or len(lengths or ())} slices; "
                "use terapipe or terapipe-1f1b, or leave slices out"
            )

    def tile_for(self, *, tile: int, tp: int) -> int:
        """The tile for slice lengths: a multiple of the request's own tile, or else of ``tile``, and of ``tp``, for
        sequence parallelism. It is chosen such that no slice, including a shorter last one, is below ``min_slice``."""
        unit = lcm(min(tile, self.seq_len) if self.tile is None else self.tile, tp)
        for tile in range(unit, self.seq_len, unit):
            if tile >= self.min_slice and (self.seq_len % tile == 0 or self.seq_len % tile >= self.min_slice):
                return tile
        return self.seq_len  # whole sequences

    def fixed(self, **fields: Any) -> "Request":
        """A copy with some fields replaced, checked again as a whole: ``request.fixed(pp=4, order="1f1b")``.

        Args:
            fields: New values of knobs, or of batch and sequence length.
        """
        return replace(self, **fields)


def _nearest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def layouts(source: Source, request: Request) -> list[Layout]:
    """All layouts that use every device and keep what is fixed. If dp, pp and tp are all fixed, they may use fewer."""
    if request.dp and request.pp and request.tp:
        options = [Layout(request.dp, request.pp, request.tp)]
        if options[0].devices > source.devices:
            raise ValueError(
                f"{options[0]} needs {options[0].devices} devices, {source.name} has {source.devices}; "
                "lower dp, pp or tp, or take more hosts"
            )
    else:
        options = list(_factors(source, request))
    options = [option for layout in options for option in _sharded_or_not(layout, request.shard)]
    options = [layout for layout in options if layout.pp <= source.layers]
    if request.tp and request.tp not in source.tensor_degrees():
        raise ValueError(
            f"tp must be one of {source.tensor_degrees()} here (it divides the heads and the devices of a host), "
            f"got {request.tp}"
        )
    options = [layout for layout in options if layout.tp in source.tensor_degrees()]
    if source.optimizer in WHOLE_PARAMETERS:
        whole = [layout for layout in options if layout.tp == 1 and not layout.shard]
        if options and not whole:
            raise ValueError(
                f"optimizer={source.optimizer!r} takes whole parameters, without tensor parallel and shards, got "
                f"{options[0]}; take tp=1 and shard=False, or optimizer='adamw'"
            )
        options = whole
    if not options:
        raise ValueError(
            f"no layout dp x pp x tp uses all {source.devices} devices of {source.name} with at most "
            f"{source.layers} stages, dp dividing the batch of {request.batch_size}, tp in "
            f"{source.tensor_degrees()} and what is fixed (dp {request.dp}, pp {request.pp}, "
            f"tp {request.tp}); fix less, change the batch, or fix all three to use fewer devices"
        )
    return options


def _sharded_or_not(layout: Layout, shard: bool | None) -> list[Layout]:
    """The layout as the request fixes it, or without and with shards. Without replicas there is nothing to shard."""
    choices = [False] if layout.dp == 1 else [False, True] if shard is None else [shard]
    return [replace(layout, shard=choice) for choice in choices]


def _factors(source: Source, request: Request) -> Iterator[Layout]:
    """All ways to write the number of devices as dp * pp * tp, within what is fixed."""
    for tp in [request.tp] if request.tp else source.tensor_degrees():
        rest, left = divmod(source.devices, tp)
        if left:
            continue
        for pp in [request.pp] if request.pp else range(1, rest + 1):
            dp, left = divmod(rest, pp)
            fits = left == 0 and dp >= 1 and request.batch_size % dp == 0
            if fits and request.dp in (None, dp):
                yield Layout(dp, pp, tp)
