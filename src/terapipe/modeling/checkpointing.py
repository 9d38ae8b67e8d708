"""Layers that are computed again in their backward, by torch.utils.checkpoint."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from terapipe.modeling.recall import LayerNeeds, Recall
from terapipe.modeling.slice_cache import SliceCache


class CheckpointedForward:
    """A block's forward under ``torch.utils.checkpoint``. It takes the place of ``block.forward`` while a slice is
    computed.

    Args:
        forward: The block's own.
        cache: That of the slice.
        needs: Where products are recalled: what is known of all layers' recomputations, and this one's name there.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: SliceCache,
        needs: tuple[dict[tuple[int, Hashable], LayerNeeds], tuple[int, Hashable]] | None,
    ) -> None:
        self._forward, self._cache, self._needs = forward, cache, needs

    def __reduce__(self) -> Any:
        """A block that is copied while its slice is computed gets the plain forward."""
        return _itself, (self._forward,)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        if self._needs is None:
            contexts = self._cache.checkpoint_contexts
            return checkpoint(self._forward, *arguments, use_reentrant=False, context_fn=contexts, **named)
        all_needs, name = self._needs
        recall = Recall(all_needs.get(name), self._cache.current.saved)
        contexts = partial(self._cache.checkpoint_contexts, recall)
        out = checkpoint(self._forward, *arguments, use_reentrant=False, context_fn=contexts, **named)
        if name not in all_needs:
            all_needs[name] = recall.finish()
            self._cache.drop_queries(all_needs[name].makes_queries)
        return out


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
