"""The learning rate of every step, by its number alone: a run that goes on needs to know nothing else."""

import math

from terapipe.config import ScheduleConfig


def learning_rate(step: int, config: ScheduleConfig, peak: float) -> float:
    """Of the step about to be made, from 0 on. The last step of the warm-up has the peak, the last of all the floor."""
    if step < 0:
        raise ValueError(f"steps are counted from 0, got {step}")
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    return peak * (config.floor + (1.0 - config.floor) * _height(step, config))


def _height(step: int, config: ScheduleConfig) -> float:
    """After the warm-up: 1 at the peak, 0 at the floor."""
    last, top = config.steps - 1, max(0, config.warmup - 1)
    if config.kind == "wsd":
        top = max(top, last - round(config.decay * config.steps))
    if config.kind == "constant" or step <= top:
        return 1.0
    way = min(1.0, (step - top) / max(1, last - top))
    return 0.5 * (1.0 + math.cos(math.pi * way)) if config.kind == "cosine" else 1.0 - way
