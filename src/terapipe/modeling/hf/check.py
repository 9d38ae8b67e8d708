"""Proves on a small random copy of a Hugging Face model that cutting it changes nothing: loss and every gradient."""

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from terapipe.modeling.hf.anatomy import Anatomy, anatomy, text_config
from terapipe.modeling.hf.shrink import small_model
from terapipe.modeling.hf.stage import DecoderStage
from terapipe.modeling.stage import IGNORE, Split

BOUND = 1e-4  # relative; what is left comes from norms and softmaxes that models compute in float32
TOKENS = 29


@dataclass(frozen=True)
class Verdict:
    """``seam`` is "fast", "general" or nothing, if the model is refused; ``worst`` the largest relative error."""

    model: str
    seam: str = ""
    worst: float = float("nan")
    shortest: int = 1  # tokens of a slice
    reason: str = ""  # why it is not exact
    parts: Anatomy | None = None
    groups: tuple[tuple[str, float], ...] = ()

    @property
    def exact(self) -> bool:
        return bool(self.seam) and self.worst <= BOUND

    def to_dict(self) -> dict[str, Any]:
        known = {**asdict(self), "exact": self.exact, "groups": dict(self.groups)}
        return {key: value for key, value in known.items() if key != "parts"}


def check(name: str, config: PretrainedConfig, *, stages: int = 2, slices: int = 4) -> Verdict:
    """The fastest way of cutting this model that is exact; where there is none, why. Takes about a second."""
    with _quietly():
        try:
            model = small_model(config)
            wanted = _plainly(model)
            parts = anatomy(copy.deepcopy(model))
        except Exception as error:  # whatever a model's own code raises
            return Verdict(name, reason=_first_line(error))
        reasons, worst = [], float("nan")
        for fast, shortest in ((True, 1), (False, 1), (False, 2)):
            seam = "fast" if fast else "general"
            try:
                found = _cut(copy.deepcopy(model), parts, fast, stages, lengths(slices, shortest))
                groups = _errors(wanted, found)
            except Exception as error:
                reasons.append(f"{seam} seam: {_first_line(error)}")
                continue
            worst = max(groups.values())
            if worst <= BOUND:
                return Verdict(name, seam, worst, shortest, "", parts, tuple(sorted(groups.items())))
            reasons.append(f"{seam} seam: gradients differ by {worst:.1e}")
    return Verdict(name, worst=worst, reason="; ".join(dict.fromkeys(reasons)), parts=parts)


def recomputed_error(config: PretrainedConfig, parts: Anatomy) -> float:
    """The largest relative error, by the fast seam, where a model's layers are computed again in the backward: some ask
    the cache how many tokens there were before, which transformers then does not tell them."""
    with _quietly():
        model = small_model(config)
        wanted = _plainly(model)
        model.gradient_checkpointing_enable()
        return max(_errors(wanted, _cut(model, parts, True, 2, lengths(4, 1))).values())


def lengths(slices: int, shortest: int) -> tuple[int, ...]:
    """Uneven ones that add up to the tokens, among them one of the shortest."""
    if not 1 <= slices <= TOKENS // (2 * shortest):
        raise ValueError(f"a check cuts {TOKENS} tokens into 1 to {TOKENS // (2 * shortest)} slices, got {slices}")
    if slices == 1:
        return (TOKENS,)
    rest, weights = TOKENS - shortest * slices, [(5 * i) % 7 + 1 for i in range(slices - 1)]
    found = [shortest + rest * weight // sum(weights) for weight in weights]
    found.insert(1, shortest)
    found[-1] += TOKENS - sum(found)
    return tuple(found)


def _plainly(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    whole = copy.deepcopy(model)
    ids, labels = _batch(model)
    logits = whole(input_ids=ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def _cut(
    model: PreTrainedModel,
    parts: Anatomy,
    fast: bool,
    stages: int,
    cuts: Sequence[int],
    split: Split | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """All stages in this process, slice by slice: forwards, then backwards in reverse."""
    ids, labels = _batch(model)
    count = len(list(model.get_submodule(parts.layers).children()))
    edges = [count * k // stages for k in range(stages + 1)]
    line = [DecoderStage(model, parts, a, b, fast) for a, b in pairwise(edges)]
    if split is not None:
        for stage in line:
            stage.split(split)
    caches = [stage.make_cache(len(ids), TOKENS) for stage in line]
    done: list[list[tuple[Tensor, Tensor]]] = []  # for each slice and stage: what it took and what it gave
    starts = [0, *accumulate(cuts)][:-1]
    total = 0.0
    for start, length in zip(starts, cuts, strict=True):
        x, passed = ids[:, start : start + length], []
        for stage, cache in zip(line, caches, strict=True):
            cache.begin(start, length)
            out = stage(x, cache)
            passed.append((x, out))
            x = out.detach().requires_grad_()
        loss = line[-1].loss(x, labels[:, start : start + length]) / (labels != IGNORE).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        done.append([*passed, (x, x)])
    for start, length, passed in reversed(list(zip(starts, cuts, done, strict=True))):
        for k in reversed(range(stages)):
            gradient = passed[k + 1][0].grad
            assert gradient is not None
            caches[k].begin(start, length)
            caches[k].backward(passed[k][1], gradient)
    return total, _summed(line)


def _summed(line: Sequence[DecoderStage]) -> dict[str, Tensor]:
    """Gradients by name; a shared parameter has one name in the whole model, and split operators copies of it."""
    gradients: dict[str, Tensor] = {}
    tied, seen = line[0].parts.tied, set[nn.Parameter]()
    for stage in line:
        for name, p in stage.named_parameters():
            if p.grad is not None and p not in seen:
                seen.add(p)
                name = tied[0] if name in tied else name
                gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def _batch(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(min(model.get_input_embeddings().num_embeddings, text_config(model.config).vocab_size))
    ids, labels = (torch.randint(vocabulary, (2, TOKENS), generator=generator) for _ in range(2))
    labels[0, 3] = labels[1, -1] = IGNORE
    return ids, labels


def _errors(wanted: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]]) -> dict[str, float]:
    """By groups of parameters: the layers' numbers left out."""
    groups = {"loss": abs(found[0] - wanted[0]) / abs(wanted[0])}
    largest = max(gradient.abs().max().item() for gradient in wanted[1].values())
    for name, truth in wanted[1].items():
        # Some gradients are zero but for rounding; those are compared with the largest of all.
        scale = max(truth.abs().max().item(), 1e-3 * largest)
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
