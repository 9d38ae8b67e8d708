"""Plans: how a batch is cut into microbatches and slices, and the layers into stages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

from terapipe.planning import by_slice
from terapipe.planning.by_slice import BySlice
from terapipe.planning.limits import check_whole_number
from terapipe.planning.order import order_named
from terapipe.planning.recompute import Recompute, RecomputeModes, for_any_slices, modes_in, modes_of, parse_recompute

FORMAT = 1
OFFLOADS = ("offload", "offload_kv")  # additional keys, which plans without offload do not have
PLANNED = "planned"  # additional key in a saved plan: layout, costs and prediction (see search/result.py)


def microbatch_sizes(batch_size: int, size: int) -> tuple[int, ...]:
    """Cuts a batch into microbatches of ``size`` sequences: 7 in microbatches of 3 are 3, 3, 1.

    Args:
        batch_size: Sequences in the batch.
        size: Sequences in every microbatch but the last, which takes the remainder.
    """
    return tuple(min(size, batch_size - row) for row in range(0, batch_size, size))


def even_lengths(seq_len: int, num_slices: int, tile: int = 1) -> tuple[int, ...]:
    """Cuts a sequence into slices as equal as multiples of the tile permit: 30 tokens in 3 slices are 16, 8, 6 with a
    tile of 8.

    Args:
        seq_len: Tokens in the sequence.
        num_slices: Number of slices. There are fewer if the sequence has fewer tiles.
        tile: All lengths are multiples of it, except the last one if the tile does not divide the sequence.
    """
    tiles = -(-seq_len // tile)
    num_slices = min(num_slices, tiles)
    short, longer = divmod(tiles, num_slices)
    lengths = [(short + (i < longer)) * tile for i in range(num_slices)]
    lengths[-1] -= tiles * tile - seq_len
    return tuple(lengths)


class Slice(NamedTuple):
    """Consecutive tokens of all sequences of one microbatch. A tuple, because slices are dict keys in hot loops."""

    microbatch: int
    number: int  # index among the slices of its microbatch
    row: int  # index of the microbatch's first sequence in the batch
    size: int  # number of sequences
    context: int  # number of tokens before the slice
    length: int  # number of tokens in the slice

    @property
    def end(self) -> int:
        """The number of tokens up to the end of the slice."""
        return self.context + self.length

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.number}"


@dataclass(frozen=True)
class Plan:
    """What the ranks must agree on. Everything else is derived from it.

    Five sequences of eight tokens in two microbatches, the first cut into three slices, the second into two::

        sizes      lengths
        3          4 . . . | 2 . | 2 .      slices 0.0, 0.1 and 0.2, each of three sequences
        2          5 . . . . | 3 . .        slices 1.0 and 1.1

    Stage ``k`` holds the layers ``boundaries[k]`` to ``boundaries[k + 1]`` and is placed on rank ``k % num_ranks``. So
    each rank holds ``chunks`` stages, spread over the model. V-shaped orders place every second chunk in reverse.
    The first stage may have no layers, only the embedding, and the last only the head: 22 layers on 8 ranks with 3
    chunks each have the boundaries (0, 0, 1, 2, ..., 21, 22, 22).
    ``recompute`` says what backwards compute again: "none"; "light", norms and activation functions of each
    layer; "block", each layer without attention; "full", the whole stage. It is one of these for all, or a list with an
    entry for each stage: one of these, or a list of them, one for each slice.
    ``offload`` says, in the same form, of which slices all that the forward leaves for the backward waits in the
    memory of the host (see scheduling/copies.py); ``offload_kv`` whether keys and values of microbatches do, too.
    """

    sizes: tuple[int, ...]  # sequences of each microbatch
    lengths: tuple[tuple[int, ...], ...]  # for each microbatch, the lengths of its slices
    boundaries: tuple[int, ...]
    order: str = "terapipe"
    chunks: int = 1
    recompute: RecomputeModes = "none"
    offload: BySlice[bool] = False
    offload_kv: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _whole_numbers("sizes", self.sizes))
        rows = tuple(_whole_numbers(f"lengths[{m}]", row) for m, row in enumerate(_sequence("lengths", self.lengths)))
        object.__setattr__(self, "lengths", rows)
        object.__setattr__(self, "boundaries", _whole_numbers("boundaries", self.boundaries, least=0))
        self._check_batch()
        self._check_stages()
        count = sum(map(len, self.lengths))
        object.__setattr__(self, "recompute", parse_recompute(self.recompute, self.num_stages, count))
        object.__setattr__(self, "offload", _parse_offload(self.offload, self.num_stages, count))
        if not isinstance(self.offload_kv, bool):
            raise ValueError(f"offload_kv must be true or false, got {self.offload_kv!r}")
        order_named(self.order)

    def _check_batch(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.lengths):
            raise ValueError(
                "a plan needs at least one microbatch and one list of slice lengths for each, "
                f"got {len(self.sizes)} sizes and {len(self.lengths)} lists of lengths"
            )
        totals = sorted({sum(row) for row in self.lengths})
        if len(totals) > 1:
            raise ValueError(
                f"the slices of every microbatch must cover the same number of tokens, got {totals}; "
                "pad the shorter sequences or change the lengths"
            )

    def _check_stages(self) -> None:
        edges = self.boundaries
        inner = edges[1:-1] if len(edges) > 2 else edges  # at both ends there may be a stage without layers
        if (
            len(edges) < 2
            or edges[0] != 0
            or edges[-1] < 1
            or any(b <= a for a, b in pairwise(inner))
            or inner[-1] > edges[-1]
        ):
            raise ValueError(
                "boundaries must start at 0 and rise, one more of them than stages, so that every stage but the first "
                f"and the last has a layer; got {list(edges)}"
            )
        if not isinstance(self.chunks, int) or self.chunks < 1 or self.num_stages % self.chunks:
            raise ValueError(
                f"chunks per rank must divide the number of stages, got {self.chunks} chunks and "
                f"{self.num_stages} stages; try one of {[c for c in range(1, 9) if self.num_stages % c == 0]}"
            )

    def resize(self, batch_size: int, seq_len: int, tile: int = 1) -> "Plan":
        """Adapts the plan to another batch shape. Slices keep their proportions. Microbatch sizes repeat from the first
        one if there are more.

        The result depends on nothing but plan and arguments, so ranks get the same plan without communication.

        Args:
            batch_size: Sequences in the other batch.
            seq_len: Tokens in each of its sequences, a multiple of ``tile``.
            tile: Slice lengths are rounded to multiples of it.
        """
        if batch_size < 1 or seq_len < 1 or seq_len % tile:
            raise ValueError(
                f"a plan can be made for at least one sequence of a positive multiple of {tile} tokens, got "
                f"{batch_size} sequences of {seq_len}"
            )
        sizes: list[int] = []
        while sum(sizes) < batch_size:
            sizes.append(min(self.sizes[len(sizes) % len(self.sizes)], batch_size - sum(sizes)))
        rows = [self._scale_lengths(self.lengths[m % len(self.lengths)], seq_len, tile) for m in range(len(sizes))]
        return self.recut(tuple(rows), tuple(sizes))

    def recut(self, lengths: tuple[tuple[int, ...], ...], sizes: tuple[int, ...] | None = None) -> "Plan":
        """This plan with other slices. If their number is another, each stage takes that mode of recomputation of its
        slices that keeps least, and offloads all if it offloaded any."""
        recompute, offload = self.recompute, self.offload
        if list(map(len, lengths)) != list(map(len, self.lengths)):
            recompute, offload = for_any_slices(recompute), by_slice.for_any_slices(offload, any)
        return replace(self, sizes=sizes or self.sizes, lengths=lengths, recompute=recompute, offload=offload)

    def _scale_lengths(self, lengths: Sequence[int], seq_len: int, tile: int) -> tuple[int, ...]:
        # Integer arithmetic, so that every rank gets the same result.
        ends = {(2 * end * seq_len // self.seq_len + tile) // (2 * tile) * tile for end in accumulate(lengths)}
        edges = sorted({0, seq_len, *(end for end in ends if end < seq_len)})
        return tuple(b - a for a, b in pairwise(edges))

    @classmethod
    def uniform(
        cls,
        *,
        batch_size: int,
        seq_len: int,
        boundaries: Sequence[int],
        num_slices: int = 1,
        microbatch_size: int = 1,
        order: str = "terapipe",
        chunks: int = 1,
        recompute: Recompute | bool = "none",
        offload: bool = False,
    ) -> Self:
        """A plan with microbatches of equal size, each cut into slices of nearly equal length.

        If sizes do not divide evenly, the last microbatch is smaller, and the first slices are one token longer.

        Args:
            batch_size: Sequences in the batch.
            seq_len: Tokens in each sequence.
            boundaries: The layers at which stages begin, then the number of layers: ``split_layers`` computes them.
            num_slices: Slices of each microbatch.
            microbatch_size: Sequences in each microbatch.
            order: The name of an order: see ``ORDERS``.
            chunks: Stages of each rank.
            recompute: What backwards compute again, on all stages: ``"none"``, ``"light"``, ``"block"`` or
                ``"full"``.
            offload: Whether what slices keep for their backwards waits in the memory of the host.
        """
        counts = {
            "batch_size": batch_size,
            "seq_len": seq_len,
            "num_slices": num_slices,
            "microbatch_size": microbatch_size,
        }
        for name, value in counts.items():
            check_whole_number(name, value)
        if num_slices > seq_len:
            raise ValueError(f"a slice needs at least one token, got {num_slices} slices of {seq_len} tokens")
        sizes = microbatch_sizes(batch_size, microbatch_size)
        lengths = even_lengths(seq_len, num_slices)
        modes = parse_recompute(recompute, 1, 1)
        return cls(sizes, (lengths,) * len(sizes), tuple(boundaries), order, chunks, modes, offload)

    @property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def seq_len(self) -> int:
        return sum(self.lengths[0])

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1

    @cached_property
    def has_bare_ends(self) -> bool:
        """Whether the first stage is the embedding alone, or the last the head alone."""
        return any(a == b for a, b in pairwise(self.boundaries))

    @cached_property
    def num_ranks(self) -> int:
        """The number of pipeline ranks: each holds ``chunks`` stages."""
        return self.num_stages // self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage.

        Args:
            stage: The index of the stage, from the first layers on.
        """
        chunk, place = divmod(stage, self.num_ranks)
        return self._reversed_rank(place) if chunk % 2 else place

    def _reversed_rank(self, place: int) -> int:
        """Maps the index of a stage within an odd chunk to its rank, and back."""
        return self.num_ranks - 1 - place if order_named(self.order).placement == "v" else place

    @property
    def last_rank(self) -> int:
        """The rank with the last stage, which computes the loss."""
        return self.rank_of(self.num_stages - 1)

    @property
    def placement(self) -> tuple[tuple[int, int], ...]:
        """For each stage, its rank and the layer at which it ends (exclusive)."""
        return tuple((self.rank_of(k), end) for k, end in enumerate(self.boundaries[1:]))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in ascending order."""
        return tuple(c * self.num_ranks + (self._reversed_rank(rank) if c % 2 else rank) for c in range(self.chunks))

    @cached_property
    def grid(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices, one row per microbatch."""
        first_rows = accumulate(self.sizes, initial=0)
        return tuple(
            tuple(
                Slice(m, i, row, size, context, length)
                for i, (context, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False))
            )
            for m, (row, size, lengths) in enumerate(zip(first_rows, self.sizes, self.lengths, strict=False))
        )

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """All slices, in the order of their forwards."""
        return tuple(s for row in self.grid for s in row)

    def recompute_of(self, stage: int) -> tuple[Recompute, ...]:
        """The mode of each of ``slices`` on a stage."""
        return modes_of(self.recompute, stage, len(self.slices))

    @cached_property
    def recompute_modes(self) -> tuple[Recompute, ...]:
        """All modes that occur, the one that keeps most first."""
        return modes_in(self.recompute)

    @property
    def recomputes(self) -> bool:
        """Whether any slice keeps less than all its activations."""
        return self.recompute != "none"

    def offload_of(self, stage: int) -> tuple[bool, ...]:
        """Whether each of ``slices`` is offloaded on a stage."""
        return by_slice.of_stage(self.offload, stage, len(self.slices))

    def is_offloaded(self, stage: int, s: Slice) -> bool:
        """Whether a slice is offloaded on a stage."""
        entry = self.offload[stage] if isinstance(self.offload, tuple) else self.offload
        return entry[self._index[s.microbatch] + s.number] if isinstance(entry, tuple) else entry

    def offloads_cache_after(self, s: Slice) -> bool:
        """Whether the keys and values of the slice's microbatch leave the device after it: after the last of several.
        Those of a single slice are needed again at once."""
        is_last, is_alone = s.end == self.seq_len, s.length == self.seq_len
        return self.offload_kv and is_last and not is_alone

    @cached_property
    def _index(self) -> tuple[int, ...]:
        """For each microbatch, the index of its first slice in ``slices``."""
        return tuple(accumulate(map(len, self.lengths), initial=0))

    @property
    def offloads(self) -> bool:
        """Whether anything waits in the memory of the host."""
        return self.offload is not False or self.offload_kv

    def to_json(self) -> str:
        """The plan as one line of JSON: ``from_json`` reads it."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "order": self.order,
            "chunks": self.chunks,
            "recompute": self.recompute,
            **({"offload": self.offload, "offload_kv": self.offload_kv} if self.offloads else {}),
            "boundaries": list(self.boundaries),
            "sizes": list(self.sizes),
            "lengths": [list(row) for row in self.lengths],
        }

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a plan that ``to_json`` wrote. A ValueError says what is wrong with it.

        Args:
            text: The JSON.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a plan must be a JSON object, this is not JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads a plan from parsed JSON, as ``from_json`` does from text."""
        keys = {"format", "order", "chunks", "recompute", "boundaries", "sizes", "lengths"}
        if not isinstance(data, Mapping) or set(data) - {PLANNED, *OFFLOADS} != keys:
            got = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"a plan has exactly the keys {sorted(keys)}, got {got}")
        if data["format"] != FORMAT:
            raise ValueError(
                f"this version reads plans of format {FORMAT}, got {data['format']!r}; make the plan again"
            )
        if not isinstance(data["order"], str):
            raise ValueError(f"order must be the name of an order, got {data['order']!r}")
        cuts = data["sizes"], data["lengths"], data["boundaries"]
        moved = (data.get(key, False) for key in OFFLOADS)
        return cls(*cuts, data["order"], data["chunks"], data["recompute"], *moved)


def _parse_offload(value: Any, num_stages: int, num_slices: int) -> BySlice[bool]:
    def flag(one: Any) -> bool:
        if not isinstance(one, bool):
            raise ValueError(f"offload is true or false for each slice, got {one!r}; the planner takes shares of them")
        return one

    return by_slice.parse(value, num_stages, num_slices, flag, "offload is true or false")


def _sequence(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list, got {values!r}")
    return values


def _whole_numbers(name: str, values: Any, least: int = 1) -> tuple[int, ...]:
    numbers = tuple(_sequence(name, values))
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int) or n < least]
    if wrong or not numbers:
        raise ValueError(f"{name} must be whole numbers of at least {least}, got {list(numbers)}")
    return numbers
