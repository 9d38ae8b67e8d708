"""A small Hugging Face model run in one piece, and cut into stages and slices in one process: loss and gradients."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from terapipe.modeling.hf.attention_backend import Backend
from terapipe.modeling.hf.rope import depends_on_length
from terapipe.modeling.hf.stage import DecoderStage
from terapipe.modeling.hf.structure import ModelStructure, text_config
from terapipe.modeling.stage import IGNORE, TensorParallel

TOKENS = 29

Starts = tuple[tuple[int, ...], ...]  # of documents, for each row
Result = tuple[float, dict[str, Tensor]]  # loss and gradients


@dataclass(frozen=True)
class Batch:
    """Two rows of random tokens. ``documents`` say where documents begin in each, if that matters."""

    ids: Tensor
    labels: Tensor
    documents: Starts = ()

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: int = TOKENS, documents: Starts = (), seed: int = 0) -> "Batch":
        generator = torch.Generator().manual_seed(seed)
        vocabulary = int(min(model.get_input_embeddings().num_embeddings, text_config(model.config).vocab_size))
        ids, labels = (torch.randint(vocabulary, (2, tokens), generator=generator) for _ in range(2))
        labels[0, 3] = labels[1, -1] = IGNORE
        return cls(ids, labels, documents)

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True)
class Cut:
    """How a model is cut."""

    parts: ModelStructure
    backend: Backend | None
    stages: int = 2
    split: TensorParallel | None = None  # over devices, which all do the same


def lengths(slices: int, shortest: int, tokens: int = TOKENS) -> tuple[int, ...]:
    """Uneven ones that add up to the tokens, among them one of the shortest."""
    if not 1 <= slices <= tokens // (2 * shortest):
        raise ValueError(f"a check cuts {tokens} tokens into 1 to {tokens // (2 * shortest)} slices, got {slices}")
    if slices == 1:
        return (tokens,)
    rest, weights = tokens - shortest * slices, [(5 * i) % 7 + 1 for i in range(slices - 1)]
    found = [shortest + rest * weight // sum(weights) for weight in weights]
    found.insert(1, shortest)
    found[-1] += tokens - sum(found)
    return tuple(found)


def in_one_piece(model: PreTrainedModel, batch: Batch) -> Result:
    """Each document by itself. Where frequencies depend on the length, that would be another model for each: then all
    in one row, as transformers packs them, by positions that begin anew."""
    whole = copy.deepcopy(model)
    if batch.documents and any(depends_on_length(module) for module in whole.modules()):
        places = [torch.arange(b - a) for row in batch.documents for a, b in pairwise([*row, batch.tokens])]
        positions = torch.cat(places).reshape(batch.ids.shape)
        logits = whole(input_ids=batch.ids, position_ids=positions, use_cache=False).logits
        loss = _loss(logits, batch.labels)
    elif batch.documents:
        parts = [
            _loss(whole(input_ids=batch.ids[i : i + 1, a:b], use_cache=False).logits, batch.labels[i : i + 1, a:b])
            for i, row in enumerate(batch.documents)
            for a, b in pairwise([*row, batch.tokens])
        ]
        loss = torch.stack(parts).sum()
    else:
        loss = _loss(whole(input_ids=batch.ids, use_cache=False).logits, batch.labels)
    loss = loss / (batch.labels != IGNORE).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


class CutModel:
    """All stages of a model in this process, each with its own copy, as if in processes of their own."""

    def __init__(self, model: PreTrainedModel, cut: Cut) -> None:
        self._tied = cut.parts.tied
        count = len(list(model.get_submodule(cut.parts.layers).children()))
        edges = [count * k // cut.stages for k in range(cut.stages + 1)]
        self._line = [self._stage(copy.deepcopy(model), cut, a, b) for a, b in pairwise(edges) if a < b]

    def _stage(self, model: PreTrainedModel, cut: Cut, first: int, last: int) -> DecoderStage:
        stage = DecoderStage(model, cut.parts, first, last, cut.backend)
        if cut.split is not None:
            stage.parallelize(cut.split)
        return stage

    def train(self, mode: bool) -> None:
        for stage in self._line:
            stage.train(mode)

    def __call__(self, batch: Batch, cuts: Sequence[int]) -> Result:
        """Slice by slice: forwards, then backwards in reverse."""
        line = self._line
        for stage in line:
            stage.zero_grad()
        caches = [stage.make_cache(len(batch.ids), batch.tokens) for stage in line]
        for cache in caches:
            cache.set_documents(batch.documents)
        done: list[list[tuple[Tensor, Tensor]]] = []  # for each slice and stage: what it took and what it gave
        starts = [0, *accumulate(cuts)][:-1]
        total = 0.0
        for start, length in zip(starts, cuts, strict=True):
            x, passed = batch.ids[:, start : start + length], []
            for stage, cache in zip(line, caches, strict=True):
                cache.begin(start, length)
                out = stage(x, cache)
                passed.append((x, out))
                x = out.detach().requires_grad_()
            loss = line[-1].loss(x, batch.labels[:, start : start + length]) / (batch.labels != IGNORE).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            done.append([*passed, (x, x)])
        for start, length, passed in reversed(list(zip(starts, cuts, done, strict=True))):
            for k in reversed(range(len(line))):
                gradient = passed[k + 1][0].grad
                assert gradient is not None
                caches[k].begin(start, length)
                caches[k].backward(passed[k][1], gradient)
        return total, self._gradients()

    def _gradients(self) -> dict[str, Tensor]:
        """By their names in the whole model, where a parameter that the first and the last stage share has one."""
        found: dict[str, Tensor] = {}
        for stage in self._line:
            for own, p in stage.named_parameters():
                name = self._tied[0] if own in self._tied else own
                if p.grad is not None:
                    gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    found[name] = found[name] + gradient if name in found else gradient
        return found


def errors(wanted: Result, found: Result) -> dict[str, float]:
    """By groups of parameters, the layers' numbers left out. Relative to the largest gradient of the whole model: some
    are zero but for rounding."""
    largest = max(gradient.abs().max().item() for gradient in wanted[1].values())
    groups = {"loss": _number(abs(found[0] - wanted[0]) / abs(wanted[0]))}
    for name in wanted[1].keys() | found[1].keys():
        truth, mine = wanted[1].get(name), found[1].get(name)
        if truth is None or mine is None:  # one that is zero may be missing
            rest = mine if truth is None else truth
            error = 0.0 if rest is None or not rest.any() else float("inf")
        else:
            error = _number((mine - truth).abs().max().item() / largest)
        group = re.sub(r"\.\d+\.", ".*.", name)
        groups[group] = max(groups.get(group, 0.0), error)
    return groups


def _number(error: float) -> float:
    return error if error == error else float("inf")
