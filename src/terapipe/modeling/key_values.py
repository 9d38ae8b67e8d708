"""Keys, values and their gradients of one attention layer, for all tokens of a microbatch."""

from collections.abc import Collection

import torch
from torch import Tensor


class GradientRoom:
    """Tensors for gradients of keys and values that no microbatch uses at the moment.

    A microbatch needs its own from its first backward to its last, its keys and values since its first forward. Where
    several microbatches, or stages of a rank, are between these, they share tensors: with all forwards first, those of
    one are enough. They are not freed, because fresh memory is slow to touch the first time.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A tensor of that shape, in float32 or wider. What is in it is of somebody else.

        Args:
            like: Keys and values of all tokens.
        """
        wide = torch.promote_types(like.dtype, torch.float32)
        free = self._free.get((like.shape, wide, like.device))
        return free.pop() if free else torch.empty_like(like, dtype=wide)

    def give_back(self, gradients: Tensor) -> None:
        """Takes a tensor back.

        Args:
            gradients: What ``take`` returned.
        """
        self._free.setdefault((gradients.shape, gradients.dtype, gradients.device), []).append(gradients)

    def keep_only(self, shapes: Collection[tuple[int, int]]) -> None:
        """Frees tensors of other shapes.

        Args:
            shapes: Sequences and tokens of those that stay.
        """
        self._free = {key: free for key, free in self._free.items() if (key[0][0] // 2, key[0][2]) in shapes}


class KeyValueStore:
    """Keys, values and their gradients of one attention layer for all tokens of one microbatch, written in place.

    Gradients are sums over slices. Those of half precision are kept in float32, or rounding would grow with the number
    of slices.

    Args:
        room: Where tensors for gradients come from.
    """

    def __init__(self, room: GradientRoom | None = None) -> None:
        self._source = GradientRoom() if room is None else room
        # Each is one tensor of keys, then values, along the first dimension: so both are written by one operation.
        self._pair: Tensor | None = None
        self._gradients: Tensor | None = None

    def write(self, k: Tensor, v: Tensor, context: int, seq_len: int) -> None:
        """Puts a slice's keys and values at their place.

        Args:
            k: (sequences, heads, tokens, head size).
            v: Of the same shape.
            context: Tokens before the slice.
            seq_len: Tokens of the sequence; the first slice makes room for all of them.
        """
        pair = self._pair
        if pair is None or pair.dtype != k.dtype:  # autocast was switched on or off
            pair = k.new_empty(2 * k.shape[0], k.shape[1], seq_len, k.shape[3])
            self.give_back_gradients()
            self._pair = pair
        torch.cat((k, v), out=pair[:, :, context : context + k.shape[2]])

    def read(self, sequences: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of keys and values: (sequences, heads, tokens, head size) each.

        Args:
            sequences: Those of the microbatch.
            keys: Tokens of the sequence, which some slice has written.
        """
        assert self._pair is not None
        k, v = self._pair.chunk(2)
        return k[sequences, :, keys], v[sequences, :, keys]

    def add_grad(self, dk: Tensor, dv: Tensor, sequences: slice, keys: slice, overwrite: bool) -> None:
        """Adds to the gradients of earlier tokens, or overwrites what an earlier step left.

        Args:
            dk: Gradients of keys.
            dv: Gradients of their values.
            sequences: Those of the microbatch that they are about.
            keys: Tokens of the sequence.
            overwrite: Whether what lies there is of an earlier step.
        """
        for room, x in zip(self._room().chunk(2), (dk, dv), strict=True):
            if overwrite:
                room[sequences, :, keys].copy_(x)
            else:
                room[sequences, :, keys].add_(x)

    def zero_grad(self) -> None:
        """Zeroes dK and dV: needed when later slices do not write every entry."""
        self._room().zero_()

    def grad(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of the gradients of keys and values: sums over the slices that have left some.

        Args:
            start: The first token.
            end: The one after the last.
        """
        dk, dv = self._room()[:, :, start:end].chunk(2)
        return dk, dv

    def _room(self) -> Tensor:
        """The tensor of gradients, made when the first slice leaves some: evaluation has none."""
        if self._gradients is None:
            assert self._pair is not None
            self._gradients = self._source.take(self._pair)
        return self._gradients

    def take_pair(self) -> Tensor | None:
        """Gives the keys and values away, to be put back before the next slice reads or writes any."""
        pair, self._pair = self._pair, None
        return pair

    def put_pair(self, pair: Tensor) -> None:
        """Takes keys and values back.

        Args:
            pair: What ``take_pair`` returned, or a copy.
        """
        self._pair = pair

    def give_back_gradients(self) -> None:
        """Lets others have the tensor of gradients, when the last backward is through."""
        if self._gradients is not None:
            self._source.give_back(self._gradients)
            self._gradients = None
