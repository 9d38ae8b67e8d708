"""Proves on a small random copy of a Hugging Face model that cutting it changes nothing: loss and every gradient."""

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from terapipe.modeling.hf.anatomy import anatomy
from terapipe.modeling.hf.decoder import Decoder
from terapipe.modeling.hf.shrink import small_model
from terapipe.modeling.stage import IGNORE
from terapipe.planning.slices import Plan
from terapipe.runtime.pipeline import Pipeline

BOUND = 1e-4  # relative; what is left comes from norms and softmaxes that models compute in float32
TOKENS = 29
LENGTHS = {1: (9, 1, 12, 7), 2: (9, 2, 11, 7)}  # by the shortest slice


@dataclass(frozen=True)
class Verdict:
    """``seam`` is "fast", "general" or nothing, if the model is refused; ``worst`` the largest relative error."""

    model: str
    seam: str = ""
    worst: float = float("nan")
    shortest: int = 1  # tokens of a slice
    reason: str = ""
    groups: tuple[tuple[str, float], ...] = ()

    @property
    def exact(self) -> bool:
        return bool(self.seam) and self.worst <= BOUND

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exact": self.exact, "groups": dict(self.groups)}


def verify(name: str, config: PretrainedConfig, *, stages: int = 2) -> Verdict:
    """The fastest way of cutting this model that is exact; of those that are not, why."""
    with _quietly():
        try:
            model = small_model(config)
            wanted = _plainly(model)
        except Exception as error:  # whatever a model's own code raises
            return Verdict(name, reason=f"no small one could be run: {_first_line(error)}")
        reasons = []
        for seam, shortest in (("fast", 1), ("general", 1), ("general", 2)):
            try:
                groups = _errors(wanted, _cut(model, seam == "fast", stages, LENGTHS[shortest]))
            except Exception as error:
                reasons.append(f"{seam}: {_first_line(error)}")
                continue
            worst = max(groups.values())
            if worst <= BOUND:
                return Verdict(name, seam, worst, shortest, "", tuple(sorted(groups.items())))
            reasons.append(f"{seam}: gradients differ by {worst:.1e}")
    return Verdict(name, reason="; ".join(dict.fromkeys(reasons)))


def _plainly(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    whole = copy.deepcopy(model)
    ids, labels = _batch(model)
    logits = whole(input_ids=ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def _cut(model: PreTrainedModel, fast: bool, stages: int, lengths: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
    decoder = Decoder(copy.deepcopy(model), anatomy(copy.deepcopy(model)), fast=fast)
    layers = decoder.num_layers
    boundaries = tuple(layers * i // stages for i in range(stages + 1))
    plan = Plan((1, 1), (tuple(lengths), (20, 9)), boundaries, "terapipe", stages)
    pipe = Pipeline(decoder, plan)
    loss = pipe.step(*_batch(model))
    return loss.item(), {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def _batch(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    ids, labels = (torch.randint(vocabulary, (2, TOKENS), generator=generator) for _ in range(2))
    labels[0, 3] = labels[1, -1] = IGNORE
    return ids, labels


def _errors(wanted: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]]) -> dict[str, float]:
    """By groups of parameters: the layers' numbers left out."""
    groups = {"loss": abs(found[0] - wanted[0]) / abs(wanted[0])}
    largest = max(gradient.abs().max().item() for gradient in wanted[1].values())
    for name, truth in wanted[1].items():
        # Some gradients are zero but for rounding; those are compared with the largest of all.
        scale = max(truth.abs().max().item(), 1e-4 * largest)
        error = float("inf") if name not in found[1] else (found[1][name] - truth).abs().max().item() / scale
        group = re.sub(r"\.\d+\.", ".*.", name)
        groups[group] = max(groups.get(group, 0.0), error) if error == error else float("inf")
    return groups


def _first_line(error: Exception) -> str:
    return f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}"[:160]


@contextmanager
def _quietly() -> Iterator[None]:
    """Models warn of many things that do not matter for a small copy."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
