"""Hugging Face models in anybody's loop, through a pipeline.

``pipelined`` is for loops of one's own, ``PipelineTrainer`` and ``PipelineMixin`` for transformers' Trainer and its
subclasses. TRL's trainers are in ``terapipe.trainers.trl``.

The trainers need accelerate, and are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from terapipe.trainers.config import PipelineConfig
from terapipe.trainers.model import PipelinedModel, pipelined

if TYPE_CHECKING:
    from terapipe.trainers.trainer import PipelineMixin, PipelineTrainer

__all__ = ["PipelineConfig", "PipelineMixin", "PipelineTrainer", "PipelinedModel", "pipelined"]


def __getattr__(name: str) -> Any:
    if name in ("PipelineMixin", "PipelineTrainer"):
        return getattr(import_module("terapipe.trainers.trainer"), name)
    raise AttributeError(f"module 'terapipe.trainers' has no attribute {name!r}")
