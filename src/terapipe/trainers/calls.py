"""A call of a Hugging Face model through a pipeline: what it is called with, and what it returns.

On the way in, ``call_of`` makes of the caller's arguments what a pipeline takes:

    input_ids, attention_mask      token ids with padding on the right, where no token sees it
    labels                         shifted by one place: the token to predict at each place
    position_ids                   where documents begin in each row

Whatever a pipeline would compute differently is refused by name.

On the way out there are values of each token. Three kinds of models make something else of them: a causal LM a loss and
logits; one that TRL gave a fused head log-probabilities, entropies and the like (``token_scores``); a sequence
classifier the scores at one token of each row (``classify``).
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.rope import depends_on_length
from terapipe.hf.structure import text_config
from terapipe.hf.verify.verification import relative_length
from terapipe.losses.objective import Targets
from terapipe.losses.tokens import labels_of
from terapipe.modeling.stage import IGNORE, next_token_labels

TESTED = "tested with transformers 5.22, accelerate 1.15 and TRL 1.16"
HEAD = "score"  # of transformers' sequence classifiers
Documents = tuple[tuple[int, ...], ...]
# Without an effect on what a pipeline computes, or the same information again.
WITHOUT_EFFECT = {
    "use_cache", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "num_items_in_batch", "fused_lm_head", "skip_logits",
}  # fmt: skip
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "alibi")


@dataclass(frozen=True)
class Call:
    """A call of a model, as a pipeline takes it.

    A pipeline has padding on the right only, where no token sees it. Rows with padding on the left are shifted:

        caller's row   pad pad  a   b   c        shifts 2
        pipeline's      a   b   c  pad pad       values of tokens are shifted back before the caller sees them

    Args:
        input_ids: (rows, tokens).
        labels: ``labels[b, t]`` is the token to predict at place t; None if the call has none.
        documents: Where they begin in each row; None if each row is one document.
        shifts: By how many places each row was shifted to the left; None if no row was.
        is_padded: Whether some places are padding.
    """

    input_ids: Tensor
    labels: Tensor | None
    documents: Documents | None
    shifts: Tensor | None = None
    is_padded: bool = False

    def shift_back(self, values: Tensor) -> Tensor:
        """Moves values of tokens to the places that the caller knows.

        Args:
            values: (rows, tokens, ...), at the pipeline's places.
        """
        return values if self.shifts is None else shift_rows(values, -self.shifts)


def shift_rows(values: Tensor, shifts: Tensor) -> Tensor:
    """Each row moved to the left by its number of places, in a circle.

    Args:
        values: (rows, tokens, ...).
        shifts: (rows), may be negative.
    """
    rows, tokens = values.shape[:2]
    places = (torch.arange(tokens, device=values.device)[None] + shifts[:, None]) % tokens
    return values[torch.arange(rows, device=values.device)[:, None], places]


def call_of(model: PreTrainedModel, inputs: dict[str, Any]) -> Call:
    """The call of a pipeline that gives what the model itself would give; what there is none for is refused.

    Args:
        model: Which was called.
        inputs: What its forward was called with, by name.
    """
    use_cache = inputs.get("use_cache")
    inputs = {name: value for name, value in inputs.items() if value is not None and value is not False}
    input_ids, mask, positions = (inputs.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids"))
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    others = inputs.keys() - WITHOUT_EFFECT
    if others or not isinstance(input_ids, Tensor):
        raise UnsupportedModelError(
            f"a pipeline takes input_ids, attention_mask, position_ids and labels, got {', '.join(sorted(others))}"
            if others
            else "a pipeline needs input_ids, got none"
        )
    labels = shifted if shifted is not None or labels is None else next_token_labels(labels)
    shifts = None
    if mask is not None:
        shifts = _padding(model, mask, labels, positions)
    if shifts is not None:
        input_ids, labels, positions = (
            x if x is None else shift_rows(x.expand(len(input_ids), -1), shifts) for x in (input_ids, labels, positions)
        )
    counted = None if mask is None else mask.sum(1)
    documents = None if positions is None else documents_of(positions.expand(len(input_ids), -1), counted)
    if documents and (reason := _why_not_packed(model, len(input_ids), mask is not None, use_cache)):
        warnings.warn(
            f"position_ids begin again at 0, which a pipeline takes as packed documents: none sees another. By itself "
            f"the model would not, {reason}",
            stacklevel=3,
        )
    is_padded = counted is not None and bool((counted < input_ids.shape[1]).any())
    if is_padded and positions is not None:
        _refuse_other_length(model, int(positions.max()) + 1, documents, input_ids.shape[1])
    return Call(input_ids, labels, documents, shifts, is_padded)


def _padding(model: PreTrainedModel, mask: Tensor, labels: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """How many places each row is to be moved so that its padding is on the right; None if no row is.

    Refuses masks with holes, and labels that count at padding: the model would learn from them, a pipeline not.
    """
    if mask.ndim != 2:
        raise UnsupportedModelError(
            f"an attention_mask of {mask.ndim} dimensions is not supported; packed documents are told by position_ids"
        )
    real = mask != 0
    if bool(real.all()):
        return None
    starts = real.int().argmax(1)
    places = torch.arange(mask.shape[1], device=mask.device)[None]
    ends = starts + real.sum(1)
    if not bool((real == ((places >= starts[:, None]) & (places < ends[:, None]))).all()):
        raise UnsupportedModelError("an attention_mask must leave out places before and after a sequence, not inside")
    if labels is not None and bool(((labels != IGNORE) & ~real).any()):
        raise ValueError(
            f"labels count at places that attention_mask leaves out; set labels of padding to {IGNORE}, and with "
            "padding on the left that of the first token, which padding would predict"
        )
    if not bool(starts.any()):
        return None
    _refuse_absolute(model, mask.shape[1], positions)
    return starts


def _refuse_absolute(model: PreTrainedModel, tokens: int, positions: Tensor | None) -> None:
    """Rows that were moved have other positions, unless the caller gives them. Models that see distances between tokens
    only do not mind."""
    config = text_config(model.config)
    refusal = (
        "padding on the left changes the positions of this model, which a pipeline would count from the first token"
    )
    remedy = "set the tokenizer's padding_side to 'right'"
    is_rotary = any(getattr(config, name, None) for name in ROTARY)
    if not (is_rotary or positions is not None) or getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError(f"{refusal}; {remedy}")
    if positions is None and tokens > (relative := relative_length(model)):
        beyond = f" beyond {relative:.0f} tokens, got {tokens}" if relative else ""
        raise UnsupportedModelError(
            f"{refusal}: attention of {type(model).__name__} depends on them, not only on distances{beyond}; {remedy}, "
            "or give position_ids that count from the first token"
        )


def _refuse_other_length(model: PreTrainedModel, by_positions: int, documents: Documents | None, tokens: int) -> None:
    """RoPE by length takes the largest position as the length, in a pipeline the longest document with its padding."""
    longest = max(b - a for row in documents or ((0,),) for a, b in pairwise([*row, tokens]))
    if by_positions != longest and any(map(depends_on_length, model.modules())):
        raise UnsupportedModelError(
            f"rotary embeddings of {type(model).__name__} depend on the length, which is {by_positions} by "
            f"position_ids and {longest} with padding; pad only up to the longest row, or leave position_ids out"
        )


def documents_of(positions: Tensor, counted: Tensor | None) -> Documents | None:
    """Where documents begin. This is what counts as packed: positions that begin again at 0 within a row, whatever else
    a call has. A mask of ones beside them changes nothing.

    Other positions are refused; of padding they do not matter. ::

        positions   0 1 2 0 1 0 1 2 3   ->   (0, 3, 5)

    Args:
        positions: (rows, tokens), with padding on the right.
        counted: How many tokens of each row are not padding; None if all are.
    """
    rows, tokens = positions.shape
    places = torch.arange(tokens, device=positions.device).expand(rows, -1)
    inside = torch.ones_like(places, dtype=torch.bool) if counted is None else places < counted[:, None]
    begins = (positions == 0) & inside
    begins[:, 0] = True
    last = torch.where(begins, places, 0).cummax(1).values
    if bool(((positions != places - last) & inside).any()):
        raise UnsupportedModelError(
            "position_ids must count from 0 and begin again at 0 with each document; a pipeline knows no others"
        )
    starts = tuple(tuple(row.nonzero().flatten().tolist()) for row in begins)
    return None if all(row == (0,) for row in starts) else starts


def _why_not_packed(model: PreTrainedModel, rows: int, has_mask: bool, use_cache: bool | None) -> str:
    """Why transformers itself would not take positions that begin again as packed documents; empty if it does.

    It looks for them only in a call with neither mask nor cache (masking_utils), kernels of flash attention only in a
    single row (modeling_flash_attention_utils).
    """
    if "flash" in str(model.config._attn_implementation):
        return f"because flash attention looks for them in one row only, got {rows}" if rows > 1 else ""
    if has_mask:
        return "because there is an attention_mask beside them; leave it out"
    if use_cache is None:
        use_cache = getattr(text_config(model.config), "use_cache", False)
        use_cache = use_cache and not (model.is_gradient_checkpointing and model.training)
    return "because it uses a cache; set use_cache=False" if use_cache else ""


# What the caller gets


@dataclass
class PipelineOutput(ModelOutput):
    """What transformers' causal LMs return, and what those return that TRL gave a fused head.

    Fields that a call does not have are None, and left out of the tuple that a caller with ``return_dict=False`` gets.

    Args:
        loss: A scalar, with a gradient function in training.
        logits: (rows, tokens, vocabulary), or (rows, classes).
        log_probs: Of each label, (rows, tokens), as all fields that follow; see ``token_scores``.
        entropy: Of each token's distribution.
        log_sum_sq_probs: The logarithm of the sum of its squared probabilities.
        mean_logits: The mean over the vocabulary.
        is_top1: Whether the label has the largest logit.
        label_mask: Where labels count.
        aux_loss: Of routers; always None, TRL asks for it.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


# TRL's fused head


def token_scores(logits: Tensor, targets: Targets, *, temperature: float, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Fields of TRL's fused head for the tokens of a slice, (size, length) each: 0 where the label is -100.

    ``log_sum_sq_probs``, ``mean_logits`` and ``is_top1`` have no gradient. Numbers are float32 whatever the model is,
    as in TRL, whose trainers rely on it: a filter by entropies compares them with a quantile of them in float32.

    Args:
        logits: Of the slice, (size, length, vocabulary).
        targets: The labels.
        temperature: What logits are divided by.
        wanted: Names of fields beside ``log_probs``, which is always there.
    """
    labels = labels_of(targets)
    counts = labels != IGNORE
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled if temperature == 1.0 else scaled / temperature
    log_probs = torch.log_softmax(scaled, -1)
    fields = {"log_probs": log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]}
    if "entropy" in wanted:
        fields["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in wanted:
            fields["log_sum_sq_probs"] = (2 * log_probs).logsumexp(-1)
        if "mean_logits" in wanted:
            fields["mean_logits"] = scaled.mean(-1)
        if "is_top1" in wanted:
            fields["is_top1"] = scaled.argmax(-1) == labels
    values = {name: value.float() if value.is_floating_point() else value for name, value in fields.items()}
    return {name: value.masked_fill(~counts, 0) for name, value in values.items()}


def fused_head(forward: Callable[..., Any]) -> Callable[[Tensor, Targets], dict[str, Tensor]]:
    """What the head computes that TRL's ``add_fused_lm_head`` put into a model's forward: ``token_scores``, with its
    temperature and fields. Both are in the variables of that function only.

    Args:
        forward: The model's, as TRL left it.
    """
    variables = inspect.getclosurevars(getattr(forward, "__func__", forward)).nonlocals
    if not {"temperature", "outputs", "cast_lm_head_to_fp32"} <= variables.keys():
        raise ValueError(
            "the model was called with fused_lm_head=True, but its forward is not that of TRL's add_fused_lm_head; "
            f"{TESTED}"
        )
    if variables["cast_lm_head_to_fp32"]:
        raise ValueError("cast_lm_head_to_fp32=True is not supported; leave it off")
    return partial(token_scores, temperature=float(variables["temperature"]), wanted=tuple(variables["outputs"]))


# Sequence classifiers. Which token's scores count, and which loss, the model's own forward says. It is called with
# everything before its head left out: the layers compute nothing, and the head returns the pipeline's scores.


class _Answer(nn.Module):
    """A module that returns the same thing whatever it is called with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.answer


def classify(model: PreTrainedModel, scores: Tensor, inputs: dict[str, Any]) -> ModelOutput:
    """What a sequence classifier returns if its head makes these scores.

    The model's own forward is called, on a shell of the model: its backbone and its head return what the pipeline
    computed, and all that is left is the choice of a token by padding, and the loss by ``problem_type``.

    Args:
        model: The classifier.
        scores: Of each token, (rows, tokens, classes).
        inputs: What its forward was called with, by name.
    """
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
