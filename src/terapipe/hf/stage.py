"""Some layers of a Hugging Face causal LM: the model's own forward, without the layers of other stages.

A stage is a copy of the whole model. It has its own layers only, and other modules of other stages (embedding, head,
norms) have weights of zero. With layers 2 and 3 of 6:

    its forward:     embedding -> [2 -> 3] -> norm -> head
                     zeros         real       not called
                              ^         ^
                   _inject: x from      _capture: the output
                   the stage before     for the next stage

So whatever the model does around its layers (positions, masks, rotary embeddings), it does itself. That is why any
decoder can be cut without code of its own here.

A stage is made in six steps, each a method:

    1 _copy_model      a copy that shares the model's tensors; layers of other stages become stubs, which pass on
    2 _empty_modules   weights of other stages' modules become zeros that take no memory
    3 _add_hooks       _inject and _capture, and rotary embeddings that are told the length of the batch
    4 _calls_alone     tries whether the model would call this stage's layers in the same way if there were no stubs
    5 _make_head       on the last stage: what comes after the layers (head.py), by a second call of the model with
                       layers that pass the hidden states through
    6 _drop_stubs      if step 4 saw no difference; a loop over layers that knows more of their numbers keeps them
                       (own_layers.py)

Steps 1 and 2 must come before hooks, which are put on the copy; steps 4 and 5 call the model, so they need the hooks;
and the head is made while all layers are still there, because it has to know how many there are.

For a first reading: ``__init__``, then ``_inject``, ``_capture``, ``forward`` and what it calls; stop after
``_inputs``. Steps 4 and 6 make a stage cheaper to call, not different; step 5 and most of what follows are about the
last stage's head.

The model itself is not changed: several pipelines can be made of one model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from terapipe.hf.backends import (
    NAME,
    Backend,
    StateCache,
    UnsupportedModelError,
    ViewCache,
    keep_outside,
    length_only,
)
from terapipe.hf.head import Head
from terapipe.hf.own_layers import (
    Call,
    LastLayerError,
    LayerSwap,
    OwnLayers,
    are_same,
    hidden_of,
    recording,
    wave_like,
)
from terapipe.hf.quantized import has_quantized, move_quantized
from terapipe.hf.refusals import LateCheckpointing
from terapipe.hf.rope import FixedLength, depends_on_length
from terapipe.hf.routers import FLAG, RouterLosses
from terapipe.hf.structure import (
    BEFORE,
    LAYERS,
    ModelStructure,
    PassThrough,
    is_classifier,
    owned_copy,
    stub,
    text_config,
    with_layers,
)
from terapipe.hf.tensor_parallel import parallelize
from terapipe.modeling.slice_cache import SliceCache, current_cache
from terapipe.modeling.stage import IGNORE, RandomState, Stage, TensorParallel

_PREFIX = "model."
PADDING_CHECK = "warn_if_padding_and_no_attention_mask"  # of transformers: reads token ids from the device


def _no_padding(*_: Any, **__: Any) -> None:
    """A pipeline's batches have no padding that attention must know of: no token sees those after it."""


class DecoderStage(Stage):
    """Some layers of a decoder. The module's docstring shows how it is made.

    ``Decoder.stage`` makes it, and the runtime calls it as any other ``Stage``: ``forward`` for each slice, ``logits``
    or ``loss`` on the last stage. It has no ``backward`` of its own: ``SliceCache.backward`` starts autograd from what
    ``forward`` returned. A slice of 4 tokens after 8, in a batch of 2:

        first stage   x: token ids (2, 4)            -> hidden states (2, 4, hidden size)
        others        x: hidden states (2, 4, ...)   -> hidden states (2, 4, ...)
        last stage    logits(hidden states)          -> (2, 4, vocabulary)

    The length of the sequence appears nowhere: positions 8 to 11, documents, and which keys are seen come from the
    cache.

    Args:
        model: The whole model, of which the stage shares the tensors. It may be on the meta device, but for the
            weights of this stage.
        structure: Where its layers are, and which modules come before and after them.
        first: The number of the stage's first layer.
        last: The number after that of its last layer.
        backend: What carries state between slices; None for a model that is only looked at.
        routers: Losses of routers that the stage adds sums for.
        device: Where to put it, by default where the model is.
        ends: Whether it embeds tokens, and whether it has the head, where the numbers of its layers do not tell.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        first: int,
        last: int,
        backend: Backend | None,
        routers: RouterLosses | None = None,
        device: torch.device | None = None,
        ends: tuple[bool, bool] | None = None,
    ) -> None:
        super().__init__()
        self._depth = len(list(model.get_submodule(structure.layers).children()))
        self.structure, self.first, self.last = structure, first, last
        self.is_first, self.is_last = ends or (first == 0, last == self._depth)
        self.backend, self._routers = backend, routers if first < last else None
        self.auxiliary_losses = routers.auxiliary_losses if routers else {}
        self.vocabulary = _vocabulary(model)
        self.hidden_size = int(text_config(model.config).hidden_size)
        if is_classifier(model):
            self.no_default_loss = f"{type(model).__name__} predicts no tokens; take loss_fn=losses.classification()"
        self._length: int | None = None  # tokens of the longest document, while the model is called
        self._output: Tensor | None = None  # of the last layer, in a call
        self._no_past = ViewCache(1, text_config(model.config)) if backend == "attention" else None

        self._copy_model(model)
        self.is_quantized = has_quantized(self.model)
        device = model.device if device is None else device
        with device:  # zeros that take no memory would take some when moved
            self._empty_modules()
        move_quantized(self.model, device)
        self.to(device)
        self._add_hooks()
        every, own = self._layers_by_number()
        calls: dict[int, Call] = {}
        self.has_own_layers_only = bool(own) and self._calls_alone(every, own, calls)
        self._head: Head | None = None
        self.__dict__["_lone_head"] = None  # not listed a second time among modules
        if self.is_last:
            self._make_head(every, own, calls)
        if self.has_own_layers_only:
            self._drop_stubs(own)

    # Making a stage, step by step

    def _copy_model(self, model: PreTrainedModel) -> None:
        """Sets ``self.model``: modules and configuration of its own, the model's tensors, stubs for others' layers."""
        pass_input = PassThrough(self.structure.returns)

        def own_or_stub(i: int, layer: nn.Module) -> nn.Module:
            return layer if self.first <= i < self.last else stub(layer, pass_input)

        self.model: Any = with_layers(owned_copy(model), self.structure.layers, own_or_stub)
        if hasattr(text_config(self.model.config), FLAG):  # asked for where layers are called
            setattr(text_config(self.model.config), FLAG, False)
        if self.backend == "attention":
            self.model.set_attn_implementation(NAME)
        self.training = self.model.training
        self._late_checkpointing = LateCheckpointing(model, self.model)
        embedding: Any = self.model.get_input_embeddings()
        self._width = int(getattr(embedding, "embedding_dim", None) or embedding.weight.shape[-1])
        for module in self.model.modules():
            if hasattr(module, PADDING_CHECK):
                setattr(module, PADDING_CHECK, _no_padding)

    def _empty_modules(self) -> None:
        """Replaces parameters of other stages' modules, also those of adapters, by zeros that take no memory."""
        for name, module in self.model.named_modules():
            weights = {k: p for k, p in module._parameters.items() if p is not None}
            if not weights or self._holds(self.structure.place(name)):
                continue
            module._parameters = {k: None for k in module._parameters if k not in weights}
            zeros = {k: torch.zeros((), dtype=p.dtype).expand(p.shape) for k, p in weights.items()}
            module._buffers.update(zeros)
            module._non_persistent_buffers_set |= zeros.keys()

    def _holds(self, place: str) -> bool:
        """Whether modules at this place of the forward (before, layers, after) are this stage's."""
        return place == LAYERS or (self.is_first if place == BEFORE else self.is_last)

    def _add_hooks(self) -> None:
        """Where the stage's layers begin and end, and on rotary embeddings, which must not take a slice's length."""
        for module in self.model.modules():
            if depends_on_length(module):
                FixedLength(module, self._rope_length)
        layers = self.blocks
        if not layers:
            every = self.model.get_submodule(self.structure.layers)
            every[0].register_forward_pre_hook(self._take_embedded, with_kwargs=True)
            return
        if not self.is_first:
            # Before hooks that the model has: they must see it.
            layers[0].register_forward_pre_hook(self._inject, prepend=True, with_kwargs=True)
        layers[-1].register_forward_hook(self._capture)

    def _layers_by_number(self) -> tuple[dict[int, nn.Module], dict[int, nn.Module]]:
        """All layers, of which those of other stages are stubs, and the stage's own."""
        every = {int(i): layer for i, layer in self.model.get_submodule(self.structure.layers)._modules.items()}
        return every, {i: layer for i, layer in every.items() if self.first <= i < self.last}

    def _calls_alone(
        self, every: Mapping[int, nn.Module], own: Mapping[int, nn.Module], calls: dict[int, Call]
    ) -> bool:
        """Whether layers are called with the same arguments if there are no others, in a first slice and a later one.

        Both lists of layers are stubs that note what they are called with, so this costs what the model does around its
        layers. With layers 2 and 3 of 6, the calls that are compared:

            all       stub 0 -> stub 1 -> note 2 -> note 3 -> stub 4 -> stub 5
            alone                         note 2 -> note 3                       with a configuration of 2 layers

        A model whose loop gives even layers another mask, say, would call layer 2 as if it were the first.

        Args:
            every: All layers by number.
            own: The stage's own.
            calls: Gets the arguments of the last call of each own layer.
        """
        passing, returns = PassThrough(self.structure.returns), self.structure.returns
        stubs = {i: stub(layer, passing) for i, layer in every.items()}
        alone: dict[int, Call] = {}
        lists = OwnLayers(stubs | recording(own, returns, calls)), OwnLayers(recording(own, returns, alone))
        for context in (0, 3) if self.backend == "attention" else (0,):
            try:
                for layers in lists:
                    self._try(layers, context)
            except Exception:  # whatever the model's own code raises
                return False
            if calls.keys() != own.keys() or not are_same(calls, alone):
                return False
        return True

    @torch.no_grad()
    def _try(self, layers: OwnLayers, context: int) -> None:
        """Calls the model with two tokens after ``context`` ones, and with stubs for layers. Nothing changes by it."""
        p, dtype, cache = next(self.parameters()), self._dtype, self.make_cache(1, context + 2)
        cache.begin(context, 2)
        x = torch.zeros(1, 2, dtype=torch.int64) if self.is_first else torch.zeros(self.hidden_shape(1, 2)).to(dtype)
        with self._calling(cache.longest), RandomState.now(p.device).restored(), self._swap(layers).applied():
            inputs = self._inputs(x.to(p.device), cache)
            inputs.pop(FLAG, None)  # stubs have no routers
            if not self.is_first:  # nothing would show what the model does with zeros
                inputs["inputs_embeds"] = wave_like(inputs["inputs_embeds"])
            self._base(**inputs)

    def _make_head(
        self, every: Mapping[int, nn.Module], own: Mapping[int, nn.Module], calls: Mapping[int, Call]
    ) -> None:
        """Sets ``self._head``, with as few layers as give the same logits.

        Args:
            every: All layers by number.
            own: The stage's own.
            calls: Of own layers, as ``_calls_alone`` noted them: for the shape and dtype of hidden states.
        """
        self._head = Head(self.model, self.structure, every, self._depth)
        if self.has_own_layers_only or not own:
            zeros = torch.zeros(self.hidden_shape(1, 2)).to(next(self.parameters()).device, self._dtype)
            like = hidden_of(*calls[self.last - 1]) if own else zeros
            with suppress(Exception):  # whatever the model's own code raises: the head then stays as it is
                self._use_smaller_head(every[self.last - 1], like)

    def _use_smaller_head(self, layer: nn.Module, like: Tensor) -> None:
        """Replaces the head by one with a single layer in place of all, if that gives the same logits.

        Its calls then cost the host one stub in place of all, and the norm and the head can be called alone
        (``Head.shorten``). The last layer is the one that stays: models may ask it, and no other, for its kind.
        """
        few = Head(self.model, self.structure, {self.last - 1: layer}, self._depth)
        hidden = wave_like(like)
        state, logits = RandomState.now(like.device), []
        for head in (self._head, few):
            assert head is not None
            with torch.no_grad(), state.restored(), self._calling_head(hidden) as inputs:
                logits.append(head(hidden, **inputs))
        if are_same(*logits):
            self._head = few
            with self._calling_head(hidden) as inputs:
                few.shorten(hidden, **inputs)

    def _drop_stubs(self, own: Mapping[int, nn.Module]) -> None:
        """Leaves the stage's own layers only in its model: a call of 80 stubs takes longer than a small layer."""
        self._swap(OwnLayers(own, self._end_forward)).apply()

    def _swap(self, layers: OwnLayers) -> LayerSwap:
        return LayerSwap(self.model, self.structure.layers, layers, self._depth)

    # Hooks inside the model

    def _end_forward(self) -> None:
        """After the loop over layers. What the model does then is the last stage's, which does it in its head.

        Not with the cache backend, where models count tokens after their layers; nor where routers' logits are wanted,
        which the forward returns at its end.
        """
        if self._output is not None and self.backend == "attention" and self._routers is None:
            raise LastLayerError

    def _inject(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Gives the first layer what the stage before sent, in place of what the model computed from zeros.

        A pre-hook with arguments by position and by name, as torch calls it: models pass hidden states either way.
        """
        # From the cache, and not from an attribute that forward sets: a layer may be recomputed in a backward, long
        # after that call.
        cache = current_cache()
        assert isinstance(cache, StateCache | ViewCache)
        received = cache.inputs[cache.context]
        if "hidden_states" in named:
            return arguments, {**named, "hidden_states": received}
        return (received, *arguments[1:]), named

    def _take_embedded(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """On a stage that is the embedding alone: what the first layer would get is the stage's output."""
        self._output = arguments[0] if arguments else named["hidden_states"]
        raise LastLayerError

    def _capture(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Notes what the last layer returns: what ``forward`` returns."""
        if self._length is not None:  # not in a recomputation, whose output nobody takes
            self._output = output[0] if isinstance(output, tuple) else output

    def _rope_length(self) -> int | None:
        """Frequencies are those of the longest document of the batch, as in transformers, whatever the slice."""
        return self._length

    def parallelize(self, tp: TensorParallel) -> None:
        """Splits weights over the ranks of a mesh, by the model's own plan.

        Args:
            tp: The mesh. All its ranks call this together, once, right after the stage was made.
        """
        parallelize(self.model, self.structure, tp.mesh)

    def wrap_compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a layer's compiled forward so that attention runs outside of the graph (see compiling.py).

        Layers get a cache that tells only its length, as one with a list of layers would be compiled for each layer.

        Args:
            forward: The compiled one.
        """
        if self.backend == "cache":
            raise UnsupportedModelError(
                f"layers of {type(self.model).__name__} cannot be compiled: they change the model's own cache (cache "
                "backend); leave compiling off"
            )
        if self.is_quantized:
            raise UnsupportedModelError(
                f"quantized layers of {type(self.model).__name__} were not verified compiled; leave compiling off"
            )
        keep_outside()

        def call(*arguments: Any, **named: Any) -> Any:
            return forward(*map(length_only, arguments), **{name: length_only(x) for name, x in named.items()})

        return call

    # As a Stage

    @property
    def blocks(self) -> list[nn.Module]:
        """The stage's own layers: what is compiled, sharded and checkpointed one by one."""
        layers = self.model.get_submodule(self.structure.layers)._modules
        return [layers[str(i)] for i in range(self.first, self.last)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves or casts the stage, as ``to``, ``double`` and the like ask, and notes its new dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dtype = self._find_dtype()
        return self

    def _find_dtype(self) -> torch.dtype:
        """The dtype of hidden states: that of the weights. Of a quantized model, that of the embedding's, which every
        stage has, if only as zeros: its other weights are whole numbers, and adapters may be wider."""
        if not self.is_quantized:
            return next(self.parameters()).dtype
        embedding: Any = self.model.get_input_embeddings()
        weight: Tensor = getattr(embedding, "base_layer", embedding).weight
        return weight.dtype

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of hidden states, without autocast."""
        return self._dtype

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        """Hidden states of a slice, (rows, tokens, hidden size), by the stage's layers.

        It calls the part of the model that calls the layers, not the whole model: so no head is computed. That part is
        left as soon as the last layer has returned (``_end_forward``).

        Args:
            x: Token ids (rows, tokens) on the first stage, else hidden states from the stage before.
            cache: One that ``make_cache`` made, at the slice that ``begin`` named.
        """
        self._late_checkpointing.refuse()
        assert isinstance(cache, StateCache | ViewCache)
        out: Any = None
        cache.inputs[cache.context] = x
        if self.first == self.last and self.is_last:  # the head alone, which is not called here
            return x
        with self._calling(cache.longest):
            inputs = self._inputs(x, cache)
            with cache, suppress(LastLayerError):
                out = self._base(**inputs)
            hidden = self._output
        if isinstance(cache, StateCache):
            cache.detach_states()
        elif sum(cache.current.calls.values()) < self.last - self.first:
            raise UnsupportedModelError("some layers do not take their attention from transformers' interface")
        if self._routers is not None:
            self._routers.add(out.router_logits, cache)
        assert hidden is not None
        return hidden

    @contextmanager
    def _calling(self, length: int) -> Iterator[None]:
        """Around a call of the model, for the hooks inside it: rotary embeddings are asked for ``length`` tokens."""
        self._length = length
        try:
            yield
        finally:
            self._length = self._output = None

    @property
    def _base(self) -> Any:
        """The part of the model that calls the layers."""
        return self.model.get_submodule(self.structure.layers.partition(".")[0])

    def _inputs(self, x: Tensor, cache: StateCache | ViewCache) -> dict[str, Any]:
        """What the model is called with for the cache's current slice. Zeros stand for hidden states until the first
        layer, as a model that is given hidden states takes them for embeddings, and may scale or project them."""
        inputs: dict[str, Any] = {"input_ids": x} if self.is_first else {"inputs_embeds": self._zeros(x)}
        inputs |= self._positions(cache, x)
        if self._routers is not None:
            inputs[FLAG] = True
        return inputs | {"past_key_values": cache.states(), "use_cache": isinstance(cache, StateCache)}

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (rows, tokens, vocabulary), at least in float32, by all that the model does after its layers: norms,
        the head, scaling, softcaps.

        Args:
            hidden: What ``forward`` of the last stage returned, or some of its tokens.
        """
        assert self._head is not None
        with self._calling_head(hidden) as inputs:
            logits = self._head(hidden, **inputs)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def before_head(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        """The input of the head's linear layer, and that layer: for losses that take logits piece by piece.

        Args:
            hidden: What ``forward`` of the last stage returned.
        """
        assert self._head is not None
        head = self._head_alone()
        with self._calling_head(hidden) as inputs:
            return self._head.before(hidden, head, **inputs), head

    @contextmanager
    def _calling_head(self, hidden: Tensor) -> Iterator[dict[str, Any]]:
        """Around a call of the head. Yields the inputs that the model needs besides hidden states, for as many tokens.
        Which positions they have does not matter to what comes after the layers."""
        inputs: dict[str, Any] = {"inputs_embeds": self._zeros(hidden)}
        if self.structure.takes_positions:
            inputs["position_ids"] = torch.arange(hidden.shape[1], device=hidden.device)[None]
        if self._no_past is not None:  # without a cache, transformers looks for packed documents in the positions
            inputs["past_key_values"] = self._no_past.states()
        with self._calling(hidden.shape[1]):
            yield inputs

    def _head_alone(self) -> nn.Module:
        """The head, if logits are what it makes and no more: seen with two random tokens, once."""
        if self._lone_head is not None:
            return cast(nn.Module, self._lone_head)
        assert self._head is not None
        head: Any = self.model.score if is_classifier(self.model) else self.model.get_output_embeddings()
        p = next(self.parameters())
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            hidden = torch.randn(self.hidden_shape(1, 2)).to(p.device, self._dtype)
            with self._calling_head(hidden) as inputs:
                alone = head(self._head.before(hidden, head, **inputs)) if isinstance(head, nn.Linear) else None
            logits = self.logits(hidden)
        if alone is None or not torch.allclose(alone.to(logits.dtype), logits, rtol=1e-4, atol=1e-5):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} changes logits after its head (a scale or softcap), or its head is not "
                "an nn.Linear, so a loss of hidden states would leave that out; take a loss of logits"
            )
        self.__dict__["_lone_head"] = head
        return head

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of the cross-entropies of a slice's tokens; the caller divides by the number of labels that count.

        Args:
            hidden: What ``forward`` of the last stage returned.
            labels: The token to predict at each place, (rows, tokens); -100 where none counts.
        """
        return loss_of(self.logits(hidden), labels, self.model)

    def _zeros(self, like: Tensor) -> Tensor:
        """Embeddings of as many tokens: the model wants some, and its first layer here gets others."""
        return torch.zeros(*like.shape[:2], self._width, dtype=self._dtype, device=like.device)

    def _positions(self, cache: SliceCache, x: Tensor) -> dict[str, Tensor]:
        """Position ids of the slice's tokens in their documents, (rows, tokens), if the model takes any."""
        if not self.structure.takes_positions:
            if cache.has_documents:
                raise UnsupportedModelError(
                    "the model takes no positions, which must restart with documents; give each its row"
                )
            return {}
        return {"position_ids": cache.positions(x.device).expand(x.shape[0], -1)}

    def make_cache(self, size: int, seq_len: int) -> StateCache | ViewCache:
        """An empty cache for one microbatch, of the kind that the backend needs.

        Args:
            size: Sequences of the microbatch.
            seq_len: Tokens of each.
        """
        config = text_config(self.model.config)
        if self.backend == "attention":
            return ViewCache(seq_len, config)
        return StateCache(seq_len, config, range(self.first, self.last))

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """Parameters and buffers under their names in the whole model, so that checkpoints fit any split."""
        return {name.removeprefix(_PREFIX): value for name, value in super().state_dict(*arguments, **named).items()}

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their names in the whole model."""
        for name, parameter in super().named_parameters(*arguments, **named):
            yield name.removeprefix(_PREFIX), parameter


def loss_of(logits: Tensor, labels: Tensor, model: PreTrainedModel) -> Tensor:
    """The sum of the losses of all labels that count.

    A classifier has no labels at its tokens: its scores are compared with those of a check, by their squared
    differences, which are not zero for a single class either.

    Args:
        logits: Of each token, (rows, tokens, vocabulary or classes).
        labels: Of each token, (rows, tokens); -100 where none counts.
        model: Whose kind says which loss it is.
    """
    if is_classifier(model):
        counted = (labels != IGNORE)[..., None]
        return ((logits - labels[..., None]).square() * counted).sum()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def _vocabulary(model: PreTrainedModel) -> tuple[int | None, int | None]:
    """The rows of embedding and head, if they are matrices."""
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return _rows(ends[0]), _rows(ends[1])


def _rows(module: nn.Module | None) -> int | None:
    """Counts the rows of an embedding's or a head's weight, also below an adapter. None if it has no such weight."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else None
