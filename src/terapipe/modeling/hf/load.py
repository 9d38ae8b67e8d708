"""Decoders from a configuration on disk, without weights: for measuring and planning."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from terapipe.modeling.hf.decoder import Decoder


def read_config(path: Path) -> Any:
    """Of a Hugging Face folder or config.json. Nothing is downloaded."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:  # JSON, but not a configuration
        raise ValueError(f"{path} holds no Hugging Face configuration: {error}") from None


def decoder_from(path: Path, dtype: str | None = None) -> Decoder:
    """In evaluation mode: attention dropout, which is refused in training, would only add noise to measurements."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    decoder = Decoder.from_config(read_config(path), dtype=getattr(torch, dtype or "float32"))
    decoder.model.train(False)
    return decoder
