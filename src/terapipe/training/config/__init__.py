"""The configuration file of a training run, run.toml."""

from terapipe.training.config.parsing import load, parse
from terapipe.training.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FailureConfig,
    LoggingConfig,
    LRConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PlanConfig,
    RunConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "FailureConfig",
    "LRConfig",
    "LoggingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PlanConfig",
    "RunConfig",
    "load",
    "parse",
]
