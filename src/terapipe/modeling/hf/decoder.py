"""Any Hugging Face causal LM, to be taken apart by a ``Pipeline``."""

from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from terapipe.modeling.hf.adapters import without_wrapper
from terapipe.modeling.hf.anatomy import AFTER, Anatomy, anatomy, text_config
from terapipe.modeling.hf.build import Drawn, Saved, Share, Weights, skeleton
from terapipe.modeling.hf.check import BOUND, Verdict, check, recomputed_error
from terapipe.modeling.hf.randomness import auxiliary_loss, untrainable
from terapipe.modeling.hf.refusals import refuse_reentrant, refuse_unfit
from terapipe.modeling.hf.rope import depends_on_length
from terapipe.modeling.hf.seam import RefusedError
from terapipe.modeling.hf.shrink import shrunken, small_model
from terapipe.modeling.hf.stage import DecoderStage
from terapipe.modeling.hf.tensor_check import prove_tensor_parallel
from terapipe.modeling.hf.tensor_parallel import refuse_uneven_heads
from terapipe.modeling.stage import Split


class Decoder:
    """A causal LM that a ``Pipeline`` can take apart.

    Stages share the weights of a model that has them, and leave it as it is otherwise; pass a model in the mode,
    training or evaluation, that stages shall begin with. Of one on the meta device, as the two ways to make one below
    build it, each stage makes its own part real. ``fast`` chooses the seam; by default a small copy of the model is cut
    and compared with the whole, which tells what is exact, or refuses the model.
    """

    def __init__(
        self,
        model: Any,
        parts: Anatomy | None = None,
        *,
        fast: bool | None = None,
        weights: Weights | None = None,
    ) -> None:
        self._adapted = bool(getattr(model, "peft_config", None))
        self._proved: set[int] = set()  # degrees of tensor parallel
        model = without_wrapper(model)
        refuse_unfit(model)
        self.model: PreTrainedModel = model
        self.weights = weights or Drawn()
        self.shortest = 1  # tokens of a slice
        self._verdict: Verdict | None = None
        if reason := auxiliary_loss(model.config):
            raise RefusedError(f"{type(model).__name__} cannot be cut exactly: {reason}")
        with torch.random.fork_rng(devices=[]):  # some models draw random numbers when run
            small = shrunken(model.config)
            if fast is None:
                verdict = self._verdict = check(type(model).__name__, small, kind=type(model))
                if not verdict.exact:
                    raise RefusedError(f"{verdict.model} cannot be cut exactly: {verdict.reason}")
                fast, parts, self.shortest = verdict.seam == "fast", verdict.parts, verdict.shortest
            self.parts: Anatomy = (parts or anatomy(small_model(small, kind=type(model)))).of(model)
        self.fast = fast
        self._recomputes = model.is_gradient_checkpointing
        if self._recomputes:
            refuse_reentrant(model)
            self._check_recompute()

    def check_slices(self, shortest: int, recompute: bool) -> None:
        """Refuses what this model cannot do, before the first step."""
        name = type(self.model).__name__
        if shortest < self.shortest:
            raise RefusedError(f"slices of {name} must have at least {self.shortest} tokens, got one of {shortest}")
        if recompute and not self.fast:
            raise RefusedError(f"slices of {name} cannot be computed again; leave recomputation off")

    def check_step(self, *, documents: bool, training: bool, padded: bool) -> None:
        """Refuses a step that would not be exact, alike on all ranks and before anything is sent. ``padded``: batches
        may be shorter than they seem."""
        name = type(self.model).__name__
        if documents and (reason := self._documents_refused()):
            raise RefusedError(f"packed documents are not exact in {name}: {reason}; give each document its own row")
        if training and (reason := untrainable(self.model)):
            raise RefusedError(f"{name} in training mode: {reason}")
        if padded and any(map(depends_on_length, self.model.modules())):
            raise RefusedError(
                f"rotary embeddings of {name} depend on the length, which vary='pad' changes; take vary='replan'"
            )

    def _documents_refused(self) -> str:
        """Where the seam was chosen by the caller, the check is made now."""
        if self._verdict is None:
            with torch.random.fork_rng(devices=[]):
                kind = type(self.model)
                self._verdict = check(kind.__name__, shrunken(self.model.config), kind=kind)
        if self._verdict.seam != self.seam:
            return f"it is cut by the {self.seam} seam, which was not checked with them"
        return self._verdict.documents_reason

    def recompute_layers(self) -> None:
        """Keeps only the inputs of layers: backwards compute them again, by the model's own gradient checkpointing.
        That works in training mode only; in evaluation mode all is kept."""
        self._check_recompute()
        self._recomputes = True

    def _check_recompute(self) -> None:
        """Proved on a small copy, too, which takes another second."""
        reason = "it is cut through its own cache (general seam), which they would change a second time"
        if self.fast:
            try:
                worst = recomputed_error(shrunken(self.model.config), self.parts, type(self.model))
                reason = "" if worst <= BOUND else f"gradients of a small copy differ by {worst:.1e}"
            except Exception as error:  # whatever a model's own code raises
                reason = str(error)
        if reason:
            raise RefusedError(
                f"layers of {type(self.model).__name__} cannot be computed again: {reason}; leave gradient "
                "checkpointing off"
            )

    @property
    def seam(self) -> str:
        return "fast" if self.fast else "general"

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, seed: int = 0, dtype: torch.dtype | None = None, *, fast: bool | None = None
    ) -> "Decoder":
        """With random weights, the same for the same seed however the model is split."""
        return cls(skeleton(config, dtype), fast=fast, weights=Drawn(seed))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, dtype: torch.dtype | None = None, *, fast: bool | None = None
    ) -> "Decoder":
        """From a folder that ``save_pretrained`` wrote. As in transformers the model begins in evaluation mode."""
        saved = Saved(Path(folder), dtype)
        return cls(skeleton(saved.config(), dtype), fast=fast, weights=saved)

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

    def stage(self, first: int, last: int, device: torch.device, split: Split | None = None) -> "DecoderStage":
        if not 0 <= first < last <= self.num_layers:
            raise ValueError(f"a stage is some of the {self.num_layers} layers, got {first} to {last}")
        if split is not None:
            self._check_split(split)
        model = self.model
        if any(p.is_meta for p in model.parameters()):
            model = self.weights.fill(model, Share(model, self.parts, first, last))
        with device:  # weights of zero take no memory where they are made, but would if moved there
            stage = DecoderStage(model, self.parts, first, last, self.fast, self._recomputes).to(device)
        if split is not None:
            stage.split(split)
        return stage

    def _check_split(self, split: Split) -> None:
        """Refuses, on all devices that share operators alike, a plan of the model's own that is not exact."""
        degree, name = split.mesh.size(), type(self.model).__name__
        if self._adapted:
            raise RefusedError(f"the adapters in {name} cannot be split over devices; take tensor 1")
        refuse_uneven_heads(self.model, degree)
        if degree not in self._proved:
            seam = Verdict(name, self.seam, 0.0, self.shortest, "", self.parts)
            prove_tensor_parallel(seam, shrunken(self.model.config), split.mesh)
            self._proved.add(degree)
