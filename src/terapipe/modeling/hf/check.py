"""Proves on a small random copy of a Hugging Face model that cutting it changes nothing: loss and every gradient.

In training and in evaluation mode, with packed documents, and where RoPE depends on the length with several lengths one
after the other. What the copy does not have is listed in shrink.py (``DIFFERENCES``).
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import isfinite
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from terapipe.modeling.hf.attention_backend import Backend
from terapipe.modeling.hf.rope import depends_on_length, within_reach
from terapipe.modeling.hf.shrink import small_model
from terapipe.modeling.hf.structure import ModelStructure, find_structure
from terapipe.modeling.hf.trial import TOKENS, Batch, Cut, CutModel, Result, Starts, errors, in_one_piece, lengths

BOUND = 1e-4  # relative; what is left comes from what models compute in float32, some of them all
ORIGINAL = 16  # tokens beyond which RoPE that depends on the length changes
OTHER_TOKENS = (23, 11)  # further lengths for it, one on either side
SHORT: Starts = ((0, 12, 20), (0, 7, 14, 21))  # documents for it, all below
BACKENDS: tuple[tuple[Backend, int], ...] = (
    ("attention", 1),
    ("cache", 1),
    ("cache", 2),
)  # and the shortest slices; the first that is exact is taken

Kind = type[PreTrainedModel]


@dataclass(frozen=True)
class VerifyResult:
    """``seam`` is "fast", "general" or nothing, if the model is refused; ``worst`` the largest error, relative to the
    largest gradient. ``documents`` is the same with packed documents; they may be refused where the rest is exact."""

    model: str
    backend: Backend | None = None
    worst: float = float("nan")
    shortest: int = 1  # tokens of a slice
    reason: str = ""  # why it is not exact
    parts: ModelStructure | None = None
    groups: tuple[tuple[str, float], ...] = ()
    documents: float = float("nan")
    documents_reason: str = ""  # why they are not exact
    dtype: str = "float64"  # of the copy

    @property
    def exact(self) -> bool:
        return self.backend is not None and self.worst <= BOUND

    @property
    def documents_exact(self) -> bool:
        return self.exact and self.documents <= BOUND

    def to_dict(self) -> dict[str, Any]:
        known = {**asdict(self), "exact": self.exact, "documents_exact": self.documents_exact}
        known |= {key: _finite(known[key]) for key in ("worst", "documents")}
        return {key: value for key, value in known.items() if key != "parts"} | {"groups": dict(self.groups)}


def _finite(error: float) -> float | None:
    """JSON knows no others."""
    return error if isfinite(error) else None


def check(
    name: str, config: PretrainedConfig, *, kind: Kind | None = None, stages: int = 2, slices: int = 4
) -> VerifyResult:
    """The fastest way of cutting this model that is exact; where there is none, why. Takes about a second.

    ``config`` is that of a small copy, ``kind`` the model's class, by default the causal LM of the configuration.
    """
    with _quietly():
        model, truths, parts = None, list[_Truth](), None
        reasons = []
        for dtype in (torch.float64, torch.float32):  # some models know no float64
            try:
                model = _small(config, dtype, kind)
                truths = _truths(model)
                parts = find_structure(copy.deepcopy(model.train()))
                break
            except Exception as error:  # whatever a model's own code raises
                reasons.append(_first_line(error))
        if model is None or parts is None:
            return VerifyResult(name, reason=reasons[0])
        found = VerifyResult(name, dtype=str(dtype).removeprefix("torch."), parts=parts)
        found = _cut_best(found, model, truths, stages, slices)
        return _with_documents(found, model, stages, slices) if found.exact else found


@dataclass(frozen=True)
class _Truth:
    batch: Batch
    training: bool
    wanted: Result

    @property
    def remark(self) -> str:
        length = f" with {self.batch.tokens} tokens" if self.batch.tokens != TOKENS else ""
        return length + ("" if self.training else " in evaluation mode")


def _small(config: PretrainedConfig, dtype: torch.dtype, kind: Kind | None, seed: int = 0) -> PreTrainedModel:
    return small_model(within_reach(config, ORIGINAL), dtype, seed, kind)


def _by_length(model: PreTrainedModel) -> bool:
    return any(map(depends_on_length, model.modules()))


def _truths(model: PreTrainedModel) -> list[_Truth]:
    """What the model in one piece computes."""
    batches = [Batch.of(model, tokens) for tokens in (TOKENS, *(OTHER_TOKENS if _by_length(model) else ()))]
    modes = [(batch, True) for batch in batches] + [(batches[0], False)]
    return [_Truth(batch, training, in_one_piece(model.train(training), batch)) for batch, training in modes]


def _cut_best(
    found: VerifyResult, model: PreTrainedModel, truths: Sequence[_Truth], stages: int, slices: int
) -> VerifyResult:
    assert found.parts is not None
    reasons, worst = [], float("nan")
    for backend, shortest in BACKENDS:
        try:
            line = CutModel(model, Cut(found.parts, backend, stages))
            groups: dict[str, float] = {}
            for truth in truths:
                line.train(truth.training)
                most = min(slices, truth.batch.tokens // (2 * shortest))
                cuts = lengths(slices if truth.batch.tokens == TOKENS else most, shortest, truth.batch.tokens)
                for group, error in errors(truth.wanted, line(truth.batch, cuts)).items():
                    groups[group] = max(groups.get(group, 0.0), error)
                worst, remark = max(groups.values()), truth.remark
                if worst > BOUND:
                    break
        except Exception as error:
            reasons.append(f"{backend} backend: {_first_line(error)}")
            continue
        if worst <= BOUND:
            return replace(found, backend=backend, worst=worst, shortest=shortest, groups=tuple(sorted(groups.items())))
        reasons.append(f"{backend} backend: gradients differ by {worst:.1e}{remark}")
    return replace(found, worst=worst, reason="; ".join(dict.fromkeys(reasons)))


def _with_documents(found: VerifyResult, model: PreTrainedModel, stages: int, slices: int) -> VerifyResult:
    """Whether the model cut with packed documents does what it does with each of them alone."""
    assert found.parts is not None
    if found.backend != "attention":
        return replace(found, documents_reason="it is cut through its own cache (cache backend)")
    cuts = lengths(slices, found.shortest)
    try:
        line, worst = CutModel(model, Cut(found.parts, "attention", stages)), 0.0
        for documents in (packed(cuts), *((SHORT,) if _by_length(model) else ())):
            batch = Batch.of(model, documents=documents)
            worst = max(worst, *errors(in_one_piece(model, batch), line(batch, cuts)).values())
    except Exception as error:
        return replace(found, documents_reason=_first_line(error))
    reason = "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"
    return replace(found, documents=worst, documents_reason=reason)


def packed(cuts: Sequence[int]) -> Starts:
    """Documents that begin where slices do and elsewhere, among them one of a single token and long ones."""
    edges = list(accumulate(cuts))[:-1]
    return (0, *edges[1::2]), (0, 5, 6, 18)


def confirm(verdict: VerifyResult, config: PretrainedConfig, *, kind: Kind | None = None) -> dict[str, float]:
    """The largest errors of what a verdict calls exact, by another small copy, cut otherwise: "whole", "documents"."""
    assert verdict.parts is not None
    with _quietly():
        model = _small(config, getattr(torch, verdict.dtype), kind, seed=1)
        line = CutModel(model, Cut(verdict.parts, verdict.backend, 3))
        cuts = lengths(6, verdict.shortest)[::-1]
        uses: dict[str, Starts] = {"whole": ()}
        if verdict.documents_exact:
            uses["documents"] = ((0, 1, cuts[0], 27), (0, 13))
        found = {}
        for use, documents in uses.items():
            batch = Batch.of(model, documents=documents, seed=1)
            found[use] = max(errors(in_one_piece(model, batch), line(batch, cuts)).values())
        return found


def recomputed_error(config: PretrainedConfig, parts: ModelStructure, kind: Kind | None = None) -> float:
    """The largest relative error, by the fast seam, where a model's layers are computed again in the backward: some ask
    the cache how many tokens there were before, which transformers then does not tell them."""
    with _quietly():
        model = _small(config, torch.float64, kind)
        batch = Batch.of(model)
        wanted = in_one_piece(model, batch)
        model.gradient_checkpointing_enable()
        return max(errors(wanted, CutModel(model, Cut(parts, "attention"))(batch, lengths(4, 1))).values())


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
