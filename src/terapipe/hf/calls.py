"""What a Hugging Face model is called with, as a pipeline takes it: token ids, labels that were shifted, documents.

Whatever a pipeline would compute differently is refused by name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terapipe.modeling.hf.attention_backend import UnsupportedModelError
from terapipe.modeling.stage import IGNORE, next_token_labels

Documents = tuple[tuple[int, ...], ...]
# Without an effect on what a pipeline computes, or the same information again.
WITHOUT_EFFECT = {
    "use_cache", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "num_items_in_batch", "fused_lm_head", "skip_logits",
}  # fmt: skip
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "alibi")


@dataclass(frozen=True)
class Call:
    """``labels[b, t]`` is the token to predict at place ``t``. ``shifts``: by how many places rows were moved to the
    left, over padding; None if no row was. ``is_padded``: whether some places are padding."""

    input_ids: Tensor
    labels: Tensor | None
    documents: Documents | None
    shifts: Tensor | None = None
    is_padded: bool = False

    def moved_back(self, values: Tensor) -> Tensor:
        """Values of tokens, (rows, tokens, ...), to the places that the caller knows."""
        return values if self.shifts is None else moved(values, -self.shifts)


def moved(values: Tensor, shifts: Tensor) -> Tensor:
    """Each row moved to the left by its number of places, in a circle."""
    rows, tokens = values.shape[:2]
    places = (torch.arange(tokens, device=values.device)[None] + shifts[:, None]) % tokens
    return values[torch.arange(rows, device=values.device)[:, None], places]


def call_of(config: Any, given: dict[str, Any]) -> Call:
    """``config``: of the model's text part. ``given``: what its forward was called with, by name."""
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    input_ids, mask, positions = (given.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids"))
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    others = given.keys() - WITHOUT_EFFECT
    if others or not isinstance(input_ids, Tensor):
        raise UnsupportedModelError(
            f"a pipeline takes input_ids, attention_mask, position_ids and labels, got {', '.join(sorted(others))}"
            if others
            else "a pipeline needs input_ids, got none"
        )
    labels = shifted if shifted is not None or labels is None else next_token_labels(labels)
    shifts = None
    if mask is not None:
        shifts = _padding(config, mask, labels, positions is not None)
    if shifts is not None:
        input_ids, labels, positions = (
            x if x is None else moved(x.expand(len(input_ids), -1), shifts) for x in (input_ids, labels, positions)
        )
    counted = None if mask is None else mask.sum(1)
    documents = None if positions is None else _documents(positions.expand(len(input_ids), -1), counted)
    is_padded = counted is not None and bool((counted < input_ids.shape[1]).any())
    return Call(input_ids, labels, documents, shifts, is_padded)


def _padding(config: Any, mask: Tensor, labels: Tensor | None, has_positions: bool) -> Tensor | None:
    """How many places each row is to be moved so that its padding is on the right; None if no row is."""
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
    relative = any(getattr(config, name, None) for name in ROTARY)
    if not (relative or has_positions) or getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError(
            "padding on the left changes the positions of this model, which a pipeline would count from the first "
            "token; set the tokenizer's padding_side to 'right'"
        )
    return starts


def _documents(positions: Tensor, counted: Tensor | None) -> Documents | None:
    """Where documents begin: where positions begin again at 0. Other positions are refused; of padding they do not
    matter."""
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
    found = tuple(tuple(row.nonzero().flatten().tolist()) for row in begins)
    return None if all(row == (0,) for row in found) else found
