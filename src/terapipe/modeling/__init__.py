"""What to compute: slices of attention, the cache between them, linear layers and a GPT."""

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
