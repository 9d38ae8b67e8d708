"""A Hugging Face causal LM that a ``Pipeline`` can split into stages.

What happens when a ``Decoder`` is made, and when it is used::

    decoder = Decoder(model)                       refuse_unfit, then a small copy is verified: which backend is exact?
    pipe = Pipeline(decoder, plan)                 decoder.check_plan(plan); decoder.stage(first, last, device)
    pipe.step(input_ids, labels)                   decoder.check_step(...), then the stages compute

A Decoder computes nothing itself. It knows what was verified, and refuses by name what was not. Each answer is found on
a small copy, so it takes about a second whatever the size of the model, and is remembered.
"""

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.hf.adapters import AdaptedWeights, with_adapter
from terapipe.hf.backends import Backend, UnsupportedModelError
from terapipe.hf.layer_bytes import bytes_of_layer
from terapipe.hf.quantized import has_quantized, method_of, quantization_of, why_packed
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
from terapipe.hf.shape import frozen_layers, shape_of
from terapipe.hf.stage import DecoderStage
from terapipe.hf.structure import ModelStructure, find_structure, identity_of, text_config
from terapipe.hf.tensor_parallel import refuse_uneven_heads
from terapipe.hf.verify.changes import check_changes
from terapipe.hf.verify.small_model import shrink_config, small_model
from terapipe.hf.verify.verification import ModelVerifier, VerifyResult
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
from terapipe.modeling.quantized import empty_as
from terapipe.modeling.stage import PipelineModel, SumsOver, TensorParallel
from terapipe.planning.presets import GPTConfig, LayerBytes, ModelSpec
from terapipe.planning.recompute import MODES, Recompute
from terapipe.planning.slices import Plan


class Decoder(PipelineModel):
    """A causal LM that a ``Pipeline`` can split into stages.

    Stages share the weights of ``model`` and do not change it otherwise. They start in its mode, training or
    evaluation. If the model is on the meta device, as ``from_config`` and ``from_pretrained`` build it, each stage
    makes only its own weights real.

    A mixture of experts whose configuration has ``output_router_logits=True`` is trained with transformers'
    load-balancing loss.

    Args:
        model: A causal LM of transformers, or a sequence classifier (``AutoModelForSequenceClassification``, see
            ``losses.classification`` and ``losses.reward_pairs``); adapters of peft may be in it.
        backend: What carries state between slices: "attention" (terapipe's attention over a cache of slices) or
            "cache" (the model's own cache). By default both are verified on a small copy of the model, and the first
            that is exact is used; the model is refused with an ``UnsupportedModelError`` if none is.
        router_loss_over: What the loss of routers is computed over: each "microbatch", as transformers does; the whole
            "batch"; or the batches of all "replicas".
        router_z_loss: The coefficient of a z-loss.
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
        # What small copies showed so far: of slices, and for which degrees of tensor parallel the model's plan is
        # exact.
        self._verified: VerifyResult | None = None
        self._verified_tp: set[int] = set()
        self.min_slice = 1  # least tokens of a slice
        with torch.random.fork_rng(devices=[]):  # some models draw random numbers when they run
            if backend is None:
                result = self._verify()
                if not result.exact:
                    raise UnsupportedModelError(f"{result.model} cannot be cut exactly: {result.reason}")
                assert result.structure is not None
                self.backend, structure, self.min_slice = result.backend, result.structure, result.min_slice
            else:
                config = with_router_logits(shrink_config(model.config), False)
                small = small_model(config, torch.float32, kind=type(model))
                self.backend, structure = backend, find_structure(small)
        self.structure: ModelStructure = structure.of(model)
        self.num_layers = len(list(model.get_submodule(self.structure.layers).children()))
        self.tied, self.config = self.structure.tied, model.config
        self._changes = check_changes(model, self.structure)
        self._is_quantized = has_quantized(model)
        self._dropouts = find_dropouts(model)  # once: every step asks for their probabilities
        self._routers = router_losses(model, router_z_loss, router_loss_over)
        if self._routers:
            self._check_routers()
        self.has_auxiliary_losses = self._routers is not None
        if is_checkpointing(model):
            refuse_reentrant(model)
            self._check_checkpointing()

    def _verify(self) -> VerifyResult:
        """What a small copy showed of backends, packed documents and losses of routers. Computed once."""
        if self._verified is None:
            with torch.random.fork_rng(devices=[]):
                self._verified = self._verifier().verify()
        return self._verified

    def _verifier(self) -> ModelVerifier:
        """Asks questions of small copies of the model, by its configuration as it is now."""
        kind = type(self.model)
        return ModelVerifier(kind.__name__, shrink_config(self.model.config), kind=kind)

    @property
    def is_verified(self) -> bool:
        """True: a small copy was verified when this was made, so ``Pipeline`` need not compare the model itself."""
        return True

    def whole_module(self) -> PreTrainedModel:
        """The model that stages share their weights with."""
        return self.model

    def _check_routers(self) -> None:
        """Refuses losses of routers that are not transformers' own to rounding. A model that asks for one to which
        transformers adds nothing trains without, here as there."""
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
        """Refuses slices and modes of recomputation that this model cannot do. Called before the first step.

        Args:
            plan: Of the pipeline, or one that replaces it for batches of another shape.
        """
        name, shortest = type(self.model).__name__, min(map(min, plan.lengths))
        if shortest < self.min_slice:
            raise UnsupportedModelError(
                f"slices of {name} must have at least {self.min_slice} tokens, got one of {shortest}"
            )
        if plan.recomputes and self.backend == "cache":
            raise UnsupportedModelError(f"slices of {name} cannot be computed again; leave recomputation off")
        for mode in plan.recompute_modes:
            if reason := self._refused_mode(mode):
                raise UnsupportedModelError(
                    f"layers of {name} cannot be computed again by recompute={mode!r}: {reason}; take recompute full "
                    "or none"
                )

    @property
    def recompute_modes(self) -> tuple[Recompute, ...]:
        """The modes of recomputation that this model supports: what the planner may choose from."""
        if self.backend == "cache":
            return ("none",)
        return tuple(mode for mode in MODES if not self._refused_mode(mode))

    def _refused_mode(self, mode: Recompute) -> str:
        """Why recomputation of layers is not exact, empty if it is. Verified on a small copy, which takes a second."""
        if mode in ("none", "full"):
            return ""
        if mode == "light" and method_of(quantization_of(self.model)) == "bitsandbytes":
            return "it recalls no products of bitsandbytes"
        if mode not in self._refused_modes:
            self._refused_modes[mode] = self._verifier().why_not_recomputed(self.structure, mode)
        return self._refused_modes[mode]

    @cached_property
    def _refused_modes(self) -> dict[Recompute, str]:
        """Why each mode that was verified is refused, empty if it is not: one verification serves all plans."""
        return {}

    def check_step(self, *, documents: bool, training: bool, padded: bool) -> None:
        """Refuses a step that would not be exact. All ranks call it, before anything is sent.

        Args:
            documents: Whether rows of the batch are packed documents.
            training: Whether the step is in training mode.
            padded: Whether batches may have been filled up to a longer length (``vary="pad"``).
        """
        name = type(self.model).__name__
        if documents and (reason := self._documents_refused()):
            raise UnsupportedModelError(
                f"packed documents are not exact in {name}: {reason}; give each document its own row"
            )
        if training and (reason := untrainable(self.model, self._dropouts) or self._changes.untrainable):
            raise UnsupportedModelError(f"{name} in training mode: {reason}")
        if self._is_quantized and (reason := why_packed(self.model)):
            raise UnsupportedModelError(f"{name}: {reason}")
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
            reason = self._verifier().why_not_checkpointed(self.structure)
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
        """With random weights, which depend on the seed and not on how the model is split.

        Args:
            config: Of a causal LM, or of a sequence classifier if its ``architectures`` names one.
            seed: Of the weights. They are not those that transformers draws from it, see ``RandomWeights``.
            dtype: Of the weights, by default the configuration's.
            backend: See ``Decoder``.
            options: Others of ``Decoder``.
        """
        decoder = cls(meta_model(config, dtype, classifier_of(config)), backend=backend, **options)
        decoder._weights = RandomWeights(seed)
        return decoder

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend | None = None,
        quantization_config: Any = None,
        adapter: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> "Decoder":
        """From a folder as ``save_pretrained`` writes it. As in transformers, the model is in evaluation mode.

        Nothing is downloaded. For a model of the Hugging Face Hub, first run
        ``hf download MODEL_ID --local-dir FOLDER``.

        Args:
            folder: With a ``config.json`` and weights.
            dtype: Of the weights, by default as they were saved.
            backend: See ``Decoder``.
            quantization_config: Quantizes linear layers as they are read, each rank those of its stages: a
                ``BitsAndBytesConfig`` or ``TorchAoConfig``. A folder that was saved quantized needs none.
            adapter: A ``LoraConfig`` of peft: all else is frozen, and each rank adds the adapters of its own layers.
            seed: Of the adapters' weights.
            options: Others of ``Decoder``.
        """
        weights = PretrainedWeights(Path(folder), dtype, quantization_config)
        config = weights.config()
        if quantization_config is not None:
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError(f"{folder} was saved quantized; leave out quantization_config, or load it from others")
            config.quantization_config = quantization_config
        model = meta_model(config, dtype, classifier_of(config))
        decoder = cls(model, backend=backend, **options)
        decoder._weights = weights
        if adapter is None:
            return decoder
        adapted = cls(with_adapter(model, adapter, decoder.structure), backend=decoder.backend, **options)
        adapted._weights = AdaptedWeights(weights, model, adapter, seed)
        adapted._verified, adapted.min_slice = decoder._verified, decoder.min_slice
        return adapted

    def weight_source(self) -> FolderSource | None:
        """The folder that the weights came from, if one is known: checkpoints may leave frozen weights to it."""
        return FolderSource.of(self.model, self._weights, self.structure)

    @property
    def shape(self) -> GPTConfig:
        """The GPT of the same size, which the planner reckons with: as many layers, about as many parameters that a
        token is multiplied by, and as many numbers in its cache. See shape.py."""
        return shape_of(self.model, self.structure)

    def planning_spec(self) -> ModelSpec:
        """What the planner knows of the model: a GPT's size, the least tokens of a slice, modes of recomputation,
        whether a stage may be an end alone, and what frozen layers take."""
        frozen = frozen_layers(self.model, self.structure)
        return ModelSpec(
            self.shape, self.min_slice, self.recompute_modes, bare_ends=self.has_bare_ends, frozen=frozen,
            layer_bytes=self._layer_bytes,
        )  # fmt: skip

    def _layer_bytes(self, element: int, autocast: bool) -> LayerBytes | None:
        """What a layer keeps for its backward, as ``ModelSpec`` asks for it. Models that are cut through their own
        cache keep more than layers show."""
        if self.backend == "cache":
            return None
        dtype = torch.float32 if autocast else {2: torch.bfloat16, 4: torch.float32}.get(element, torch.float64)
        with torch.random.fork_rng(devices=[]):
            return bytes_of_layer(self, self.config, dtype, torch.bfloat16 if autocast else None)

    def traits(self) -> dict[str, Any]:
        """What must be equal on all ranks, see ``PipelineModel``: class, backend, configuration, adapters, losses of
        routers. Without names of folders, which may differ between hosts."""
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

    @property
    def has_bare_ends(self) -> bool:  # type: ignore[override]
        """Whether stages may be the embedding or the head alone. Models of the cache backend count their tokens in
        layers."""
        return self.backend == "attention"

    def stage(
        self,
        first: int,
        last: int,
        device: torch.device,
        tp: TensorParallel | None = None,
        *,
        embeds: bool | None = None,
        has_head: bool | None = None,
    ) -> DecoderStage:
        """The stage with layers ``first`` to ``last - 1``, on a device.

        A model on the meta device gets the weights of these layers first, on the CPU. A real one shares them with the
        stage, if it is on the same device already.

        Args:
            first: The number of the first layer; 0 for the stage with the embedding.
            last: The number after that of the last layer; ``num_layers`` for the stage with the head.
            device: Where the stage computes.
            tp: Split its operators over this mesh.
            embeds: Whether the stage has the embedding, by default if it has the first layer. A stage without layers
                says it.
            has_head: The same for the head and the last layer.
        """
        ends = self.ends_of(first, last, embeds, has_head)
        if tp is not None:
            self._check_tp(tp)
        model = self.model
        if any(p.is_meta for p in model.parameters()):
            model = self._weights.fill(model, StageWeights(model, self.structure, first, last, ends))
        stage = self._stage(model, first, last, device, ends)
        if tp is not None:
            stage.parallelize(tp)
        return stage

    def fake_copy(self, device: torch.device) -> "Decoder":
        """A copy whose weights have shapes but no numbers, for dry runs. It is called where new tensors are fake.

        Args:
            device: Of the copy's weights.
        """
        if any(p.is_meta for p in self.model.parameters()) and quantization_of(self.model) is not None:
            raise UnsupportedModelError(
                f"the weights of {type(self.model).__name__} are quantized as they are read, so nothing is known of "
                "their bytes before; make a Decoder of a model that is loaded, or leave the dry run out"
            )
        fakes: dict[int, object] = {}
        for p in self.model.parameters():
            fakes[id(p)] = nn.Parameter(empty_as(p, device), p.requires_grad)
        for b in self.model.buffers():
            fakes[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=device)
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model, fakes)
        return twin

    def _stage(
        self, model: PreTrainedModel, first: int, last: int, device: torch.device, ends: tuple[bool, bool]
    ) -> DecoderStage:
        """A stage of a model whose weights are there. ``ends``: whether it has the embedding, and the head."""
        return DecoderStage(model, self.structure, first, last, self.backend, self._routers, device, ends)

    def _check_tp(self, tp: TensorParallel) -> None:
        """Refuses a tp_plan of the model that is not exact. All tensor-parallel ranks call it together.

        Adapters and changes by hand are in the model only, not in the copy by which the plan is verified, and names of
        the plan may no longer match what they wrap. So they are refused.
        """
        degree, name = tp.mesh.size(), type(self.model).__name__
        if self._is_quantized:
            raise UnsupportedModelError(f"quantized weights of {name} cannot be tensor parallel; take tp 1")
        if self._adapters:
            raise UnsupportedModelError(f"the adapters in {name} cannot be tensor parallel; take tp 1")
        if self._changes.first:
            raise UnsupportedModelError(f"{self._changes.first}, which cannot be tensor parallel; take tp 1")
        refuse_uneven_heads(self.model, degree)
        if degree not in self._verified_tp:
            result = VerifyResult(name, self.backend, 0.0, self.min_slice, structure=self.structure)
            result = self._verifier().tensor_parallel(result, tp.mesh)
            if not result.exact:
                raise UnsupportedModelError(
                    f"tensor parallel by the tp_plan of {name} is not exact: {result.reason}; take tp 1"
                )
            self._verified_tp.add(degree)


def decoder_from(path: Path, dtype: str | None = None) -> Decoder:
    """A decoder with random weights for measurements, as the command line makes it.

    In evaluation mode: attention dropout, which is refused in training, would only add noise to measurements.

    Args:
        path: Of a Hugging Face folder or its config.json. Weights in the folder are not read.
        dtype: A name such as ``bfloat16``, by default float32.
    """
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    decoder = Decoder.from_config(read_config(path), dtype=getattr(torch, dtype or "float32"))
    decoder.model.train(False)
    return decoder
