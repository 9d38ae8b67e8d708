"""Hugging Face models: ``Decoder`` takes one apart, ``save_pretrained`` writes it back, ``save_adapter`` what was
trained of it. Needs transformers."""

from terapipe.hf.adapters import save_adapter
from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.decoder import Decoder
from terapipe.hf.save import save_pretrained
from terapipe.hf.shape import work_of
from terapipe.planning.layout import balance

__all__ = ["Decoder", "UnsupportedModelError", "save_adapter", "save_pretrained", "split_layers"]


def split_layers(decoder: Decoder, num_stages: int) -> tuple[int, ...]:
    """Boundaries for a plan, so that stages have about equal work: parameters by which a token is multiplied.

    Args:
        decoder: The model to cut.
        num_stages: Stages in all, over all ranks. The last one also has the head.
    """
    layers, head = work_of(decoder.model, decoder.structure)
    return balance(layers, num_stages, last=head)
