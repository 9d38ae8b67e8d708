"""The learning rate as a pure function of the step number, so that a resumed run needs no scheduler state."""

import math

from terapipe.config import LRConfig, OptimizerConfig


def learning_rate(step: int, config: LRConfig, optimizer: OptimizerConfig) -> float:
    """For the step about to be made, counted from 0. Peaks at the last warm-up step, ends at ``min_lr_ratio``."""
    if step < 0:
        raise ValueError(f"steps are counted from 0, got {step}")
    if step < config.warmup:
        return optimizer.lr * (step + 1) / config.warmup
    floor = config.min_lr_ratio
    return optimizer.lr * (floor + (1.0 - floor) * _height(step, config, optimizer.steps))


def _height(step: int, config: LRConfig, steps: int) -> float:
    """After the warm-up: 1 at the peak, 0 at the end."""
    last, top = steps - 1, max(0, config.warmup - 1)
    if config.kind == "wsd":
        top = max(top, last - round(config.decay * steps))
    if config.kind == "constant" or step <= top:
        return 1.0
    progress = min(1.0, (step - top) / max(1, last - top))
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if config.kind == "cosine" else 1.0 - progress
