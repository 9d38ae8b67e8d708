"""Verifies on a small random copy of a Hugging Face model that stages, slices and tensor parallel are exact.

The loss and every gradient are compared with those of the whole model: in training and in evaluation mode, with packed
documents, and with several lengths if RoPE depends on the length. ``DIFFERENCES`` in shrink.py lists how the copy
differs from the model.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import gcd, isfinite
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from terapipe.hf.attention_backend import Backend, UnsupportedModelError
from terapipe.hf.refusals import first_line, switch_checkpointing
from terapipe.hf.rope import depends_on_length, with_original_length
from terapipe.hf.routers import with_balance, with_router_logits
from terapipe.hf.structure import ModelStructure, find_structure, is_classifier
from terapipe.hf.verify.reference import (
    TOKENS,
    Batch,
    Result,
    SlicedModel,
    Starts,
    adds_router_loss,
    errors,
    lengths,
    reference,
    updated_buffers,
)
from terapipe.hf.verify.small_model import HEAD_COUNTS, KV_HEADS, small_model
from terapipe.modeling.stage import TensorParallel

BOUND = 1e-4  # relative error; parts of many models compute in float32, whatever their dtype
# For RoPE that depends on the length: the original length, beyond which it changes; further lengths on both sides of
# it; and documents that are all shorter.
ORIGINAL = 16
OTHER_TOKENS = (23, 11)
SHORT: Starts = ((0, 12, 20), (0, 7, 14, 21))
# Backends with the shortest slices to allow, in order of preference: the first that is exact is used.
BACKENDS: tuple[tuple[Backend, int], ...] = (("attention", 1), ("cache", 1), ("cache", 2))

Kind = type[PreTrainedModel]


@dataclass(frozen=True)
class VerifyResult:
    """Whether a model is exact in slices, and how. Packed documents may be refused although the rest is exact."""

    model: str
    backend: Backend | None = None  # None: the model is refused
    worst: float = float("nan")  # the largest error, relative to the largest gradient
    shortest: int = 1  # least tokens of a slice
    reason: str = ""  # why the model is not exact
    structure: ModelStructure | None = None
    groups: tuple[tuple[str, float], ...] = ()  # errors by groups of parameters
    documents: float = float("nan")  # the largest error with packed documents
    documents_reason: str = ""  # why packed documents are not exact
    router: float = float("nan")  # the largest error with the routers' load-balancing loss, if the model has one
    router_reason: str = ""  # why that loss is not exact
    dtype: str = "float64"  # of the small copy

    @property
    def exact(self) -> bool:
        return self.backend is not None and self.worst <= BOUND

    @property
    def documents_exact(self) -> bool:
        return self.exact and self.documents <= BOUND

    @property
    def has_router_loss(self) -> bool:
        return isfinite(self.router) or bool(self.router_reason)

    @property
    def router_exact(self) -> bool:
        return self.exact and self.router <= BOUND

    def to_dict(self) -> dict[str, Any]:
        exact = {"exact": self.exact, "documents_exact": self.documents_exact, "router_exact": self.router_exact}
        values = {**asdict(self), **exact}
        del values["structure"]
        return values | {
            "worst": _finite(self.worst),
            "documents": _finite(self.documents),
            "router": _finite(self.router),
            "groups": dict(self.groups),
        }


def _finite(error: float) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return error if isfinite(error) else None


def verify(
    name: str,
    config: PretrainedConfig,
    *,
    kind: Kind | None = None,
    stages: int = 2,
    slices: int = 4,
    device: str = "cpu",
) -> VerifyResult:
    """The fastest backend that is exact for this model, or why none is. Takes about a second.

    ``config`` is that of a small copy (``shrunken``). ``kind`` is the model's class, by default the causal LM of the
    configuration. On a GPU models run other code than on the CPU, in float32 at most: ``device`` checks that.
    """
    with quietly():
        reasons, config = [], with_router_logits(config, False)
        for dtype in (torch.float64, torch.float32) if device == "cpu" else (torch.float32,):
            try:  # some models do not run in float64
                model = _small(config, dtype, kind).to(device)  # type: ignore[arg-type]
                expected = _expected(model)
                structure = find_structure(copy.deepcopy(model.train()))
            except Exception as error:  # whatever the model's own code raises
                reasons.append(first_line(error))
                continue
            result = VerifyResult(name, dtype=str(dtype).removeprefix("torch."), structure=structure)
            result = _with_backend(result, model, expected, stages, slices)
            if not result.exact:
                return result
            return _with_router_loss(_with_documents(result, model, stages, slices), config, kind, stages, slices)
        return VerifyResult(name, reason=reasons[0])


@dataclass(frozen=True)
class _Expected:
    """What the whole model computes for a batch, in training or evaluation mode."""

    batch: Batch
    training: bool
    result: Result

    @property
    def remark(self) -> str:
        length = f" with {self.batch.tokens} tokens" if self.batch.tokens != TOKENS else ""
        return length + ("" if self.training else " in evaluation mode")


def _small(config: PretrainedConfig, dtype: torch.dtype, kind: Kind | None, seed: int = 0) -> PreTrainedModel:
    return small_model(with_original_length(config, ORIGINAL), dtype, seed, kind)


def _rope_depends_on_length(model: PreTrainedModel) -> bool:
    return any(map(depends_on_length, model.modules()))


def _expected(model: PreTrainedModel) -> list[_Expected]:
    """Leaves the model in evaluation mode."""
    others = OTHER_TOKENS if _rope_depends_on_length(model) else ()
    batches = [Batch.of(model, tokens) for tokens in (TOKENS, *others)]
    modes = [(batch, True) for batch in batches] + [(batches[0], False)]
    return [_Expected(batch, training, reference(model.train(training), batch)) for batch, training in modes]


def _with_backend(
    result: VerifyResult, model: PreTrainedModel, expected: Sequence[_Expected], stages: int, slices: int
) -> VerifyResult:
    """The result with the first backend that is exact, or with the reason why none is."""
    assert result.structure is not None
    reasons, worst = [], float("nan")
    for backend, shortest in BACKENDS:
        try:
            sliced = SlicedModel(model, result.structure, backend, stages)
            groups: dict[str, float] = {}
            for one in expected:
                sliced.train(one.training)
                tokens = one.batch.tokens
                count = slices if tokens == TOKENS else min(slices, tokens // (2 * shortest))
                for group, error in errors(one.result, sliced(one.batch, lengths(count, shortest, tokens))).items():
                    groups[group] = max(groups.get(group, 0.0), error)
                worst, remark = max(groups.values()), one.remark
                if worst > BOUND:
                    remark += _update_remark(model, one)
                    break
        except Exception as error:  # whatever the model's own code raises
            reasons.append(f"{backend} backend: {first_line(error)}")
            continue
        if worst <= BOUND:
            by_group = tuple(sorted(groups.items()))
            return replace(result, backend=backend, worst=worst, shortest=shortest, groups=by_group)
        reasons.append(f"{backend} backend: gradients differ by {worst:.1e}{remark}")
    return replace(result, worst=worst, reason="; ".join(dict.fromkeys(reasons)))


def _update_remark(model: PreTrainedModel, expected: _Expected) -> str:
    """For a model that is not exact, which buffers its forward updates: a likely reason."""
    whole = copy.deepcopy(model).train(expected.training)
    with torch.no_grad():
        names = updated_buffers(whole, lambda: whole(input_ids=expected.batch.ids, use_cache=False))
    return f"; each forward updates {', '.join(names[:3])}, so slices do it several times" if names else ""


def _with_documents(result: VerifyResult, model: PreTrainedModel, stages: int, slices: int) -> VerifyResult:
    """The result with the error of packed documents, compared with each document alone."""
    assert result.structure is not None
    if result.backend != "attention":
        return replace(result, documents_reason="it is cut through its own cache (cache backend)")
    slice_lengths = lengths(slices, result.shortest)
    try:
        sliced, worst = SlicedModel(model, result.structure, "attention", stages), 0.0
        for documents in (packed(slice_lengths), *((SHORT,) if _rope_depends_on_length(model) else ())):
            batch = Batch.of(model, documents=documents)
            worst = max(worst, *errors(reference(model, batch), sliced(batch, slice_lengths)).values())
    except Exception as error:  # whatever the model's own code raises
        return replace(result, documents_reason=first_line(error))
    reason = "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"
    return replace(result, documents=worst, documents_reason=reason)


def _with_router_loss(
    result: VerifyResult, config: PretrainedConfig, kind: Kind | None, stages: int, slices: int
) -> VerifyResult:
    """The result with the error of the routers' loss, if the model has one."""
    asking = with_router_logits(config, True)
    if asking is config:
        return result
    assert result.structure is not None
    try:
        model = with_balance(_small(asking, getattr(torch, result.dtype), kind))
        batch = Batch.of(model)
        if is_classifier(model) or not adds_router_loss(model, batch):
            return result
        sliced = SlicedModel(model, result.structure, result.backend, stages)
        worst = max(errors(reference(model, batch), sliced(batch, lengths(slices, result.shortest))).values())
    except Exception as error:  # whatever the model's own code raises
        return replace(result, router_reason=first_line(error))
    reason = "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"
    return replace(result, router=worst, router_reason=reason)


def packed(slice_lengths: Sequence[int]) -> Starts:
    """Documents that begin at slices and within them, one of a single token and some longer than a slice."""
    edges = list(accumulate(slice_lengths))[:-1]
    return (0, *edges[1::2]), (0, 5, 6, 18)


def confirm(result: VerifyResult, config: PretrainedConfig, *, kind: Kind | None = None) -> dict[str, float]:
    """The largest errors of another small copy, with other stages and slices, in what the result calls exact: by use,
    "whole", "documents" and "routers"."""
    assert result.structure is not None
    with quietly():
        model = _small(config, getattr(torch, result.dtype), kind, seed=1)
        sliced = SlicedModel(model, result.structure, result.backend, 3)
        slice_lengths = lengths(6, result.shortest)[::-1]
        uses: dict[str, Starts] = {"whole": ()}
        if result.documents_exact:
            uses["documents"] = ((0, 1, slice_lengths[0], 27), (0, 13))
        worst = {}
        for use, documents in uses.items():
            batch = Batch.of(model, documents=documents, seed=1)
            worst[use] = max(errors(reference(model, batch), sliced(batch, slice_lengths)).values())
        if result.router_exact:
            model = with_balance(_small(with_router_logits(config, True), getattr(torch, result.dtype), kind, seed=1))
            sliced, batch = SlicedModel(model, result.structure, result.backend, 3), Batch.of(model, seed=1)
            worst["routers"] = max(errors(reference(model, batch), sliced(batch, slice_lengths)).values())
        return worst


def recomputed_error(config: PretrainedConfig, structure: ModelStructure, kind: Kind | None = None) -> float:
    """The largest error of the attention backend with gradient checkpointing of layers. Some models ask the cache for
    its length, which transformers does not pass to a recomputed layer."""
    with quietly():
        model = _small(config, torch.float64, kind)
        batch = Batch.of(model)
        expected = reference(model, batch)
        switch_checkpointing(model, True)
        return max(errors(expected, SlicedModel(model, structure, "attention")(batch, lengths(4, 1))).values())


def block_error(config: PretrainedConfig, structure: ModelStructure, kind: Kind | None = None) -> float:
    """The largest error of the attention backend with block recomputation."""
    with quietly():
        model = _small(config, torch.float64, kind)
        batch = Batch.of(model)
        sliced = SlicedModel(model, structure, "attention")
        return max(errors(reference(model, batch), sliced(batch, lengths(4, 1), recompute="block")).values())


# Tensor parallel


def verify_tensor_parallel(
    result: VerifyResult, config: PretrainedConfig, mesh: DeviceMesh, kind: Kind | None = None
) -> VerifyResult:
    """The result of ``verify`` for this small configuration, with tensor parallel over this mesh. All ranks of the mesh
    call it together and get the same result."""
    degree = mesh.size()
    groups: dict[str, float] = {}
    reason = ""
    try:
        groups = _tp_errors(result, _widened(config, degree), mesh, kind)
    except Exception as error:  # whatever the model's own code raises, or DTensor
        reason = first_line(error)
    if _max_over([float(bool(reason))], mesh) != [0.0]:
        reason = reason or "it failed on another rank"
        return replace(result, backend=None, worst=float("nan"), reason=f"tp {degree}: {reason}")
    groups = dict(zip(groups, _max_over(list(groups.values()), mesh), strict=True))
    worst = max(groups, key=lambda group: groups[group])
    if not groups[worst] <= BOUND:
        reason = f"tp {degree}: gradients of {worst} differ by {groups[worst]:.1e}"
        return replace(result, backend=None, worst=groups[worst], reason=reason)
    return replace(result, worst=max(result.worst, groups[worst]), groups=tuple(sorted(groups.items())))


def refuse_inexact_tp(
    result: VerifyResult, config: PretrainedConfig, mesh: DeviceMesh, kind: Kind | None = None
) -> None:
    """Refuses a model whose tensor parallel plan is not exact. All ranks of the mesh call it together."""
    result = verify_tensor_parallel(result, config, mesh, kind)
    if not result.exact:
        raise UnsupportedModelError(
            f"tensor parallel by the tp_plan of {result.model} is not exact: {result.reason}; take tp 1"
        )


def _tp_errors(result: VerifyResult, config: PretrainedConfig, mesh: DeviceMesh, kind: Kind | None) -> dict[str, float]:
    assert result.structure is not None
    with quietly():
        model: Any = small_model(config, kind=kind)
        model = model.to(mesh.device_type)
        batch = Batch.of(model)
        sliced = SlicedModel(model, result.structure.of(model), result.backend, tp=TensorParallel(mesh))
        return errors(reference(model, batch), sliced(batch, lengths(4, result.shortest)))


def _max_over(mine: list[float], mesh: DeviceMesh) -> list[float]:
    """The element-wise maximum over all ranks, on all of them."""
    values = torch.tensor(mine, dtype=torch.float64, device=mesh.device_type)
    largest: list[float] = DTensor.from_local(values, mesh, [Partial("max")], run_check=False).full_tensor().tolist()
    return largest


def _widened(config: PretrainedConfig, degree: int) -> PretrainedConfig:
    """With enough heads to split over the ranks. Small copies have 1, 2 or 4 heads of keys and values."""
    factor = degree // gcd(degree, 2)
    if factor == 1:
        return config
    values = config.to_dict()
    wide = {name: factor * values[name] for name in f"{HEAD_COUNTS} {KV_HEADS}".split() if values.get(name)}
    return type(config).from_dict(values | wide)


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings: models have many that do not matter for a small copy."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
