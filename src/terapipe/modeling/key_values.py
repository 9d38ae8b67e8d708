"""Keys, values and their gradients of one attention layer, for the tokens of a microbatch.

What is there at a time depends on what later computations can still see. With ``most`` tokens before a slice that it
sees at most (windows, chunks; ``visibility.Bounds``)::

                          layers that see all            layers with windows or chunks
    training              K, V   all tokens              all tokens: every backward needs those that its forward saw
                          dK, dV all tokens, float32     ``most`` tokens, float32; moves back with the slices
    forwards only         K, V   all tokens              ``most`` tokens and the slice
"""

from collections.abc import Collection

import torch
from torch import Tensor

from terapipe.modeling.visibility import ALL, Bounds


class GradientRoom:
    """Tensors for gradients of keys and values that no microbatch uses at the moment.

    A microbatch needs its own from its first backward to its last, its keys and values since its first forward. Where
    several microbatches, or stages of a rank, are between these, they share tensors: with all forwards first, those of
    one are enough. They are not freed, because fresh memory is slow to touch the first time.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, like: Tensor, tokens: int) -> Tensor:
        """A tensor of that shape, for so many tokens, in float32 or wider. What is in it is of somebody else.

        Args:
            like: Keys and values of all tokens.
            tokens: For how many of them there must be room.
        """
        wide = torch.promote_types(like.dtype, torch.float32)
        free = self._free.get((like.shape, tokens, wide, like.device))
        if free:
            return free.pop()
        return like.new_empty(*like.shape[:2], tokens, like.shape[3], dtype=wide)

    def give_back(self, gradients: Tensor, seq_len: int) -> None:
        """Takes a tensor back.

        Args:
            gradients: What ``take`` returned.
            seq_len: Tokens of the keys and values that it was for.
        """
        whole = torch.Size((*gradients.shape[:2], seq_len, gradients.shape[3]))
        key = whole, gradients.shape[2], gradients.dtype, gradients.device
        self._free.setdefault(key, []).append(gradients)

    def keep_only(self, shapes: Collection[tuple[int, int]]) -> None:
        """Frees tensors of other shapes.

        Args:
            shapes: Sequences and tokens of those that stay.
        """
        self._free = {key: free for key, free in self._free.items() if (key[0][0] // 2, key[0][2]) in shapes}


class KeyValueStore:
    """Keys, values and their gradients of one attention layer for one microbatch, written in place.

    Gradients are sums over slices. Those of half precision are kept in float32, or rounding would grow with the number
    of slices.

    Args:
        room: Where tensors for gradients come from.
    """

    def __init__(self, room: GradientRoom | None = None) -> None:
        self._source = GradientRoom() if room is None else room
        self._seq_len = 0
        self._most: int | None = None  # tokens before a slice that it sees; None for all
        # Each is one tensor of keys, then values, along the first dimension: so both are written by one operation. The
        # numbers beside them say which token is at their first place.
        self._pair: Tensor | None = None
        self._pair_start = 0
        self._gradients: Tensor | None = None
        self._gradients_start = 0

    def write(
        self, k: Tensor, v: Tensor, context: int, seq_len: int, bounds: Bounds = ALL, forward_only: bool = False
    ) -> None:
        """Puts a slice's keys and values at their place.

        Args:
            k: (sequences, heads, tokens, head size).
            v: Of the same shape.
            context: Tokens before the slice.
            seq_len: Tokens of the sequence; the first slice makes room for all of them.
            bounds: How far back the slice sees.
            forward_only: Whether no backward follows. Then tokens that are out of sight are let go of, and there is no
                room for later ones, unless the store has room for all anyway.
        """
        pair, self._most = self._pair, bounds.most
        if pair is None or pair.dtype != k.dtype or pair.shape[2] != seq_len:  # dtype: autocast was switched on or off
            self._seq_len = seq_len
            rolls = forward_only and bounds.most is not None and bounds.most < seq_len
            pair = self._make_rolled(k, context, bounds.oldest) if rolls else self._make_whole(k)
        start = context - self._pair_start
        torch.cat((k, v), out=pair[:, :, start : start + k.shape[2]])

    def _make_whole(self, k: Tensor) -> Tensor:
        """Room for keys and values of all tokens."""
        self.give_back_gradients()
        self._pair, self._pair_start = k.new_empty(2 * k.shape[0], k.shape[1], self._seq_len, k.shape[3]), 0
        return self._pair

    def _make_rolled(self, k: Tensor, context: int, oldest: int) -> Tensor:
        """Room for what a slice sees of earlier tokens, which is copied, and for the slice. The room so far goes.

        Args:
            k: The slice's keys.
            context: Tokens before it.
            oldest: The oldest token that it sees.
        """
        before, seen = self._pair, context - oldest
        rolled = k.new_empty(2 * k.shape[0], k.shape[1], seen + k.shape[2], k.shape[3])
        if seen:
            assert before is not None
            rolled[:, :, :seen].copy_(before[:, :, oldest - self._pair_start : context - self._pair_start])
        self._pair, self._pair_start = rolled, oldest
        return rolled

    def read(self, sequences: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of keys and values: (sequences, heads, tokens, head size) each.

        Args:
            sequences: Those of the microbatch.
            keys: Tokens of the sequence, which some slice has written.
        """
        assert self._pair is not None
        k, v = self._pair.chunk(2)
        keys = slice(keys.start - self._pair_start, keys.stop - self._pair_start)
        return k[sequences, :, keys], v[sequences, :, keys]

    def add_grad(self, dk: Tensor, dv: Tensor, sequences: slice, keys: slice, overwrite: bool) -> None:
        """Adds to the gradients of earlier tokens, or overwrites what lies there.

        Args:
            dk: Gradients of keys.
            dv: Gradients of their values.
            sequences: Those of the microbatch that they are about.
            keys: Tokens of the sequence.
            overwrite: Whether what lies there is of others: an earlier step, for one.
        """
        keys = slice(keys.start - self._gradients_start, keys.stop - self._gradients_start)
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
        dk, dv = self._room()[:, :, start - self._gradients_start : end - self._gradients_start].chunk(2)
        return dk, dv

    def begin_backward(self, bounds: Bounds) -> None:
        """Says which gradients are there: those that the slice after this one left. Backwards go last slice first.

        Args:
            bounds: How far back the slice sees, and the one after it.
        """
        self._gradients_start = bounds.oldest_after

    def move_gradients(self, bounds: Bounds, *, keep: bool) -> Tensor | None:
        """Makes room for the gradients of what a slice sees of earlier tokens. Numbers of others may lie in it.

        Args:
            bounds: How far back the slice sees.
            keep: Whether the room so far is still needed: then other room is taken.

        Returns:
            The room so far, if it is still needed. Give it to ``take_over``.
        """
        before = self._gradients if keep else None
        if before is not None:
            self._gradients = None
        elif self._gradients is not None and self._gradients.shape[2] != self._tokens:
            self.give_back_gradients()  # the layer had another window
        self._gradients_start = bounds.oldest
        return before

    def take_over(self, before: Tensor, keys: slice) -> None:
        """Adds gradients from the room before, and gives that back.

        Args:
            before: What ``move_gradients`` returned.
            keys: The tokens whose gradients are added, beginning with the first of ``before``; there may be none.
        """
        if keys.start < keys.stop:
            dk_dv = self._room()[:, :, keys.start - self._gradients_start : keys.stop - self._gradients_start]
            dk_dv.add_(before[:, :, : keys.stop - keys.start])
        self._source.give_back(before, self._seq_len)

    def _room(self) -> Tensor:
        """The tensor of gradients, made when the first slice leaves some: evaluation has none."""
        if self._gradients is None:
            assert self._pair is not None
            self._gradients = self._source.take(self._pair, self._tokens)
        return self._gradients

    @property
    def _tokens(self) -> int:
        """For how many tokens there must be room for gradients."""
        return self._seq_len if self._most is None else min(self._most, self._seq_len)

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
            self._source.give_back(self._gradients, self._seq_len)
            self._gradients = None

    def clear(self) -> None:
        """Forgets all but the room for keys and values of all tokens, which the next microbatch writes again."""
        self.give_back_gradients()
        if self._pair is not None and self._pair.shape[2] < self._seq_len:
            self._pair = None
