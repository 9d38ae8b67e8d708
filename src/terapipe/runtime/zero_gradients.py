"""A step that trains nothing is said once: every trainable gradient is exactly zero, or there is none."""

import warnings
from collections.abc import Iterable

from torch import nn

REASONS = (
    "nothing is trained by this step. Likely reasons: no label counts (all are -100); adapters were off, or another "
    "one was active, in the forward; the loss does not depend on the model's output, or is flat (all advantages are "
    "zero); gradients were cleared before they were used"
)


class ZeroGradients:
    """Of one pipeline. It reads nothing from a GPU: it looks at which gradients are there, and at norms that somebody
    has read already."""

    def __init__(self) -> None:
        self._is_said = False

    def check_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """At the end of a backward."""
        if self._is_said:
            return
        trainable = [p for p in parameters if p.requires_grad]
        if trainable and all(p.grad is None for p in trainable):
            self._say(f"none of the {len(trainable)} trainable parameters of this rank has got a gradient")

    def check_norm(self, norm: float) -> None:
        if norm == 0 and not self._is_said:
            self._say("the gradients of all trainable parameters are exactly zero")

    def _say(self, what: str) -> None:
        self._is_said = True
        warnings.warn(f"{what}: {REASONS}", stacklevel=3)
