"""Any Hugging Face causal LM, to be taken apart by a ``Pipeline``."""

from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.adapters import without_wrapper
from terapipe.modeling.hf.attention_backend import Backend, UnsupportedModelError
from terapipe.modeling.hf.check import BOUND, VerifyResult, check, recomputed_error
from terapipe.modeling.hf.randomness import auxiliary_loss, untrainable
from terapipe.modeling.hf.refusals import refuse_reentrant, refuse_unfit
from terapipe.modeling.hf.rope import depends_on_length
from terapipe.modeling.hf.shrink import shrunken, small_model
from terapipe.modeling.hf.stage import DecoderStage
from terapipe.modeling.hf.structure import AFTER, ModelStructure, find_structure, text_config
from terapipe.modeling.hf.tensor_check import prove_tensor_parallel
from terapipe.modeling.hf.tensor_parallel import refuse_uneven_heads
from terapipe.modeling.hf.weights import PretrainedWeights, RandomWeights, StageWeights, Weights, meta_model
from terapipe.modeling.stage import TensorParallel
from terapipe.presets import ModelSpec


class Decoder:
    """A causal LM that a ``Pipeline`` can take apart.

    Stages share the weights of a model that has them, and leave it as it is otherwise; pass a model in the mode,
    training or evaluation, that stages shall begin with. Of one on the meta device, as the two ways to make one below
    build it, each stage makes its own part real. ``backend`` chooses how; by default a small copy of the model is cut
    and compared with the whole, which tells what is exact, or refuses the model.
    """

    def __init__(
        self,
        model: Any,
        parts: ModelStructure | None = None,
        *,
        backend: Backend | None = None,
        weights: Weights | None = None,
    ) -> None:
        self._adapted = bool(getattr(model, "peft_config", None))
        self._proved: set[int] = set()  # degrees of tensor parallel
        model = without_wrapper(model)
        refuse_unfit(model)
        self.model: PreTrainedModel = model
        self.weights = weights or RandomWeights()
        self.shortest = 1  # tokens of a slice
        self._verdict: VerifyResult | None = None
        if reason := auxiliary_loss(model.config):
            raise UnsupportedModelError(f"{type(model).__name__} cannot be cut exactly: {reason}")
        with torch.random.fork_rng(devices=[]):  # some models draw random numbers when run
            small = shrunken(model.config)
            if backend is None:
                verdict = self._verdict = check(type(model).__name__, small, kind=type(model))
                if not verdict.exact:
                    raise UnsupportedModelError(f"{verdict.model} cannot be cut exactly: {verdict.reason}")
                backend, parts, self.shortest = verdict.backend, verdict.parts, verdict.shortest
            self.parts: ModelStructure = (parts or find_structure(small_model(small, kind=type(model)))).of(model)
        self.backend = backend
        self._recomputes = model.is_gradient_checkpointing
        if self._recomputes:
            refuse_reentrant(model)
            self._check_recompute()

    def check_slices(self, shortest: int, recompute: bool) -> None:
        """Refuses what this model cannot do, before the first step."""
        name = type(self.model).__name__
        if shortest < self.shortest:
            raise UnsupportedModelError(
                f"slices of {name} must have at least {self.shortest} tokens, got one of {shortest}"
            )
        if recompute and self.backend == "cache":
            raise UnsupportedModelError(f"slices of {name} cannot be computed again; leave recomputation off")

    def check_step(self, *, documents: bool, training: bool, padded: bool) -> None:
        """Refuses a step that would not be exact, alike on all ranks and before anything is sent. ``padded``: batches
        may be shorter than they seem."""
        name = type(self.model).__name__
        if documents and (reason := self._documents_refused()):
            raise UnsupportedModelError(
                f"packed documents are not exact in {name}: {reason}; give each document its own row"
            )
        if training and (reason := untrainable(self.model)):
            raise UnsupportedModelError(f"{name} in training mode: {reason}")
        if padded and any(map(depends_on_length, self.model.modules())):
            raise UnsupportedModelError(
                f"rotary embeddings of {name} depend on the length, which vary='pad' changes; take vary='replan'"
            )

    def _documents_refused(self) -> str:
        """Where the seam was chosen by the caller, the check is made now."""
        if self._verdict is None:
            with torch.random.fork_rng(devices=[]):
                kind = type(self.model)
                self._verdict = check(kind.__name__, shrunken(self.model.config), kind=kind)
        if self._verdict.backend != self.backend:
            return f"it uses the {self.backend} backend, which was not checked with them"
        return self._verdict.documents_reason

    def recompute_layers(self) -> None:
        """Keeps only the inputs of layers: backwards compute them again, by the model's own gradient checkpointing.
        That works in training mode only; in evaluation mode all is kept."""
        self._check_recompute()
        self._recomputes = True

    def _check_recompute(self) -> None:
        """Proved on a small copy, too, which takes another second."""
        reason = "it is cut through its own cache (cache backend), which they would change a second time"
        if self.backend == "attention":
            try:
                worst = recomputed_error(shrunken(self.model.config), self.parts, type(self.model))
                reason = "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"
            except Exception as error:  # whatever a model's own code raises
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
    ) -> "Decoder":
        """With random weights, the same for the same seed however the model is split."""
        return cls(meta_model(config, dtype), backend=backend, weights=RandomWeights(seed))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, dtype: torch.dtype | None = None, *, backend: Backend | None = None
    ) -> "Decoder":
        """From a folder that ``save_pretrained`` wrote. As in transformers the model begins in evaluation mode."""
        saved = PretrainedWeights(Path(folder), dtype)
        return cls(meta_model(saved.config(), dtype), backend=backend, weights=saved)

    def planning_spec(self) -> ModelSpec:
        from terapipe.modeling.hf.shape import shape_of

        return ModelSpec(shape_of(self), self.shortest, self.backend == "attention")

    @property
    def num_layers(self) -> int:
        return len(self.model.get_submodule(self.parts.layers))  # type: ignore[arg-type]

    def products(self) -> tuple[list[float], float]:
        """How many numbers of each layer, and of what comes after them, a token is multiplied with."""
        layers = [
            sum(p.numel() * self.visited(name) for name, p in layer.named_parameters())
            for layer in self.model.get_submodule(self.parts.layers).children()
        ]
        names = (name for name, p in self.model.named_parameters(remove_duplicate=False))
        after = (name for name in names if self.parts.place(name.rpartition(".")[0]) == AFTER)
        return layers, float(sum(self.model.get_parameter(name).numel() for name in after))

    def visited(self, name: str) -> float:
        """The share of a layer's parameter that a token is multiplied with: of experts, those that it is sent to."""
        config = text_config(self.model.config)
        keys = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((n for key in keys if (n := getattr(config, key, 0))), 0)
        if not experts or ".experts." not in f".{name}.":
            return 1.0
        return float(getattr(config, "num_experts_per_tok", experts) / experts)

    @property
    def tied(self) -> tuple[str, ...]:
        return self.parts.tied

    def stage(self, first: int, last: int, device: torch.device, tp: TensorParallel | None = None) -> "DecoderStage":
        if not 0 <= first < last <= self.num_layers:
            raise ValueError(f"a stage is some of the {self.num_layers} layers, got {first} to {last}")
        if tp is not None:
            self._check_tp(tp)
        model = self.model
        if any(p.is_meta for p in model.parameters()):
            model = self.weights.fill(model, StageWeights(model, self.parts, first, last))
        with device:  # weights of zero take no memory where they are made, but would if moved there
            stage = DecoderStage(model, self.parts, first, last, self.backend, self._recomputes).to(device)
        if tp is not None:
            stage.parallelize(tp)
        return stage

    def _check_tp(self, tp: TensorParallel) -> None:
        """Refuses, on all devices that share operators alike, a plan of the model's own that is not exact."""
        degree, name = tp.mesh.size(), type(self.model).__name__
        if self._adapted:
            raise UnsupportedModelError(f"the adapters in {name} cannot be tensor parallel; take tp 1")
        refuse_uneven_heads(self.model, degree)
        if degree not in self._proved:
            cut = VerifyResult(name, self.backend, 0.0, self.shortest, "", self.parts)
            prove_tensor_parallel(cut, shrunken(self.model.config), tp.mesh)
            self._proved.add(degree)
