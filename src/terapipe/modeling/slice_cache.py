"""What outlives a slice, and the slice that is being computed.

::

    of one       class          what it has                                                     lives
    microbatch   SliceCache     keys, values, states, their gradients; where documents begin    until clear()
    slice        SliceContext   which tokens; what its backward defers; sums for losses         until the next begin()

    cache.begin(8, 4)      makes a new SliceContext:    cache.current
    with cache:            the cache is on the stack:   current_cache()
        stage(x, cache)    linear layers, embeddings, attention and hooks of Hugging Face models read both

A ``SliceContext`` is made anew for a slice's forward and again for its backward, so nothing that one slice sets can
reach another. That is also why functions of autograd hold the cache, and the stack holds caches: a layer's backward
runs under another context than its forward did, and the cache is what both share.

States other than keys and values go from slice to slice as leaves of autograd, so that each slice's backward is an
ordinary one::

    slice 0                    slice 1                          backwards
    state, with its graph      leaf, without it                 slice 1 fills leaf.grad
      set_state --- detach --> get_state                        slice 0 starts from (state, leaf.grad), too
"""

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from terapipe.modeling.key_values import GradientRoom, KeyValueStore
from terapipe.modeling.offload import SavedTensors
from terapipe.modeling.recall import Recall
from terapipe.modeling.visibility import Bounds, Visibility, segments
from terapipe.modeling.weight_grads import to_local


class SliceContext:
    """One forward or one backward of a slice.

    Args:
        start: Tokens of the sequence before the slice.
        length: Tokens of the slice.
        defer: Whether the backward puts off gradients of weights: they are left in ``deferred``.
        main_grads: Whether gradients of half-precision weights are summed in float32, see weight_grads.py.
        forward_only: Whether no slice of the microbatch has a backward: what no later slice sees is let go.

    Attributes:
        end: Where the next slice begins.
        fuses: Whether gradients of weights are added where they lie, see linear.py.
        deferred: What the backward put off, see linear.py.
        calls: How often each module has called attention since the cache was entered.
        checkpointed: Which forward of a checkpointed layer is running: the "first", or "again" in the backward.
        recall: What the first leaves to the other, of a layer whose products are not computed again.
        has_recalled: Whether there has been such a layer. A checkpoint inside of it computes its part again when the
            layer's own second forward is over, and must then take the same path through linear layers.
        is_in_forward: Whether the slice's forward is running.
        own_task: Autograd's number of the running backward of the slice.
        saved: Takes what a forward keeps for its backward, if the slice is offloaded.
    """

    def __init__(
        self, start: int, length: int, *, defer: bool = False, main_grads: bool = False, forward_only: bool = False
    ) -> None:
        self.start, self.length, self.end = start, length, start + length
        self.defer, self.main_grads, self.forward_only, self.fuses = defer, main_grads, forward_only, False
        self.deferred: list[Any] = []
        self.calls: dict[Hashable, int] = {}
        self.checkpointed: Literal["", "first", "again"] = ""
        self.recall: Recall | None = None
        self.has_recalled = False
        self.is_in_forward = False
        self.own_task: int | None = None
        self.saved: SavedTensors | None = None
        self._sums: dict[str, Tensor] = {}

    def name_call(self, module: Hashable) -> tuple[Hashable, int]:
        """A name for attention that a module calls: the module and how often it has called it for this slice.

        Hugging Face models call attention without saying which layer they are. The module does, unless it calls twice.

        Args:
            module: The module that calls.
        """
        number = self.calls.get(module, 0)
        self.calls[module] = number + 1
        return module, number

    def pop_deferred(self) -> list[Any]:
        """Returns the gradients of weights that the backward put off, and forgets them."""
        deferred, self.deferred = self.deferred, []
        return deferred

    def add_sums(self, name: str, sums: Tensor) -> None:
        """See ``SliceCache.add_sums``. A layer that is computed again adds nothing: its first forward did."""
        if self.checkpointed != "again":
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def pop_sums(self) -> dict[str, Tensor]:
        """Returns the sums that layers have added, and forgets them."""
        sums, self._sums = self._sums, {}
        return sums

    def run_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
        """Runs a backward that belongs to the slice: gradients of weights go where linear.py adds them.

        Args:
            roots: What to differentiate.
            gradients: The gradient of each; None for scalars.
        """
        # Before autograd goes on from a root it calls the root's hook, which so learns the number of this backward.
        handles = [root.register_hook(self._note_task) for root in roots]  # type: ignore[no-untyped-call]
        try:
            torch.autograd.backward(roots, gradients)
        finally:
            self.own_task = None
            for handle in handles:
                handle.remove()

    def _note_task(self, _: Tensor) -> None:
        self.own_task = torch._C._current_graph_task_id()

    @property
    def is_own_backward(self) -> bool:
        """Whether autograd is at work for ``run_backward`` itself, not for another backward such as
        ``torch.autograd.grad`` inside a layer, which must change no ``.grad``."""
        return torch._C._current_graph_task_id() == self.own_task


# Caches whose slices are being computed, the innermost last. Per process, not per thread: on a GPU, the backward
# recomputes layers in a thread of its own.
_computing: list["SliceCache"] = []


def current_cache() -> "SliceCache | None":
    """The cache whose slice is being computed, for modules that are not told: linear layers, embeddings, and the
    attention of Hugging Face models. Its ``current`` says which slice."""
    return _computing[-1] if _computing else None


_PLAIN_WEIGHTS = (nn.Parameter, Tensor, DTensor, FakeTensor)  # a parameter that is fake is of the last class


def cache_that_adds(weight: Tensor, *, is_product: bool = False) -> "SliceCache | None":
    """The cache whose slice is being computed, if its backward may add the weight's gradient to ``.grad`` in place.

    Weights that are computed from others (parametrizations) have no ``.grad``; tensor classes with operations of their
    own (low precision training) and the transforms of torch.func know better what to do.

    Args:
        weight: What a linear layer or an embedding is about to use.
        is_product: Whether a weight that is not trained will do, too, where outputs of products are recalled.

    Returns:
        None where the layer must do what torch does: outside of a slice, and for weights that are not trained.
    """
    if (
        not _computing
        or not (weight.requires_grad or (is_product and _computing[-1].current.has_recalled))
        or not weight.is_leaf
        # Without gradients torch's own product will do. But of a split weight it rounds that otherwise, and forwards
        # must be the same to the bit with gradients and without.
        or not (torch.is_grad_enabled() or isinstance(weight, DTensor))
        or type(weight) not in _PLAIN_WEIGHTS
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    return _computing[-1] if _computing[-1].current.fuses else None


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """``torch.autograd.backward``; inside of a slice, a backward that belongs to it. For losses, whose backward begins
    before the stage's.

    Args:
        roots: What to differentiate.
        gradients: The gradient of each; None for scalars.
    """
    cache = current_cache()
    if cache is None:
        torch.autograd.backward(roots, gradients)
    else:
        cache.current.run_backward(roots, gradients)


class _Attention(NamedTuple):
    """What attention computed in the first forward of a layer that is computed again.

    Attributes:
        out: Its output, or what stands for it if the slice is offloaded.
        lse: The log-sum-exps of its rows, likewise.
        q: Queries, likewise, if they are not computed again.
        version: That of the output, which must not change.
        saved: Has the tensors, if the slice is offloaded. It compares versions itself.
    """

    out: Any
    lse: Any
    q: Any
    version: int
    saved: SavedTensors | None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The output, the log-sum-exps, and the queries if there are any."""
        if self.saved is None:
            return self.out, self.lse, self.q
        q = None if self.q is None else self.saved.unpack(self.q)
        return self.saved.unpack(self.out), self.saved.unpack(self.lse), q


class SliceCache:
    """What a stage keeps of one microbatch from slice to slice.

    ``begin`` says which tokens the calls that follow are about; call it before a slice's forward, and again before its
    backward, which ``backward`` runs. Inside of ``with cache``, it is the ``current_cache``. A cache may be used
    again for another microbatch of the same size, after ``clear``: of keys and values nothing is read before it is
    written.

    Args:
        seq_len: Tokens of each sequence.

    Attributes:
        current: The slice that is being computed, see ``SliceContext``.
        casts: Weights in another dtype, made once for all slices; several caches may share it.
        gradient_room: Where tensors for gradients of keys and values come from; several caches may share it.
        drawn: Random numbers that were drawn for whole sequences, of which each slice takes its part, by name.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.current = SliceContext(0, 0)
        self.gradient_room = GradientRoom()
        self._stores: dict[Hashable, KeyValueStore] = {}
        # States by name and place, twice: as the slice that begins there sees them (leaves, whose .grad its backward
        # fills), and by place and name as the slice that ends there made them (with the graph that made them).
        self._leaves: dict[tuple[Hashable, int], Tensor] = {}
        self._outgoing: dict[int, dict[Hashable, Tensor]] = {}
        self._starts: tuple[tuple[int, ...], ...] = ()
        self._longest: int | None = None
        self._visible: dict[tuple[int, int, int | None, int | None], Visibility] = {}
        self._positions: Tensor | None = None  # of all tokens, where documents begin inside sequences
        self.casts: dict[Tensor, Tensor] = {}
        self.drawn: dict[str, Tensor] = {}
        # By layer and start of the slice, for layers that are computed again.
        self._attention: dict[tuple[Hashable, int], _Attention] = {}

    def begin(
        self, context: int, length: int, *, defer: bool = False, main_grads: bool = False, forward_only: bool = False
    ) -> SliceContext:
        """Begins a slice's forward or backward, and returns what the calls that follow read.

        Args:
            context: Tokens of the sequence before the slice.
            length: Tokens of the slice.
            defer: Whether the backward puts off gradients of weights.
            main_grads: Whether gradients of half-precision weights are summed in float32.
            forward_only: Whether no slice of the microbatch will have a backward. So say all of its slices, or none.
        """
        if length < 1 or context < 0 or context + length > self.seq_len:
            raise ValueError(
                f"a slice must lie within its cache of {self.seq_len} tokens, got {context} to {context + length}"
            )
        self.current = SliceContext(context, length, defer=defer, main_grads=main_grads, forward_only=forward_only)
        return self.current

    @property
    def context(self) -> int:
        """Tokens of the sequence before the current slice."""
        return self.current.start

    @property
    def length(self) -> int:
        """Tokens of the current slice."""
        return self.current.length

    @property
    def end(self) -> int:
        """Where the slice after the current one begins."""
        return self.current.end

    def __enter__(self) -> Self:
        _computing.append(self)
        self.current.calls = {}
        return self

    def __exit__(self, *_: object) -> None:
        _computing.pop()

    def add_sums(self, name: str, sums: Tensor) -> None:
        """Adds a layer's sums over the current slice's tokens to those of an auxiliary loss of the stage.

        Args:
            name: That of the loss in ``Stage.auxiliary_losses``.
            sums: A vector of ``AuxiliaryLoss.size``.
        """
        self.current.add_sums(name, sums)

    # Layers that are computed again

    def checkpoint_contexts(
        self, recall: Recall | None = None
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around a layer's forward, and around the one that its backward begins with: attention keeps its output in the
        first and does not compute it in the second.

        Args:
            recall: Likewise for products.
        """
        return _Checkpointing(self, "first", recall), _Checkpointing(self, "again", recall)

    def recall_attention(self, layer: Hashable) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Output and log-sum-exps of the layer's first forward, and its queries if they were kept, if this is another
        forward; None in a first one.

        They are let go of in the slice's own backward: ``torch.autograd.grad`` inside a layer computes it again before
        that, too.

        Args:
            layer: The attention layer's name.
        """
        if self.current.checkpointed != "again":
            return None
        kept = self._attention[layer, self.current.start]
        if self.current.is_own_backward:
            del self._attention[layer, self.current.start]
        out, lse, q = kept.tensors()
        if kept.saved is None and out._version != kept.version:  # autograd would notice if it had saved it
            raise RuntimeError(
                f"the output of attend(layer={layer!r}) was changed in place, but the layer's recomputation needs it; "
                "write out = out * 2 in place of out *= 2"
            )
        return out, lse, q

    def keep_attention(self, layer: Hashable, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """Remembers what attention computed, in the first forward of a layer that is computed again.

        Args:
            layer: The attention layer's name.
            q: Queries as attention saves them, which are kept where their product's output is not.
            out: Its output; what it is when it is recalled must be what it is now.
            lse: The log-sum-exps of its rows.
        """
        if self.current.checkpointed == "first":
            saved, recall = self.current.saved, self.current.recall
            pack = (lambda x: x) if saved is None else saved.pack
            queries = None if recall is None or not recall.keeps_queries(layer) else pack(q.detach())
            name = layer, self.current.start
            self._attention[name] = _Attention(pack(out.detach()), pack(lse), queries, out._version, saved)
            if recall is not None:
                recall.note_attention(layer, q, (out, lse))

    def drop_queries(self, layers: Iterable[Hashable]) -> None:
        """Lets go of the current slice's queries, where it has turned out that they can be computed again.

        Args:
            layers: Names of attention layers.
        """
        for layer in layers:
            kept = self._attention.get((layer, self.current.start))
            if kept is not None and kept.q is not None:
                self._attention[layer, self.current.start] = kept._replace(q=None)

    @torch.no_grad()
    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """This device's part of a weight in another dtype, made once for all slices of a step.

        torch.autocast remembers its casts, too, but casts for operators that it knows only, and ``linear.project`` is
        none.

        Args:
            weight: Any; it must not change until ``clear``.
            dtype: What autocast computes in.
        """
        if weight not in self.casts:
            self.casts[weight] = to_local(weight).to(dtype)
        return self.casts[weight]

    def store(self, layer: Hashable) -> KeyValueStore:
        """The keys and values of one attention layer; made when its first slice asks for it.

        Args:
            layer: Any name that is unique to the layer on its stage.
        """
        if layer not in self._stores:
            self._stores[layer] = KeyValueStore(self.gradient_room)
        return self._stores[layer]

    def take_keys_and_values(self) -> dict[Hashable, Tensor]:
        """Gives away the keys and values of all layers, by layer. Until they are put back, no slice can be computed.

        They are what a cache keeps between microbatches, too: one that takes and does not put makes room."""
        pairs = {layer: store.take_pair() for layer, store in self._stores.items()}
        return {layer: pair for layer, pair in pairs.items() if pair is not None}

    def put_keys_and_values(self, pairs: Mapping[Hashable, Tensor]) -> None:
        """Takes them back.

        Args:
            pairs: What ``take_keys_and_values`` returned, or copies.
        """
        for layer, pair in pairs.items():
            self._stores[layer].put_pair(pair)

    # Other states

    def get_state(self, name: Hashable) -> Tensor | None:
        """The state that the slice before left; None at the beginning of a sequence.

        Args:
            name: That of ``set_state``.
        """
        return self._leaves.get((name, self.current.start))

    def set_state(self, name: Hashable, state: Tensor) -> Tensor:
        """Leaves a state to the slice after this one; gradients come back the same way.

        Args:
            name: Any name that is unique on the stage.
            state: Of any shape.

        Returns:
            What that slice will see: the same numbers, without the graph that made them.
        """
        if torch.is_grad_enabled() and state.requires_grad and self.current.checkpointed != "again":
            self._outgoing.setdefault(self.current.end, {})[name] = state
        # There may be one already, if this forward is one that a backward begins with.
        return self._leaves.setdefault(
            (name, self.current.end), state.detach().requires_grad_(state.is_floating_point())
        )

    def backward(self, out: Tensor, gradient: Tensor, others: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Runs a slice's backward, which also starts from the states it left, with the gradients that later slices
        computed.

        Args:
            out: What the stage's forward returned.
            gradient: Its gradient, from the next stage or the loss.
            others: Further results of the slice with their gradients, such as sums for auxiliary losses.
        """
        pairs = [*(((out, gradient),) if out.requires_grad else ()), *others]
        roots, gradients = [root for root, _ in pairs], [its for _, its in pairs]
        for name, state in self._outgoing.pop(self.current.end, {}).items():
            owed = self._leaves.pop((name, self.current.end)).grad
            if owed is not None:
                roots.append(state)
                gradients.append(owed)
        self.current.run_backward(roots, gradients)

    def clear(self) -> None:
        """Forgets all states, so that another microbatch can begin. Room for keys and values is kept: it is written
        before read. That for their gradients goes to whoever needs it next."""
        for store in self._stores.values():
            store.clear()
        self._leaves.clear()
        self._outgoing.clear()
        self.current = SliceContext(0, 0)
        self._attention.clear()
        self.drawn.clear()
        self.casts = {}

    def next_states(self) -> list[Tensor]:
        """The states that the current slice left to the one after it."""
        return [state for (_, place), state in self._leaves.items() if place == self.current.end]

    def clone(self) -> Self:
        """Another cache over the same keys and values, with its own copies of all other states: so that a slice can be
        computed several times, as the profiler does. Not between a forward with gradients and its backward."""
        shared = (self._stores, self.casts, self.current, self.gradient_room)
        return copy.deepcopy(self, {id(each): each for each in shared})

    # Documents

    def set_documents(self, starts: Sequence[Sequence[int]], longest: int | None = None) -> None:
        """Says where documents begin in each sequence of the microbatch; by default each sequence is one document.

        Args:
            starts: Per sequence, the first tokens of its documents, beginning with 0.
            longest: Tokens of the longest document of the whole batch; by default of these sequences.
        """
        self._starts = tuple(tuple(row) for row in starts)
        self._longest = longest
        self._visible.clear()
        self._positions = None

    @property
    def has_documents(self) -> bool:
        """Whether any sequence is more than one."""
        return any(len(row) > 1 for row in self._starts)

    @property
    def longest(self) -> int:
        """The tokens of the longest document: what a model that is given the whole batch takes for its length."""
        return self._longest or longest_document(self._starts, self.seq_len)

    def visibility(self, window: int | None = None, chunk: int | None = None) -> Visibility:
        """What the current slice's tokens see: of their document all tokens up to themselves.

        Args:
            window: At most so many of them.
            chunk: Only those of their chunk, where chunks have so many tokens.
        """
        current = self.current
        key = (current.start, current.length, window, chunk)
        if key not in self._visible:
            parts = segments(self._starts, current.start, current.end, chunk)
            bounds = Bounds.of(current.start, current.end, window, chunk, self.has_documents)
            self._visible[key] = Visibility(current.start, current.length, parts, window, bounds)
        return self._visible[key]

    def positions(self, device: torch.device) -> Tensor:
        """The places of the current slice's tokens in their documents: (1 or sequences, tokens). What a model with
        positional embeddings must use in place of ``torch.arange(x.shape[1])``, which counts from the slice's first
        token.

        Args:
            device: Where the model wants them.
        """
        current = self.current
        if not self.has_documents:
            return torch.arange(current.start, current.end, device=device)[None]
        if self._positions is None or self._positions.device != device:
            self._positions = on_device(_positions(self._starts, self.seq_len), device)
        return self._positions[:, current.start : current.end]


class _Checkpointing(AbstractContextManager[None]):
    """Says which forward of a checkpointed layer is running. torch.utils.checkpoint enters it several times: a layer is
    computed again for its backward, and for each ``torch.autograd.grad`` inside of it."""

    def __init__(self, cache: SliceCache, which: Literal["first", "again"], recall: Recall | None) -> None:
        self._cache, self._which, self._recall = cache, which, recall
        self._before: list[tuple[SliceContext, Literal["", "first", "again"], Recall | None, Any]] = []
        self._learning: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        current, recall = self._cache.current, self._recall
        calls = None if recall is None else recall.begin()
        self._before.append((current, current.checkpointed, current.recall, calls))
        current.checkpointed, current.recall = self._which, recall
        current.has_recalled |= recall is not None
        if recall is not None and recall.needs is None and self._which == "first":
            self._learning = recall.learn()
            self._learning.__enter__()

    def __exit__(self, *arguments: Any) -> None:
        if self._learning is not None:
            self._learning.__exit__(*arguments)
            self._learning = None
        current, checkpointed, recall, calls = self._before.pop()
        current.checkpointed, current.recall = checkpointed, recall
        if self._recall is not None:
            self._recall.resume(calls)


def _positions(starts: Sequence[Sequence[int]], seq_len: int) -> Tensor:
    """Computes the position of every token in its document: (sequences, tokens)."""
    places = torch.arange(seq_len)
    rows = [torch.tensor(row) for row in starts]
    return torch.stack([places - row[torch.searchsorted(row, places, right=True) - 1] for row in rows])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast, where it is on, computes a product with such a tensor in. None where it leaves the
    tensor as it is: float64 is never cast."""
    device = x.device.type
    if x.dtype is torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_input(x: Tensor) -> Tensor:
    """The tensor in the dtype that autocast wants; its gradient is cast back. torch does so for operators that it
    knows, and does not know attention over slices and ``linear.project``."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for, if the tensor is the host's.

    Args:
        x: Any tensor; one of the host is copied to pinned memory first, or the copy to a GPU would wait.
        device: Where it is needed.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def longest_document(starts: Sequence[Sequence[int]], seq_len: int) -> int:
    """Tokens of the longest document.

    Args:
        starts: Where documents begin in each sequence; if empty, each sequence is one document.
        seq_len: Tokens of each sequence.
    """
    return max((last - first for row in starts for first, last in pairwise([*row, seq_len])), default=seq_len)
