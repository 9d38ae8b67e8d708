"""Some layers of a Hugging Face causal LM: the model's own forward, with other stages' layers left out.

Each stage is the whole model, hollowed out, in modules of its own: layers it does not hold hand on what they get, other
modules it does not hold have weights of zero. The model it is made of shares its tensors with it and is left as it was,
so that several pipelines can be made of one model. What the stage before sent is put in front of its first layer, and
what its last layer gives is taken: whatever the model does around its layers, it does itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from terapipe.modeling.cache import SliceCache
from terapipe.modeling.hf.attention_backend import (
    NAME,
    Backend,
    UnsupportedModelError,
    computing,
    current,
    keep_outside,
)
from terapipe.modeling.hf.cache_backend import StateCache, ViewCache, told
from terapipe.modeling.hf.refusals import LateCheckpointing
from terapipe.modeling.hf.rope import depends_on_length, forgotten, remember
from terapipe.modeling.hf.structure import (
    BEFORE,
    LAYERS,
    ModelStructure,
    PassThrough,
    owned_copy,
    stub,
    text_config,
    with_layers,
)
from terapipe.modeling.hf.tensor_parallel import parallelize
from terapipe.modeling.stage import IGNORE, TensorParallel

_PREFIX = "model."


def _rows(module: nn.Module | None) -> int | None:
    """Of the weight of an embedding or a head, or of what an adapter wraps; None if it has another form."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else None


class DecoderStage(nn.Module):
    def __init__(
        self,
        model: PreTrainedModel,
        parts: ModelStructure,
        first: int,
        last: int,
        backend: Backend | None,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.backend = backend
        ends: Any = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._vocabulary = _rows(ends[0]), _rows(ends[1])
        self.parts, self.first, self.last = parts, first, last
        self.is_first, self.is_last = first == 0, last == len(model.get_submodule(parts.layers))  # type: ignore[arg-type]
        idle = PassThrough(parts.returns)
        self.model: Any = with_layers(
            owned_copy(model), parts.layers, lambda i, layer: layer if first <= i < last else stub(layer, idle)
        )
        if backend == "attention":
            self.model.set_attn_implementation(NAME)
        if recomputes and not self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self._late = LateCheckpointing(model, self.model)
        embedding: Any = self.model.get_input_embeddings()
        self._width = int(getattr(embedding, "embedding_dim", None) or embedding.weight.shape[-1])
        self._empty_modules()
        self._given: Tensor | None = None
        self._taken: Tensor | None = None
        self._length: int | None = None  # of the longest document of the batch, while a slice is computed
        self._remembered: dict[str, Any] = {}
        for module in self.model.modules():
            if depends_on_length(module):
                module.register_forward_pre_hook(self._rotate_by_length, with_kwargs=True)
                module.register_forward_hook(self._take_asked_places)
        owned = self.blocks
        if not self.is_first:
            owned[0].register_forward_pre_hook(self._inject, with_kwargs=True)
        owned[-1].register_forward_hook(self._capture)
        if self.is_last:
            given = PassThrough(parts.returns, lambda: self._given)
            # Not a child of this module: it shares its children.
            self.__dict__["_end"] = with_layers(self.model, parts.layers, lambda i, layer: stub(layer, given))

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.parts.layers))[self.first : self.last]

    def _empty_modules(self) -> None:
        """Weights of zero, which take no memory, in modules that other stages hold, and in what adapters put there."""
        for name, module in self.model.named_modules():
            weights = {k: p for k, p in module._parameters.items() if p is not None}
            if not weights or self._holds(self.parts.place(name)):
                continue
            module._parameters = {k: None for k in module._parameters if k not in weights}
            zeros = {k: torch.zeros((), dtype=p.dtype).expand(p.shape) for k, p in weights.items()}
            module._buffers.update(zeros)
            module._non_persistent_buffers_set |= zeros.keys()

    def _holds(self, place: str) -> bool:
        return place == LAYERS or (self.is_first if place == BEFORE else self.is_last)

    def _inject(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # Where a layer is computed again during a backward, what it was given the first time is in the cache.
        given = self._given if self._given is not None else current().inputs[current().context]
        if "hidden_states" in named:
            return arguments, {**named, "hidden_states": given}
        return (given, *arguments[1:]), named

    def _capture(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._given is not None:
            self._taken = output[0] if isinstance(output, tuple) else output

    def _rotate_by_length(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Rotary embeddings that depend on the sequence's length are those of the longest document of the batch, as in
        transformers: it is told as one more place. Lengths seen before, which the module remembers, do not count."""
        if self._length is None:
            return arguments, named
        self._remembered = forgotten(module)
        at = "position_ids" in named
        places = named["position_ids"] if at else arguments[1]
        last = torch.full_like(places[..., :1], self._length - 1)
        places = torch.cat([places, last], -1)
        return (arguments, {**named, "position_ids": places}) if at else ((arguments[0], places, *arguments[2:]), named)

    def _take_asked_places(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        if self._length is None:
            return None
        remember(module, self._remembered)
        tables = output if isinstance(output, tuple) else (output,)
        asked = tuple(table[..., :-1, :] for table in tables)
        return asked if isinstance(output, tuple) else asked[0]

    def parallelize(self, tp: TensorParallel) -> None:
        """Tensor parallel, by the model's own plan."""
        parallelize(self.model, self.parts, tp.mesh)

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in place of a layer's forward that was compiled: see compiling.py."""
        if self.backend == "cache":
            raise UnsupportedModelError(
                f"layers of {type(self.model).__name__} cannot be compiled: they change the model's own cache (cache "
                "backend); leave compiling off"
            )
        keep_outside()
        return lambda *given, **named: forward(*map(told, given), **{name: told(x) for name, x in named.items()})

    # As a Stage

    @property
    def vocabulary(self) -> tuple[int | None, int | None]:
        return self._vocabulary

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        self._late.refuse()
        base = self.model.get_submodule(self.parts.layers.partition(".")[0])
        self._given, self._length = x, cache.longest
        size, length = x.shape[:2]
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": self._zeros(size, length, x)}
        if isinstance(cache, StateCache):
            base(**inputs, **self._places(cache, x), past_key_values=cache.states(), use_cache=True)
            cache.cut()
        else:
            assert isinstance(cache, ViewCache)
            cache.inputs[cache.context] = x
            with computing(cache) as calls:
                base(**inputs, **self._places(cache, x), past_key_values=cache.states(), use_cache=False)
            if sum(calls.values()) < self.last - self.first:
                raise UnsupportedModelError("some layers do not take their attention from transformers' interface")
        taken, self._given, self._taken, self._length = self._taken, None, None, None
        assert taken is not None
        return taken

    def logits(self, hidden: Tensor) -> Tensor:
        """By all that the model itself does after its layers: scaling, softcaps and the like too."""
        self._given, self._length = hidden, hidden.shape[1]
        zeros = self._zeros(hidden.shape[0], hidden.shape[1], hidden)
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        positions = {"position_ids": places} if self.parts.takes_positions else {}
        logits: Tensor = self.__dict__["_end"](inputs_embeds=zeros, use_cache=False, **positions).logits
        self._given, self._length = None, None
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def _zeros(self, size: int, length: int, like: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        return torch.zeros(size, length, self._width, dtype=dtype, device=like.device)

    def _places(self, cache: SliceCache, x: Tensor) -> dict[str, Tensor]:
        if not self.parts.takes_positions:
            if cache.has_documents:
                raise UnsupportedModelError(
                    "the model takes no positions, which must restart with documents; give each its row"
                )
            return {}
        return {"position_ids": cache.positions(x.device).expand(x.shape[0], -1)}

    def make_cache(self, size: int, seq_len: int) -> SliceCache:
        config = text_config(self.model.config)
        return (
            ViewCache(seq_len, config)
            if self.backend == "attention"
            else StateCache(seq_len, config, range(self.first, self.last))
        )

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        return (size, length, int(text_config(self.model.config).hidden_size))

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name.removeprefix(_PREFIX): value for name, value in super().state_dict(*arguments, **named).items()}

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under their names in the whole model."""
        for name, parameter in super().named_parameters(*arguments, **named):
            yield name.removeprefix(_PREFIX), parameter
