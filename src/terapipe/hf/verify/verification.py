"""Verifies on a small random copy of a Hugging Face model that stages, slices and tensor parallel are exact.

``ModelVerifier`` asks one question per method, and answers each in the same way: it computes loss and every gradient
twice, once by the whole copy (``reference``) and once by its stages slice by slice (``SlicedModel``), and returns the
largest difference. ``verify`` asks them in this order:

    which backend?     attention, else the model's own cache, else that in slices of at least two tokens;
                       in training mode, with several lengths if RoPE depends on the length, and in evaluation mode
                       with one stage for each layer
    packed documents?  against each document alone
    router loss?       of a mixture of experts, against what transformers adds to the loss

A model's own code may raise anything. That is an answer too, so every question goes through ``_try``. The docstring of
small_model.py says in what a copy differs from the model.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import gcd, inf, isfinite
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from terapipe.hf.backends import Backend
from terapipe.hf.refusals import switch_checkpointing
from terapipe.hf.rope import ORIGINAL_KEY, depends_on_length, ropes_of, with_original_length
from terapipe.hf.routers import with_balance, with_router_logits
from terapipe.hf.structure import ModelStructure, find_structure, is_classifier, text_config, token_logits
from terapipe.hf.verify.reference import (
    TOKENS,
    Batch,
    Result,
    SlicedModel,
    Starts,
    adds_router_loss,
    errors,
    reference,
    uneven_lengths,
    updated_buffers,
)
from terapipe.hf.verify.small_model import HEAD_COUNTS, KV_HEADS, shrink_config, small_model
from terapipe.modeling.stage import TensorParallel
from terapipe.modeling.stage_chain import first_line
from terapipe.planning.recompute import Recompute

BOUND = 1e-4  # relative error; parts of many models compute in float32, whatever their dtype
# For RoPE that depends on the length: the original length, beyond which it changes; further lengths on both sides of
# it; and documents that are all shorter.
ORIGINAL = 16
OTHER_TOKENS = (23, 11)
SHORT: Starts = ((0, 12, 20), (0, 7, 14, 21))
# Backends with the least tokens of a slice, in order of preference: the first that is exact is used.
BACKENDS: tuple[tuple[Backend, int], ...] = (("attention", 1), ("cache", 1), ("cache", 2))

Kind = type[PreTrainedModel]
T = TypeVar("T")


@dataclass(frozen=True)
class VerifyResult:
    """Whether a model is exact in slices, and how. ``ModelVerifier.verify`` makes it; ``Decoder`` takes it as it is.

    An error is the largest difference of a gradient, relative to the largest gradient of the model; NaN if it was not
    computed. Packed documents and the loss of routers may be refused although the rest is exact.

    Args:
        model: The model's name.
        backend: What carries state between slices; None if the model is refused.
        worst: The largest error.
        min_slice: The least tokens of a slice with which it is exact.
        reason: Why the model is not exact.
        structure: Where its layers are; None for a model that could not be run at all.
        groups: Errors by groups of parameters; a group is a name without the layer's number.
        documents: The largest error with packed documents.
        documents_reason: Why packed documents are not exact.
        router: The largest error with the routers' load-balancing loss, if the model has one.
        router_reason: Why that loss is not exact.
        dtype: Of the small copy: float64, or float32 if the model does not run in that.
    """

    model: str
    backend: Backend | None = None
    worst: float = float("nan")
    min_slice: int = 1
    reason: str = ""
    structure: ModelStructure | None = None
    groups: tuple[tuple[str, float], ...] = ()
    documents: float = float("nan")
    documents_reason: str = ""
    router: float = float("nan")
    router_reason: str = ""
    dtype: str = "float64"

    @property
    def exact(self) -> bool:
        """Whether sequences without packed documents give the gradients of the whole model. All else that may be exact
        rests on this."""
        return self.backend is not None and self.worst <= BOUND

    @property
    def documents_exact(self) -> bool:
        """Whether packed documents give the gradients of each document by itself."""
        return self.exact and self.documents <= BOUND

    @property
    def has_router_loss(self) -> bool:
        """Whether transformers adds a loss of routers to the model's loss."""
        return isfinite(self.router) or bool(self.router_reason)

    @property
    def router_exact(self) -> bool:
        """Whether the loss of routers is transformers' own, and its gradients are."""
        return self.exact and self.router <= BOUND

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: without the structure, and None for errors that are not finite."""
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


@dataclass(frozen=True)
class _Expected:
    """What the whole model computes for a batch, in training or evaluation mode."""

    batch: Batch
    training: bool
    result: Result

    @property
    def remark(self) -> str:
        """What is special about it, for a message: another length, or evaluation mode. Empty for the usual case."""
        length = f" with {self.batch.tokens} tokens" if self.batch.tokens != TOKENS else ""
        return length + ("" if self.training else " in evaluation mode")


class ModelVerifier:
    """One small copy of a model after the other, each for one question.

    Args:
        name: The model's name in results.
        config: The configuration of a small copy, as ``shrink_config`` makes it.
        kind: The model's class, by default the causal LM of the configuration.
        num_stages: Stages of the copy; in evaluation mode it has one for each layer.
        num_slices: Slices of its sequences of 29 tokens.
        device: Where copies run. On a GPU models run other code than on the CPU, in float32 at most.
    """

    def __init__(
        self,
        name: str,
        config: PretrainedConfig,
        *,
        kind: Kind | None = None,
        num_stages: int = 2,
        num_slices: int = 4,
        device: str = "cpu",
    ) -> None:
        self._name, self._kind, self._device = name, kind, device
        self._config = with_router_logits(config, False)  # the loss of routers is a question of its own
        self._asking = with_router_logits(config, True)
        self._num_stages, self._num_slices = num_stages, num_slices

    # Questions

    def verify(self) -> VerifyResult:
        """The fastest backend that is exact for this model, or why none is. Takes about a second."""
        with quietly():
            reasons = []
            # Some models do not run in float64.
            for dtype in (torch.float64, torch.float32) if self._device == "cpu" else (torch.float32,):
                prepared, reason = _try(lambda dtype=dtype: self._prepare(dtype))  # type: ignore[misc]
                if prepared is None:
                    reasons.append(reason)
                    continue
                model, expected, structure = prepared
                result = VerifyResult(self._name, dtype=str(dtype).removeprefix("torch."), structure=structure)
                result = self._choose_backend(result, model, expected)
                return self._add_router_loss(self._add_documents(result, model)) if result.exact else result
            return VerifyResult(self._name, reason=reasons[0])

    def confirm(self, result: VerifyResult) -> dict[str, float]:
        """The largest errors of another small copy, with other weights, stages and slices, in what ``result`` calls
        exact.

        Args:
            result: Of ``verify``.

        Returns:
            By use: "whole", and if the result calls them exact "documents" and "routers".
        """
        with quietly():
            model = self._small_model(result.dtype, seed=1)
            slice_lengths = uneven_lengths(6, result.min_slice)[::-1]
            sliced = SlicedModel(model, _structure_of(result), result.backend, 3)
            worst = {"whole": _largest_error(model, sliced, Batch.of(model, seed=1), slice_lengths)}
            if result.documents_exact:
                batch = Batch.of(model, documents=((0, 1, slice_lengths[0], 27), (0, 13)), seed=1)
                worst["documents"] = _largest_error(model, sliced, batch, slice_lengths)
            if result.router_exact:
                model = with_balance(self._small_model(result.dtype, asking=True, seed=1))
                sliced = SlicedModel(model, _structure_of(result), result.backend, 3)
                worst["routers"] = _largest_error(model, sliced, Batch.of(model, seed=1), slice_lengths)
            return worst

    def why_not_recomputed(self, structure: ModelStructure, recompute: Recompute) -> str:
        """Why slices of the attention backend are not exact with this recomputation; empty if they are.

        Args:
            structure: Of the model.
            recompute: The mode.
        """
        return self._why_not(lambda model: SlicedModel(model, structure, "attention"), recompute)

    def why_not_checkpointed(self, structure: ModelStructure) -> str:
        """The same with transformers' own checkpointing of layers. Some models ask the cache for its length, which
        transformers does not pass to a recomputed layer.

        Args:
            structure: Of the model.
        """

        def checkpointing(model: PreTrainedModel) -> SlicedModel:
            model = copy.deepcopy(model)
            switch_checkpointing(model, True)
            return SlicedModel(model, structure, "attention")

        return self._why_not(checkpointing)

    def tensor_parallel(self, result: VerifyResult, mesh: DeviceMesh) -> VerifyResult:
        """The result of ``verify``, with tensor parallel over this mesh. All ranks of the mesh call it together and get
        the same result."""
        degree = mesh.size()
        groups, reason = _try(lambda: self._tp_errors(result, mesh))
        if _max_over([float(groups is None)], mesh) != [0.0] or groups is None:
            reason = f"tp {degree}: {reason or 'it failed on another rank'}"
            return replace(result, backend=None, worst=float("nan"), reason=reason)
        groups = dict(zip(groups, _max_over(list(groups.values()), mesh), strict=True))
        worst = max(groups, key=groups.__getitem__)
        if not groups[worst] <= BOUND:
            reason = f"tp {degree}: gradients of {worst} differ by {groups[worst]:.1e}"
            return replace(result, backend=None, worst=groups[worst], reason=reason)
        return replace(result, worst=max(result.worst, groups[worst]), groups=tuple(sorted(groups.items())))

    # How they are answered

    # How they are answered

    def _small_model(self, dtype: torch.dtype | str, *, asking: bool = False, seed: int = 0) -> PreTrainedModel:
        """A small copy. With ``asking``, its configuration asks for the loss of routers.

        RoPE by length changes beyond 16 tokens in it, so that sequences of 29 tokens are beyond and some slices before.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        config = with_original_length(self._asking if asking else self._config, ORIGINAL)
        return small_model(config, dtype, seed, self._kind)

    def _prepare(self, dtype: torch.dtype) -> tuple[PreTrainedModel, list[_Expected], ModelStructure]:
        """A small copy in training mode, what it computes whole in both modes, and its structure."""
        model = self._small_model(dtype).to(self._device)  # type: ignore[arg-type]
        others = OTHER_TOKENS if _rope_depends_on_length(model) else ()
        batches = [Batch.of(model, tokens) for tokens in (TOKENS, *others)]
        modes = [(batch, True) for batch in batches] + [(batches[0], False)]
        expected = [_Expected(batch, training, reference(model.train(training), batch)) for batch, training in modes]
        return model, expected, find_structure(copy.deepcopy(model.train()))

    def _choose_backend(
        self, result: VerifyResult, model: PreTrainedModel, expected: Sequence[_Expected]
    ) -> VerifyResult:
        """The result with the first backend that is exact, or with the reason why none is."""
        reasons, worst = [], float("nan")
        for backend, min_slice in BACKENDS:
            groups: dict[str, float] = {}
            remark, reason = _try(
                lambda: self._compare(result, model, expected, backend, min_slice, groups)  # noqa: B023
            )
            if remark is None:
                reasons.append(f"{backend} backend: {reason}")
                continue
            worst = max(groups.values())
            if worst <= BOUND:
                by_group = tuple(sorted(groups.items()))
                return replace(result, backend=backend, worst=worst, min_slice=min_slice, groups=by_group)
            reasons.append(f"{backend} backend: gradients differ by {worst:.1e}{remark}")
        return replace(result, worst=worst, reason="; ".join(dict.fromkeys(reasons)))

    def _compare(
        self,
        result: VerifyResult,
        model: PreTrainedModel,
        expected: Sequence[_Expected],
        backend: Backend,
        min_slice: int,
        groups: dict[str, float],
    ) -> str:
        """Puts the largest error of each group of parameters into ``groups``. Stops at the first batch with an error
        beyond the bound, and returns what is special about it, in words."""
        structure = _structure_of(result)
        depth = len(list(model.get_submodule(structure.layers).children()))
        # In evaluation mode each layer is a stage of its own. A plan may cut anywhere, and what a layer asks for beside
        # hidden states shows only where it is not on the first stage: layers of DeepSeek V4 that route by token ids.
        by_mode = {
            training: SlicedModel(model, structure, backend, num_stages)
            for training, num_stages in ((True, self._num_stages), (False, depth))
        }
        for one in expected:
            sliced = by_mode[one.training]
            sliced.train(one.training)
            tokens = one.batch.tokens
            count = self._num_slices if tokens == TOKENS else min(self._num_slices, tokens // (2 * min_slice))
            computed = sliced(one.batch, uneven_lengths(count, min_slice, tokens))
            for group, error in errors(one.result, computed).items():
                groups[group] = max(groups.get(group, 0.0), error)
            if max(groups.values()) > BOUND:
                return one.remark + _name_updated_buffers(model, one)
        return ""

    def _add_documents(self, result: VerifyResult, model: PreTrainedModel) -> VerifyResult:
        """The result with the error of packed documents, compared with each document alone."""
        if result.backend != "attention":
            return replace(result, documents_reason="it is cut through its own cache (cache backend)")
        slice_lengths = uneven_lengths(self._num_slices, result.min_slice)
        starts = (packed_documents(slice_lengths), *((SHORT,) if _rope_depends_on_length(model) else ()))

        def measure() -> float:
            sliced = SlicedModel(model, _structure_of(result), "attention", self._num_stages)
            batches = [Batch.of(model, documents=documents) for documents in starts]
            return max(_largest_error(model, sliced, batch, slice_lengths) for batch in batches)

        error, reason = _measure(measure)
        return replace(result, documents=error, documents_reason=reason)

    def _add_router_loss(self, result: VerifyResult) -> VerifyResult:
        """The result with the error of the routers' loss, if the model has one.

        A model may have routers and a flag for their loss, to which transformers adds nothing: the result then stays
        as it is, without a router error.
        """
        if self._asking is self._config:
            return result
        adds_nothing = False

        def measure() -> float:
            nonlocal adds_nothing
            model = with_balance(self._small_model(result.dtype, asking=True))
            batch = Batch.of(model)
            if adds_nothing := is_classifier(model) or not adds_router_loss(model, batch):
                return 0.0
            sliced = SlicedModel(model, _structure_of(result), result.backend, self._num_stages)
            return _largest_error(model, sliced, batch, uneven_lengths(self._num_slices, result.min_slice))

        error, reason = _measure(measure)
        return result if adds_nothing else replace(result, router=error, router_reason=reason)

    def _why_not(self, cut: Callable[[PreTrainedModel], SlicedModel], recompute: Recompute = "none") -> str:
        """Why the gradients of what ``cut`` makes of a small copy differ from the copy's; empty if they do not.

        Args:
            cut: Makes stages of a small copy.
            recompute: What their backwards compute again.
        """

        def measure() -> float:
            model = self._small_model(torch.float64)
            return _largest_error(model, cut(model), Batch.of(model), uneven_lengths(4, 1), recompute)

        with quietly(), torch.random.fork_rng(devices=[]):
            return _measure(measure)[1]

    def _tp_errors(self, result: VerifyResult, mesh: DeviceMesh) -> dict[str, float]:
        """Errors by groups of parameters, of stages that are split over the mesh, against the whole copy. Every rank
        computes the whole copy itself; they have the same weights, from the same seed."""
        with quietly():
            model: Any = small_model(_with_heads_for(self._config, mesh.size()), kind=self._kind)
            model = model.to(mesh.device_type)
            batch, structure = Batch.of(model), _structure_of(result).of(model)
            sliced = SlicedModel(model, structure, result.backend, tp=TensorParallel(mesh))
            return errors(reference(model, batch), sliced(batch, uneven_lengths(4, result.min_slice)))


def _try(question: Callable[[], T]) -> tuple[T | None, str]:
    """The answer; or None and the first line of whatever the model's own code, or DTensor, raises.

    Any exception: a type of transformers may raise anything when it is given stubs, slices or float64.
    """
    try:
        return question(), ""
    except Exception as error:
        return None, first_line(error)


def _measure(question: Callable[[], float]) -> tuple[float, str]:
    """The error that ``question`` computes, and why it is not exact; NaN if it raises."""
    error, reason = _try(question)
    if error is None:
        return float("nan"), reason
    return error, "" if error <= BOUND else f"gradients differ by {error:.1e}"


def _largest_error(
    model: PreTrainedModel,
    sliced: SlicedModel,
    batch: Batch,
    slice_lengths: Sequence[int],
    recompute: Recompute = "none",
) -> float:
    """Computes the largest error of one batch over all parameters."""
    return max(errors(reference(model, batch), sliced(batch, slice_lengths, recompute=recompute)).values())


def _structure_of(result: VerifyResult) -> ModelStructure:
    """The structure of a result whose model could be run."""
    assert result.structure is not None
    return result.structure


def _rope_depends_on_length(model: PreTrainedModel) -> bool:
    """Whether batches of several lengths must be tried: frequencies of one could stay for the next."""
    return any(map(depends_on_length, model.modules()))


def _name_updated_buffers(model: PreTrainedModel, expected: _Expected) -> str:
    """For a model that is not exact, which buffers its forward updates: a likely reason."""
    whole = copy.deepcopy(model).train(expected.training)
    with torch.no_grad():
        names = updated_buffers(whole, lambda: whole(input_ids=expected.batch.ids, use_cache=False))
    return f"; each forward updates {', '.join(names[:3])}, so slices do it several times" if names else ""


def packed_documents(slice_lengths: Sequence[int]) -> Starts:
    """Documents that begin at slices and within them, one of a single token and some longer than a slice.

    For slices of 5, 1, 13 and 10 tokens, where ``|`` is the edge of a slice and ``D`` begins a document:

        slices   |....|.|............|.........
        row 0    D.....D......................     where the third slice begins, and the fifth, if there is one
        row 1    D....DD...........D..........     at 5, 6 and 18

    Args:
        slice_lengths: Of a sequence of 29 tokens.
    """
    edges = list(accumulate(slice_lengths))[:-1]
    return (0, *edges[1::2]), (0, 5, 6, 18)


def _max_over(mine: list[float], mesh: DeviceMesh) -> list[float]:
    """The element-wise maximum over all ranks, on all of them: an all-reduce, by way of a DTensor."""
    values = torch.tensor(mine, dtype=torch.float64, device=mesh.device_type)
    largest: list[float] = DTensor.from_local(values, mesh, [Partial("max")], run_check=False).full_tensor().tolist()
    return largest


def _with_heads_for(config: PretrainedConfig, degree: int) -> PretrainedConfig:
    """With enough heads to split over the ranks. Small copies have 1, 2 or 4 heads of keys and values."""
    factor = degree // gcd(degree, 2)
    if factor == 1:
        return config
    values = config.to_dict()
    wide = {name: factor * values[name] for name in (*HEAD_COUNTS, *KV_HEADS) if values.get(name)}
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


# Positions

SHIFT = 64  # by how many positions tokens are shifted: more than a small copy's window
SHIFT_BOUND = 3e-5  # relative; angles of rotations are computed in float32
FAR = 2**20  # more tokens than a check has
_LENGTHS: dict[tuple[type, str], float] = {}  # by class and configuration: a check takes part of a second


def relative_length(model: PreTrainedModel) -> float:
    """Up to which length a model sees distances between tokens only, not where they are: 0, infinity, or an original
    length. Padding on the left shifts tokens, and a pipeline moves it to the right.

    Rotary embeddings make attention depend on distances. But some models also scale queries by their positions
    (Ministral 3 beyond its original length, Beam), or put a norm with weights of its own after the rotation (Hunyuan).
    So it is tried on a small copy, which gets the same tokens at other positions.

    Args:
        model: Any causal LM, of which the class and configuration are looked at.
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _LENGTHS:
        _LENGTHS[key] = _try_lengths(model.config, type(model))
    return _LENGTHS[key]


def _try_lengths(config: PretrainedConfig, kind: type[PreTrainedModel]) -> float:
    """With a small copy as it is; then with one whose original length nothing reaches. If only the second sees
    distances alone, the model does up to its own original length."""
    # Frequencies by length are those of the batch, padded or not: an original length that nothing reaches.
    small = with_original_length(shrink_config(config), FAR)
    if _sees_distances_only(small, kind):
        return inf
    originals = [one[ORIGINAL_KEY] for one in ropes_of(text_config(config)) if one.get(ORIGINAL_KEY)]
    for one in ropes_of(text_config(small)):
        if one.get(ORIGINAL_KEY):
            one[ORIGINAL_KEY] = FAR
    return float(min(originals)) if originals and _sees_distances_only(small, kind) else 0.0


def _sees_distances_only(config: PretrainedConfig, kind: type[PreTrainedModel]) -> bool:
    """Whether logits of a small copy are the same 64 positions further on."""
    with quietly(), torch.no_grad():
        try:
            model = small_model(config, kind=kind).train(False)
            batch = Batch.of(model)
            places = torch.arange(batch.tokens).expand_as(batch.ids)
            here, there = (
                token_logits(model, input_ids=batch.ids, position_ids=places + shift, use_cache=False)
                for shift in (0, SHIFT)
            )
        except Exception:  # whatever the model's own code raises, for example without rows for such positions
            return False
    return bool((here - there).abs().max() <= SHIFT_BOUND * here.abs().max())
