"""Hugging Face models: ``Decoder`` takes one apart, ``save_pretrained`` writes it back, ``pipelined`` runs its forward
through a pipeline. Needs transformers."""

from terapipe.hf.pipeline_config import PipelineConfig
from terapipe.hf.pipelined import PipelinedModel, pipelined
from terapipe.modeling.hf.attention_backend import UnsupportedModelError
from terapipe.modeling.hf.decoder import Decoder
from terapipe.planning.layout import balance
from terapipe.runtime.checkpoint.hugging_face import save_pretrained

__all__ = [
    "Decoder",
    "PipelineConfig",
    "PipelinedModel",
    "UnsupportedModelError",
    "pipelined",
    "save_pretrained",
    "split_layers",
]


def split_layers(decoder: Decoder, num_stages: int) -> tuple[int, ...]:
    """Boundaries for a plan, balanced by the products that a token takes part in, in the layers and in the head."""
    layers, head = decoder.products()
    return balance(layers, num_stages, last=head)
