"""What an executor keeps of slices and microbatches that are away in the memory of the host."""

from typing import Any

from torch import Tensor

from terapipe.modeling.offload import SavedTensors
from terapipe.modeling.slice_cache import SliceCache


class Kept:
    """What an offloaded slice keeps on a stage: what autograd saved, and what the executor holds itself.

    Args:
        saved: What autograd saved; it moves all.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self.saved = saved
        self._input: Any = None
        self._output: Any = None
        self._gradient: Any = None

    def keep_input(self, x: Tensor) -> None:
        """For a forward that is computed again."""
        self._input = self.saved.pack(x.detach())

    def keep_loss(self, gradient: Tensor | None, out: Tensor | None) -> None:
        """What the loss head needs in the backward: the gradient that it has, or else the hidden states."""
        if gradient is not None:
            self._gradient = self.saved.pack(gradient)
        elif out is not None:
            self._output = self.saved.pack(out.detach())

    def input(self) -> Tensor:
        return self.saved.unpack(self._input)

    def output(self) -> Tensor:
        return self.saved.unpack(self._output)

    def gradient(self) -> Tensor | None:
        return None if self._gradient is None else self.saved.unpack(self._gradient)


class OffloadedCache:
    """Keys and values of a microbatch on their way to the host and back.

    Args:
        cache: That of the microbatch, after its last forward.
        saved: Moves them.
    """

    def __init__(self, cache: SliceCache, saved: SavedTensors) -> None:
        self._cache, self.saved = cache, saved
        pairs = cache.take_keys_and_values()
        self._packed = {layer: saved.pack(pair) for layer, pair in pairs.items()}
        saved.start_out(())

    def finish_out(self) -> None:
        """From here on they are in the memory of the host only."""
        self.saved.finish_out()

    def finish_back(self) -> None:
        """The cache has them again, as soon as they are there."""
        self.saved.finish_back()
        self._cache.put_keys_and_values({layer: self.saved.unpack(packed) for layer, packed in self._packed.items()})
