"""What a Hugging Face model does after its layers: norms, the head, scales and softcaps.

It is the model's own forward, with layers that pass given hidden states through:

    model.forward:   embedding -> [pass] -> norm -> head -> logits
                     zeros        hidden    real

Most of that is a preparation for layers that are not there (positions, masks, rotary embeddings). Where the part of the
model that calls the layers only hands on what modules make of the last layer's output, those modules are called in its
place: then a head costs the host what its own operations cost.

    LlamaForCausalLM.forward
        self.model(...)          LlamaModel: positions, masks, rotary embeddings, layers, norm    <- replaced by _Tail
        self.lm_head(hidden)     as it is: slices of tokens, scales and softcaps stand around it

A ``_Tail`` is the list of modules (here: the norm) that ``_Watch`` saw the hidden states go through, one after the
other. If anything else happened to them, an addition, say, then the tensor that came out is not the one that the last
module returned, and the head stays with the model's whole forward.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.utils.generic import ModelOutput

from terapipe.hf.own_layers import LayerSwap, OwnLayers
from terapipe.hf.structure import ModelStructure, PassThrough, stub, token_logits
from terapipe.modeling.stage import RandomState

LAST = "last_hidden_state"


class Head:
    """From hidden states of the last layer, (rows, tokens, hidden size), to logits, (rows, tokens, vocabulary).

    Not a Module: it shares its modules with the stage's model, and a stage must not list them twice.

    Args:
        model: The stage's copy of the model.
        structure: Where its layers are.
        layers: All layers of the model by number, or some, if that is the same for what comes after them. They are
            replaced by stubs while the head is called.
        depth: How many layers the whole model has: its forward may ask.
    """

    def __init__(
        self, model: nn.Module, structure: ModelStructure, layers: Mapping[int, nn.Module], depth: int
    ) -> None:
        self._model: Any = model
        self._path = structure.layers
        self._hidden: Tensor | None = None
        passing = PassThrough(structure.returns, self._get_hidden)
        stubs = OwnLayers({number: stub(layer, passing) for number, layer in layers.items()})
        self._swap = LayerSwap(model, structure.layers, stubs, depth)
        self._tail: _Tail | None = None

    def _get_hidden(self) -> Tensor | None:
        return self._hidden

    def __call__(self, hidden: Tensor, **inputs: Any) -> Tensor:
        """Logits at each token.

        Args:
            hidden: What the last layer returned.
            **inputs: What the model's forward needs besides: embeddings of zeros, positions, an empty cache.
        """
        self._hidden = hidden
        try:
            with self._swap.applied() if self._tail is None else self._tail.in_place(self._model, hidden):
                return token_logits(self._model, use_cache=False, **inputs)
        finally:
            self._hidden = None

    def before(self, hidden: Tensor, head: nn.Module, **inputs: Any) -> Tensor:
        """Computes what the model would call its head with, without running the head.

        Losses that never make all logits at once (fused cross-entropy) multiply with the head's weight themselves.

        Args:
            hidden: What the last layer returned.
            head: The module whose first argument is wanted.
            **inputs: As in a call.
        """
        inputs_of_head: list[Tensor] = []

        def take(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
            inputs_of_head.append(arguments[0])
            return (arguments[0][..., :0, :],)  # without tokens its product costs nothing

        hook = head.register_forward_pre_hook(take)
        try:
            self(hidden, **inputs)
        finally:
            hook.remove()
        return inputs_of_head[0]

    def shorten(self, hidden: Tensor, **inputs: Any) -> None:
        """From now on calls only the modules after the layers, if in training and in evaluation the part of the model
        that calls layers hands on the very tensor that these modules make, and nothing else.

        Args:
            hidden: An example.
            **inputs: As in a call.
        """
        modes, state = {m: m.training for m in self._model.modules()}, RandomState.now(hidden.device)
        tails: list[_Tail | None] = []
        try:
            for training in (True, False):
                self._model.train(training)
                with torch.no_grad(), state.restored():
                    tails.append(self._find_tail(hidden, **inputs))
        finally:
            for module, mode in modes.items():
                module.training = mode
        first, second = tails
        if first is not None and second is not None and first.modules == second.modules:
            self._tail = first

    def _find_tail(self, hidden: Tensor, **inputs: Any) -> "_Tail | None":
        """The modules after the layers, seen in one call in the model's present mode; None if there is more to it."""
        around, _, name = self._path.rpartition(".")
        holder = self._model.get_submodule(around)
        inner = [m for key, child in holder.named_children() if key != name for m in child.modules()]
        watch = _Watch(hidden)
        handles = [handle for module in inner for handle in watch.inside(module)]
        handles.append(holder.register_forward_hook(watch.end))
        try:
            self(hidden, **inputs)
        finally:
            for handle in handles:
                handle.remove()
        return _Tail(around, tuple(watch.modules), watch.output) if watch.is_simple else None


class _Watch:
    """Follows a tensor through the modules that are called with it, one after the other.

        hidden --norm--> a --dropout--> b      modules = [norm, dropout], and the model returns b itself: simple
        hidden --norm--> a --> 2 * a           the model returns a tensor that no module made: not simple

    Tensors are compared by identity and version, so a change in place between two modules is noticed.

    Args:
        hidden: The tensor that the last stub returns.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.modules: list[nn.Module] = []
        self.output: Any = None
        self.is_simple = False
        self._now: Any = hidden
        self._version = hidden._version  # which changes if somebody changes the tensor in place
        self._inside: list[nn.Module] = []  # modules whose forward is running, the outermost first

    def inside(self, module: nn.Module) -> Iterator[Any]:
        """Registers hooks on a module between layers and the end, and yields their handles."""
        yield module.register_forward_pre_hook(self._enter, prepend=True)
        yield module.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._inside.append(module)

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self._inside.pop()
        takes_it_alone = len(arguments) == 1 and not named and self._is_now(arguments[0])
        if not self._inside and takes_it_alone and isinstance(output, Tensor):
            self.modules.append(module)
            self._now, self._version = output, output._version

    def _is_now(self, x: Any) -> bool:
        return x is self._now and x._version == self._version

    def end(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """The hook of the part that calls the layers: looks at what it returns. Another tensor in its output, such as
        logits of routers, might be used by what follows; then it is not simple."""
        self.output = output
        if isinstance(output, ModelOutput) and self._is_now(output.get(LAST)):
            others = [value for name, value in output.items() if name != LAST]
            self.is_simple = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(others))


class _Tail:
    """Stands in for the part of a model that calls the layers: calls the modules that come after them.

    Args:
        path: The name of that part in the model, for example ``model``.
        modules: To call, in this order.
        output: One that the part returned, whose form every call returns.
    """

    def __init__(self, path: str, modules: tuple[nn.Module, ...], output: Any) -> None:
        self.modules = modules
        self._parent, _, self._name = path.rpartition(".")
        self._output = copy.copy(output)  # one for all calls: to make one takes longer than a norm
        self._hidden: Tensor | None = None
        self._replaced: Any = None

    @contextmanager
    def in_place(self, model: nn.Module, hidden: Tensor) -> Iterator[None]:
        """Inside, this is in the model in place of that part, and ``hidden`` is what the layers returned."""
        siblings: dict[str, Any] = model.get_submodule(self._parent)._modules
        self._hidden, self._replaced = hidden, siblings[self._name]
        siblings[self._name] = self
        try:
            yield
        finally:
            siblings[self._name], self._hidden = self._replaced, None
            self._output[LAST] = None

    def __call__(self, *_: Any, **__: Any) -> Any:
        hidden: Any = self._hidden
        for module in self.modules:
            hidden = module(hidden)
        self._output[LAST] = hidden
        return self._output

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the part: models read weights and settings from it."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._replaced, name)
