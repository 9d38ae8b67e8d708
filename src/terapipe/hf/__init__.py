"""Hugging Face models: ``Decoder`` takes one apart, ``save_pretrained`` writes it back. Needs transformers."""

from terapipe.hf.attention_backend import UnsupportedModelError
from terapipe.hf.decoder import Decoder
from terapipe.hf.save import save_pretrained
from terapipe.planning.layout import balance

__all__ = ["Decoder", "UnsupportedModelError", "save_pretrained", "split_layers"]


def split_layers(decoder: Decoder, num_stages: int) -> tuple[int, ...]:
    """Boundaries for a plan, balanced by the products that a token takes part in, in the layers and in the head."""
    layers, head = decoder.products()
    return balance(layers, num_stages, last=head)
