"""Hugging Face models: ``Decoder`` takes one apart, ``save_pretrained`` writes it back. Needs transformers."""

from terapipe.modeling.hf.decoder import Decoder
from terapipe.modeling.hf.seam import RefusedError
from terapipe.runtime.hf_files import save_pretrained

__all__ = ["Decoder", "RefusedError", "save_pretrained"]
