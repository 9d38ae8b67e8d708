"""A Hugging Face causal LM that a ``Pipeline`` can split into stages."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.hf.attention_backend import Backend, UnsupportedModelError
from terapipe.hf.refusals import (
    find_dropouts,
    is_checkpointing,
    refuse_reentrant,
    refuse_unfit,
    untrainable,
    without_wrapper,
)
from terapipe.hf.rope import depends_on_length
from terapipe.hf.routers import FLAG, refuse_capacity, router_losses, with_router_logits
from terapipe.hf.stage import DecoderStage
from terapipe.hf.structure import AFTER, ModelStructure, find_structure, identity_of, text_config
from terapipe.hf.tensor_parallel import refuse_uneven_heads
from terapipe.hf.verify.changes import check_changes
from terapipe.hf.verify.small_model import shrunken, small_model
from terapipe.hf.verify.verification import (
    BOUND,
    VerifyResult,
    block_error,
    recomputed_error,
    refuse_inexact_tp,
    verify,
)
from terapipe.hf.weights import (
    FolderSource,
    PretrainedWeights,
    RandomWeights,
    StageWeights,
    Weights,
    classifier_of,
    meta_model,
    read_config,
)
from terapipe.modeling.stage import PipelineModel, SumsOver, TensorParallel
from terapipe.planning.presets import GPTConfig, ModelSpec
from terapipe.planning.recompute import MODES, Recompute
from terapipe.planning.slices import Plan


class Decoder(PipelineModel):
    """A causal LM that a ``Pipeline`` can split into stages.

    Stages share the weights of ``model`` and do not change it otherwise. They start in its mode, training or
    evaluation. If the model is on the meta device, as ``from_config`` and ``from_pretrained`` build it, each stage
    makes only its own weights real.

    ``backend`` says what carries state between slices: "attention" (terapipe's attention over a cache of slices) or
    "cache" (the model's own cache). By default both are verified on a small copy of the model, and the first that is
    exact is used; the model is refused with an ``UnsupportedModelError`` if none is.

    A mixture of experts whose configuration has ``output_router_logits=True`` is trained with transformers'
    load-balancing loss. ``router_loss_over`` says what it is computed over: each "microbatch", as transformers does;
    the whole "batch"; or the batches of all "replicas". ``router_z_loss`` is the coefficient of a z-loss.

    ``model`` may also be a sequence classifier (``AutoModelForSequenceClassification``), see ``losses.classification``
    and ``losses.reward_pairs``.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: Backend | None = None,
        router_loss_over: SumsOver = "microbatch",
        router_z_loss: float = 0.0,
    ) -> None:
        self._adapters: dict[str, Any] = getattr(model, "peft_config", None) or {}
        model = without_wrapper(model)
        refuse_unfit(model)
        refuse_capacity(model)
        self.model: PreTrainedModel = model
        self._weights: Weights = RandomWeights()  # for a model on the meta device
        self._verified: VerifyResult | None = None  # on a small copy
        self._verified_tp: set[int] = set()  # degrees of tensor parallel
        self.shortest = 1  # least tokens of a slice
        with torch.random.fork_rng(devices=[]):  # some models draw random numbers when they run
            if backend is None:
                result = self._verify()
                if not result.exact:
                    raise UnsupportedModelError(f"{result.model} cannot be cut exactly: {result.reason}")
                assert result.structure is not None
                self.backend, structure, self.shortest = result.backend, result.structure, result.shortest
            else:
                config = with_router_logits(shrunken(model.config), False)
                small = small_model(config, torch.float32, kind=type(model))
                self.backend, structure = backend, find_structure(small)
        self.structure: ModelStructure = structure.of(model)
        self.num_layers = len(list(model.get_submodule(self.structure.layers).children()))
        self.tied, self.config = self.structure.tied, model.config
        self._changes = check_changes(model, self.structure)
        self._dropouts = find_dropouts(model)  # once: every step asks for their probabilities
        self._routers = router_losses(model, router_z_loss, router_loss_over)
        if self._routers:
            self._check_routers()
        self.has_auxiliary_losses = self._routers is not None
        if is_checkpointing(model):
            refuse_reentrant(model)
            self._check_checkpointing()

    def _verify(self) -> VerifyResult:
        """Verified on a small copy, once."""
        if self._verified is None:
            kind = type(self.model)
            with torch.random.fork_rng(devices=[]):
                self._verified = verify(kind.__name__, shrunken(self.model.config), kind=kind)
        return self._verified

    @property
    def is_verified(self) -> bool:
        """On a small copy, when it was made."""
        return True

    def whole_module(self) -> PreTrainedModel:
        return self.model

    def _check_routers(self) -> None:
        result, name = self._verify(), type(self.model).__name__
        if not result.has_router_loss:
            if getattr(text_config(self.model.config), FLAG, False) and not (self._routers and self._routers.z):
                self._routers = None  # transformers adds nothing either
                return
            raise UnsupportedModelError(f"a z-loss was asked for, but transformers adds no loss of routers to {name}")
        if not result.router_exact:
            raise UnsupportedModelError(
                f"the loss of routers of {name} is not exact: {result.router_reason}; set output_router_logits to "
                "False to leave it out"
            )

    def check_plan(self, plan: Plan) -> None:
        """Refuses slices and modes of recomputation that this model cannot do. Called before the first step."""
        name, shortest = type(self.model).__name__, min(map(min, plan.lengths))
        if shortest < self.shortest:
            raise UnsupportedModelError(
                f"slices of {name} must have at least {self.shortest} tokens, got one of {shortest}"
            )
        if plan.recomputes and self.backend == "cache":
            raise UnsupportedModelError(f"slices of {name} cannot be computed again; leave recomputation off")
        if "block" in plan.recompute_modes and self._block_refused:
            raise UnsupportedModelError(
                f"layers of {name} cannot be computed again: {self._block_refused}; take recompute full or none"
            )

    @property
    def recompute_modes(self) -> tuple[Recompute, ...]:
        """The modes of recomputation that this model supports."""
        if self.backend == "cache":
            return ("none",)
        return ("none", "full") if self._block_refused else MODES

    @cached_property
    def _block_refused(self) -> str:
        """Why block recomputation is not exact, empty if it is. Verified on a small copy, which takes a second."""
        try:
            with torch.random.fork_rng(devices=[]):
                worst = block_error(shrunken(self.model.config), self.structure, type(self.model))
        except Exception as error:  # whatever the model's own code raises
            return str(error)
        return "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"

    def check_step(self, *, documents: bool, training: bool, padded: bool) -> None:
        """Refuses a step that would not be exact. All ranks call it, before anything is sent. ``padded``: batches may
        have been filled up to a longer length."""
        name = type(self.model).__name__
        if documents and (reason := self._documents_refused()):
            raise UnsupportedModelError(
                f"packed documents are not exact in {name}: {reason}; give each document its own row"
            )
        if training and (reason := untrainable(self.model, self._dropouts) or self._changes.untrainable):
            raise UnsupportedModelError(f"{name} in training mode: {reason}")
        if padded and self._routers:
            raise UnsupportedModelError(
                f"routers of {name} would count the tokens that vary='pad' adds; take vary='replan'"
            )
        if padded and any(map(depends_on_length, self.model.modules())):
            raise UnsupportedModelError(
                f"rotary embeddings of {name} depend on the length, which vary='pad' changes; take vary='replan'"
            )

    def _documents_refused(self) -> str:
        """Why packed documents are refused, empty if they are not. Verifies now if the caller chose the backend."""
        result = self._verify()
        if result.backend != self.backend:
            return f"it uses the {self.backend} backend, which was not checked with them"
        return result.documents_reason

    def _check_checkpointing(self) -> None:
        """Verifies the model's own gradient checkpointing on a small copy, which takes another second."""
        reason = "it is cut through its own cache (cache backend), which they would change a second time"
        if self.backend == "attention":
            try:
                worst = recomputed_error(shrunken(self.model.config), self.structure, type(self.model))
                reason = "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"
            except Exception as error:  # whatever the model's own code raises
                reason = str(error)
        if reason:
            raise UnsupportedModelError(
                f"layers of {type(self.model).__name__} cannot be computed again: {reason}; leave gradient "
                "checkpointing off"
            )

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend | None = None,
        **options: Any,
    ) -> "Decoder":
        """With random weights, which depend on the seed and not on how the model is split. ``options`` are those of
        ``Decoder``. A sequence classifier is made if the configuration's ``architectures`` names one."""
        decoder = cls(meta_model(config, dtype, classifier_of(config)), backend=backend, **options)
        decoder._weights = RandomWeights(seed)
        return decoder

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, dtype: torch.dtype | None = None, *, backend: Backend | None = None, **options: Any
    ) -> "Decoder":
        """From a folder as ``save_pretrained`` writes it. As in transformers, the model is in evaluation mode.
        ``options`` are those of ``Decoder``.

        Nothing is downloaded. For a model of the Hugging Face Hub, first run
        ``hf download MODEL_ID --local-dir FOLDER``.
        """
        weights = PretrainedWeights(Path(folder), dtype)
        config = weights.config()
        decoder = cls(meta_model(config, dtype, classifier_of(config)), backend=backend, **options)
        decoder._weights = weights
        return decoder

    def weight_source(self) -> FolderSource | None:
        """The folder that the weights came from, if one is known."""
        return FolderSource.of(self.model, self._weights, self.structure)

    def planning_spec(self) -> ModelSpec:
        return ModelSpec(shape_of(self), self.shortest, self.recompute_modes)

    def traits(self) -> dict[str, Any]:
        """See ``PipelineModel``. Names of folders may differ between hosts."""
        adapters = {name: identity_of(adapter.to_dict()) for name, adapter in self._adapters.items()}
        for adapter in adapters.values():
            adapter.pop("base_model_name_or_path", None)
        return {
            "model": type(self.model).__name__,
            "backend": self.backend,
            "config": identity_of(self.model.config.to_dict()),
            "adapters": adapters,
            "router losses": self._routers,
        }

    def products(self) -> tuple[list[float], float]:
        """The number of parameters by which a token is multiplied: in each layer, and after the layers."""
        layers = [
            sum(p.numel() * self.visited(name) for name, p in layer.named_parameters())
            for layer in self.model.get_submodule(self.structure.layers).children()
        ]
        names = (name for name, p in self.model.named_parameters(remove_duplicate=False))
        after = (name for name in names if self.structure.place(name.rpartition(".")[0]) == AFTER)
        return layers, float(sum(self.model.get_parameter(name).numel() for name in after))

    def visited(self, name: str) -> float:
        """The share of a layer's parameter that a token uses: 1, or for experts, the share that it is routed to."""
        config = text_config(self.model.config)
        keys = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((n for key in keys if (n := getattr(config, key, 0))), 0)
        if not experts or ".experts." not in f".{name}.":
            return 1.0
        return float(getattr(config, "num_experts_per_tok", experts) / experts)

    def stage(self, first: int, last: int, device: torch.device, tp: TensorParallel | None = None) -> DecoderStage:
        if not 0 <= first < last <= self.num_layers:
            raise ValueError(f"a stage is some of the {self.num_layers} layers, got {first} to {last}")
        if tp is not None:
            self._check_tp(tp)
        model = self.model
        if any(p.is_meta for p in model.parameters()):
            model = self._weights.fill(model, StageWeights(model, self.structure, first, last))
        stage = self._stage(model, first, last, device)
        if tp is not None:
            stage.parallelize(tp)
        return stage

    def _stage(self, model: PreTrainedModel, first: int, last: int, device: torch.device) -> DecoderStage:
        return DecoderStage(model, self.structure, first, last, self.backend, self._routers, device)

    def _check_tp(self, tp: TensorParallel) -> None:
        """Refuses a tp_plan of the model that is not exact. All tensor-parallel ranks call it together."""
        degree, name = tp.mesh.size(), type(self.model).__name__
        if self._adapters:
            raise UnsupportedModelError(f"the adapters in {name} cannot be tensor parallel; take tp 1")
        if self._changes.first:
            raise UnsupportedModelError(f"{self._changes.first}, which cannot be tensor parallel; take tp 1")
        refuse_uneven_heads(self.model, degree)
        if degree not in self._verified_tp:
            result = VerifyResult(name, self.backend, 0.0, self.shortest, structure=self.structure)
            refuse_inexact_tp(result, shrunken(self.model.config), tp.mesh, type(self.model))
            self._verified_tp.add(degree)


def decoder_from(path: Path, dtype: str | None = None) -> Decoder:
    """In evaluation mode: attention dropout, which is refused in training, would only add noise to measurements."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    decoder = Decoder.from_config(read_config(path), dtype=getattr(torch, dtype or "float32"))
    decoder.model.train(False)
    return decoder


KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")


def shape_of(decoder: Decoder) -> GPTConfig:
    """The GPT with as many parameters per layer and token; of a layer's experts, only those that a token visits count.

    - Parameters of a layer's matrices beyond a GPT's attention count as feed-forward: a gated one of width f becomes
      one of width 1.5 f.
    - In a GPT all heads together are as wide as the hidden states. If the model's are not, the GPT gets heads whose
      keys and values have the right size, or the nearest to it (see ``_heads``). The difference in parameters goes to
      the feed-forward.
    - ``max_seq_len`` does not limit sequences: it is the number of rows of other parameters before the layers, each as
      wide as the hidden states. These are learned positions if there are any, else 1.
    """
    config, layers = text_config(decoder.model.config), decoder.num_layers
    hidden, vocab, tied = int(config.hidden_size), int(config.vocab_size), bool(decoder.tied)
    heads, kv_heads = _heads(config, hidden)
    attention = 2 * hidden * hidden * (1 + kv_heads / heads)
    ffn = max(1, round((_matrices(decoder) - attention) / (2 * hidden)))
    ends = ((1 if tied else 2) * vocab + 2) * hidden  # embedding, head, and the norm before it
    rows = max(1, (_outside(decoder) - ends) // hidden)
    return GPTConfig(layers, hidden, heads, kv_heads, ffn, vocab, rows, tied)


def _heads(config: Any, hidden: int) -> tuple[int, int]:
    """Numbers of heads of queries, and of keys and values.

    A GPT with hidden size h and a heads has heads of size h / a, so with b heads of keys and values it caches 2 h b / a
    numbers per token. We need 2 kv_heads * width: the pair (a, b) with b / a nearest to kv_heads * width / h, where a
    divides h and b divides a. Among equals, the numbers nearest to the model's own.
    """
    heads = _number(config, "num_attention_heads") or 1
    # SliceCache holds the inputs of attention, also for latent attention, which could keep less.
    latent = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    width = latent or _number(config, "head_dim") or hidden // heads
    kv_heads = next((n for name in KV_HEADS if (n := _number(config, name))), heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # whatever else the configuration of a Falcon says
    ratio = min(1.0, kv_heads * width / hidden)
    return min(
        ((a, b) for a in _divisors(hidden) for b in _divisors(a)),
        key=lambda pair: (abs(pair[1] / pair[0] - ratio), abs(pair[1] - kv_heads), abs(pair[0] - heads)),
    )


def _number(config: Any, name: str) -> int:
    """The largest, if layers differ."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, Sequence) else value)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _layers(decoder: Decoder) -> list[nn.Module]:
    return list(decoder.model.get_submodule(decoder.structure.layers).children())


def _matrices(decoder: Decoder) -> float:
    """Parameters in the matrices of one layer, on average."""
    sizes = [
        p.numel() * decoder.visited(name)
        for layer in _layers(decoder)
        for name, p in layer.named_parameters()
        if p.ndim > 1
    ]
    return sum(sizes) / decoder.num_layers


def _outside(decoder: Decoder) -> int:
    """Parameters outside of layers."""
    inside = {p for layer in _layers(decoder) for p in layer.parameters()}
    return sum(p.numel() for p in decoder.model.parameters() if p not in inside)
