"""What to compute: slices of attention, the cache between them, linear layers and a GPT.

A model of one's own needs ``PipelineModel`` and ``Stage`` to inherit from, ``attend`` in place of torch's attention,
and ``SliceCache`` for types and other states::

    class Layer(nn.Module):
        def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
            ...
            return self.out(attend(q, k, v, cache, self.number))

README.md beside this file says which module to read first.
"""

from terapipe.modeling.attention import attend
from terapipe.modeling.gpt import GPT
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import (
    IGNORE,
    PipelineModel,
    Stage,
    TensorParallel,
    fill_batch,
    next_token_labels,
)

__all__ = [
    "GPT",
    "IGNORE",
    "PipelineModel",
    "SliceCache",
    "Stage",
    "TensorParallel",
    "attend",
    "fill_batch",
    "next_token_labels",
]
