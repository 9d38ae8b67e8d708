"""A stage as it is computed slice by slice: what is the same for all stages, whoever wrote them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from terapipe.modeling.linear import fuse_weight_grads, has_plain_products
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import Stage


class SlicedStage:
    """Forwards and backwards of a stage's slices. With ``fused``, linear layers and embeddings add gradients of their
    weights in place, or put them off (see linear.py)."""

    def __init__(self, stage: Stage, *, fused: bool = True) -> None:
        self.stage, self._fused = stage, fused
        if fused:
            fuse_weight_grads(stage)

    def forward(self, x: Tensor, cache: SliceCache, *, block: bool = False) -> Tensor:
        """The cache's current slice. With ``block`` each layer keeps its input and attention's output only."""
        with self.over(cache), self._checkpointed(cache) if block else nullcontext():
            cache.current.is_in_forward = True
            try:
                out: Tensor = self.stage(x, cache)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
                raise ValueError(
                    "a layer must not differentiate (torch.autograd.grad in its forward) what was computed outside of "
                    f"torch.enable_grad(), since evaluation and recompute 'full' compute forwards without gradients: "
                    f"{error}; compute it from detached inputs under torch.enable_grad(), or recompute 'block' or "
                    "'none'"
                ) from error
            finally:
                cache.current.is_in_forward = False
        return out

    def backward(
        self, cache: SliceCache, out: Tensor, gradient: Tensor, others: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Of the cache's current slice, see ``SliceCache.backward``."""
        with self.over(cache):  # layers may be computed again
            cache.backward(out, gradient, others)

    @property
    def defers_weight_grads(self) -> bool:
        """Whether orders with split backwards find gradients of weights to put off. Compiled layers make them as
        autograd does: their backwards are one piece, and the halves that follow have nothing to do."""
        return self._fused and not has_plain_products(self.stage)

    def over(self, cache: SliceCache) -> SliceCache:
        """A context in which modules of the stage work on the cache's current slice; a last stage's head, too."""
        cache.current.fuses = self._fused
        return cache

    @contextmanager
    def _checkpointed(self, cache: SliceCache) -> Iterator[None]:
        """Inside, the forward of each block is checkpointed. Hooks of blocks, such as FSDP's, are outside of that."""
        blocks = self.stage.blocks
        plain = [(block, block.__dict__.get("forward")) for block in blocks]
        try:
            for block in blocks:
                block.__dict__["forward"] = _Checkpointed(block.forward, cache)
            yield
        finally:
            for block, forward in plain:
                if forward is None:
                    del block.__dict__["forward"]
                else:
                    block.__dict__["forward"] = forward


class _Checkpointed:
    def __init__(self, forward: Callable[..., Any], cache: SliceCache) -> None:
        self._forward, self._cache = forward, cache

    def __reduce__(self) -> Any:
        """A block that is copied while its slice is computed gets the plain forward."""
        return _itself, (self._forward,)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        contexts = self._cache.checkpoint_contexts
        return checkpoint(self._forward, *arguments, use_reentrant=False, context_fn=contexts, **named)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
