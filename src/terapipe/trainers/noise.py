"""NEFTune in slices: uniform noise on the embeddings of a whole sequence, drawn once for all of its slices.

transformers adds it by a hook of the embedding, which draws for the tokens of a call, and divides by the square root of
their number. In a call of one slice the noise would be too large. So the first slice of a microbatch draws for the
whole sequence, and each slice takes its part::

    microbatch    uniform(-m, m), m = alpha / sqrt(tokens of a sequence x width)      (rows, tokens, width)
    slices        |-- 0 --|---- 1 ----|- 2 -|

A slice that is computed again draws, if it is the first, the same numbers: its random state is put back before. The
others take what the first left.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from terapipe.hf.stage import DecoderStage
from terapipe.modeling.slice_cache import current_cache

NOISE = "noise of embeddings"  # among what caches have


class EmbeddingNoise:
    """Adds noise to the embeddings of the stages that embed.

    With one microbatch, and no dropout before, the numbers are those that transformers draws from the same random
    state.

    Args:
        alpha: transformers' ``neftune_noise_alpha``.
        is_on: Tells whether to add any, beside the embedding's own training mode.
    """

    def __init__(self, alpha: float, is_on: Callable[[], bool]) -> None:
        self._alpha, self._is_on = alpha, is_on

    def attach(self, stages: Iterable[nn.Module]) -> None:
        """Puts a hook on the embedding of each stage that embeds tokens.

        Args:
            stages: Those of this rank.
        """
        for stage in stages:
            if isinstance(stage, DecoderStage) and stage.is_first:
                stage.model.get_input_embeddings().register_forward_hook(self._add)

    def _add(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """The embeddings of a slice, with its part of the noise."""
        cache = current_cache()
        if not (module.training and self._is_on()) or cache is None:
            return output
        if cache.context == 0:
            cache.drawn[NOISE] = self._draw(output, cache.seq_len)
        return output + cache.drawn[NOISE][:, cache.context : cache.end]

    def _draw(self, like: Tensor, tokens: int) -> Tensor:
        """Noise for so many tokens of each row."""
        rows, _, width = like.shape
        largest = float(self._alpha / torch.sqrt(torch.tensor(tokens * width)))
        noise = torch.zeros(rows, tokens, width, dtype=like.dtype, device=like.device)
        return noise.uniform_(-largest, largest)
