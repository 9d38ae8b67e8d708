"""What an optimizer keeps for each parameter, in bytes: on the device, and in the memory of the host.

adamw           two moments in the parameter's dtype; `terapipe train` has them, and a copy of the parameter, in
                float32 where the parameter is in half precision
adamw-8bit      two moments of one byte each, and a scale for each block of 256
adamw-offload   nothing on the device: all that adamw has, and a copy of parameter and gradient, are the host's
                (torchao's CPUOffloadOptimizer)
sgd             nothing
"""

from typing import NamedTuple

OPTIMIZERS = ("adamw", "adamw-8bit", "adamw-offload", "sgd")
WHOLE_PARAMETERS = ("adamw-8bit", "adamw-offload")  # neither takes shards: blocks of scales, copies on the host
BLOCK, SCALE = 256, 4  # values that share a scale, and its bytes


class StateBytes(NamedTuple):
    """Bytes for each parameter."""

    device: float
    host: float = 0.0


def state_bytes(optimizer: str, element: int, *, master: bool) -> StateBytes:
    """What an optimizer keeps for each parameter.

    Args:
        optimizer: One of ``OPTIMIZERS``.
        element: Bytes of a parameter.
        master: Whether moments are in float32 at least, and parameters in half precision have a copy in it.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    wide = max(element, 4) if master else element
    copy = wide if wide != element else 0
    if optimizer == "sgd":
        return StateBytes(copy)
    if optimizer == "adamw-8bit":
        return StateBytes(2 * (1 + SCALE / BLOCK) + copy)
    if optimizer == "adamw-offload":
        return StateBytes(0.0, 2.0 * element + 2 * wide + copy)
    return StateBytes(2 * wide + copy)
