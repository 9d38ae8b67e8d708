"""What a sequence classifier makes of scores at each token: one token's scores, and the loss of its labels.

Which token that is, and which loss, the model's own forward says. It is called with everything before its head left
out: in place of the layers nothing is computed, in place of the head the pipeline's scores are returned.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from terapipe.hf.attention_backend import UnsupportedModelError

HEAD = "score"


class _Answer(nn.Module):
    """A module that returns the same thing whatever it is called with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.answer


def classify(model: PreTrainedModel, scores: Tensor, inputs: dict[str, Any]) -> ModelOutput:
    """What the model returns for ``inputs``, which its forward was called with, if its head makes these ``scores``,
    (rows, tokens, classes)."""
    backbone = model.base_model_prefix
    if backbone not in model._modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no module {backbone!r} before its head {HEAD!r}; compute the loss of "
            "terapipe.Pipeline with losses.classification()"
        )
    shell = copy.copy(model)
    answers = {backbone: _Answer(BaseModelOutputWithPast(last_hidden_state=scores)), HEAD: _Answer(scores)}  # type: ignore[arg-type]
    shell.__dict__ = {**model.__dict__, "_modules": {**model._modules, **answers}}
    named = {name: value for name, value in inputs.items() if name not in ("use_cache", "return_dict")}
    output: ModelOutput = type(model).forward(shell, **named)
    return output
