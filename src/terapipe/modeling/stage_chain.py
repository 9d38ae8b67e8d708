"""Stages of a model computed slice by slice in one process, without a schedule, and watched while they run.

Verification runs the same stage whole and in slices with ``StageChain``, and compares the results by
``relative_error``. Where they differ, two watchers say why::

    StageChain   forwards and backwards of all slices through all stages         what was computed
    Trace        every call of every module: inputs, outputs, torch functions    find_blame: which module, which mistake
    CacheUse     every use of the cache: by whom, under which name               names used twice, outputs changed

A model's mistake raises nothing by itself: attention that sees only its slice still returns numbers. So the watchers
look at numbers, and the sentences at the end of this file say what is likely wrong and what to write instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from terapipe.modeling.slice_cache import SliceCache, SliceContext, run_backward
from terapipe.modeling.stage import RandomState, SlicedStage, Stage
from terapipe.modeling.weight_grads import accumulate_deferred
from terapipe.planning.recompute import Recompute

SliceLoss = Callable[[Tensor, int, int], Tensor]  # of a slice's last hidden states, its first token and its end
Sums = dict[str, Tensor]  # for auxiliary losses, by their names


class ChainResult(NamedTuple):
    """What a run computed, beside the gradients in ``.grad`` of the parameters."""

    loss: float
    output: Tensor  # hidden states of the last stage, of all tokens
    input_gradient: Tensor | None  # if the first stage's input is floating
    attached: bool  # whether the output of every stage has a gradient


class StageChain:
    """The forwards of all slices in order, each through all stages, then the backwards in reverse.

    ::

        forwards    stage 0, slice 0    stage 1, slice 0    stage 0, slice 1    stage 1, slice 1
        backwards   stage 1, slice 1    stage 0, slice 1    stage 1, slice 0    stage 0, slice 0

    Weight gradients come last, as in orders with split backwards.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = [SlicedStage(stage) for stage in stages]
        self.caches: list[SliceCache] = []  # of the last run

    def run(
        self,
        x: Tensor,
        lengths: Sequence[int],
        loss: SliceLoss,
        *,
        mode: Recompute = "none",
        watch: Callable[[SliceCache], None] = lambda cache: None,
    ) -> ChainResult:
        """Forward and backward of one microbatch.

        - ``x``: token ids, or hidden states for a first stage that is not the model's first.
        - ``lengths``: tokens of each slice; one length is the whole sequence.
        - ``loss``: called with each slice's hidden states; its values are summed.
        - ``mode``: what backwards compute again.
        - ``watch``: called with each new cache, for checks that look into it.

        Auxiliary losses are computed between forwards and backwards, from the sums of all slices and stages.
        """
        size = x.shape[0]
        self.caches = [each.stage.make_cache(size, sum(lengths)) for each in self._stages]
        for cache in self.caches:
            watch(cache)
        starts = [0, *accumulate(lengths)][:-1]
        slices = [_Slice(start, length) for start, length in zip(starts, lengths, strict=True)]
        parts = _split_tokens(self._stages[0].stage, x, size, lengths)
        total, outputs = 0.0, []
        for one, part in zip(slices, parts, strict=True):
            hidden = part.detach().requires_grad_(part.is_floating_point())
            for k in range(len(self._stages)):
                hidden = one.forward(self._stages[k], self.caches[k], hidden, mode)
            outputs.append(hidden.detach())
            with self._stages[-1].over(self.caches[-1]):
                value = loss(hidden, one.start, one.start + one.length)
                run_backward([value])
            total += value.item()
            one.inputs.append(hidden)
        added, gradients = self._auxiliary([sums for one in slices for sums in one.sums])
        for one in reversed(slices):
            for k in reversed(range(len(self._stages))):
                one.backward(self._stages[k], self.caches[k], k, mode, gradients)
        accumulate_deferred(part for one in slices for part in one.deferred)
        output, gradient = self._join(outputs, [one.inputs[0] for one in slices], size)
        return ChainResult(total + added, output, gradient, all(one.attached for one in slices))

    def _auxiliary(self, sums: Sequence[Sums]) -> tuple[float, Sums]:
        """The auxiliary losses of the totals, and the gradient of each with respect to any of its summands."""
        value, gradients = 0.0, {}
        for name, loss in self._stages[0].stage.auxiliary_losses.items():
            summands = [by_name[name].detach() for by_name in sums if name in by_name]
            if summands:
                totals = torch.stack(summands).sum(0).requires_grad_()
                with torch.enable_grad():
                    term = loss.value(totals)
                (gradients[name],) = torch.autograd.grad(term, totals)
                value += term.item()
        return value, gradients

    def _join(self, outputs: list[Tensor], inputs: list[Tensor], size: int) -> tuple[Tensor, Tensor | None]:
        dim = token_dim(self._stages[-1].stage, size)
        if not inputs[0].is_floating_point():
            return torch.cat(outputs, dim), None
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return torch.cat(outputs, dim), torch.cat(gradients, token_dim(self._stages[0].stage, size))


class _Slice:
    """What is kept of a slice between its forwards and its backwards."""

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self.inputs: list[Tensor] = []  # of each stage, at last of the loss
        self._outputs: list[Tensor] = []
        self.sums: list[Sums] = []  # of each stage
        self._random: list[RandomState] = []
        self.deferred: list[Any] = []  # gradients of weights, of all stages
        self.attached = True

    def forward(self, sliced: SlicedStage, cache: SliceCache, x: Tensor, mode: Recompute) -> Tensor:
        """Returns the input of what follows: a leaf, as if it had been received from another rank."""
        context = cache.begin(self.start, self.length)
        self._random.append(RandomState.now(x.device))
        with torch.set_grad_enabled(mode != "full"):
            out = sliced.forward(x, cache, block=mode == "block")
        self.inputs.append(x)
        self._outputs.append(out)
        self.sums.append(context.pop_sums())
        return out.detach().requires_grad_()

    def backward(self, sliced: SlicedStage, cache: SliceCache, k: int, mode: Recompute, gradients: Sums) -> None:
        """``gradients`` are those of the sums for auxiliary losses."""
        context = cache.begin(self.start, self.length, defer=True)
        out, sums = self._outputs[k], self.sums[k]
        if mode == "full":
            with self._random[k].restored():
                out = sliced.forward(self.inputs[k], cache)
            sums = context.pop_sums()
        self.attached &= out.requires_grad
        gradient = self.inputs[k + 1].grad
        if gradient is None:
            gradient = torch.zeros_like(out)
        others = [(x, gradients[name].to(x.dtype)) for name, x in sums.items() if x.requires_grad]
        if out.requires_grad or others:  # a first stage may have nothing to train
            sliced.backward(cache, out, gradient, others)
        self.deferred += context.pop_deferred()


def token_dim(stage: Stage, size: int) -> int:
    """The dimension of hidden states that grows with the tokens of a slice."""
    few, many = stage.hidden_shape(size, 16), stage.hidden_shape(size, 32)
    return next(dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b)


def _split_tokens(stage: Stage, x: Tensor, size: int, lengths: Sequence[int]) -> Sequence[Tensor]:
    if not x.is_floating_point():
        return torch.split(x, list(lengths), 1)
    dim = token_dim(stage, size)
    return torch.split(x, [stage.hidden_shape(size, length)[dim] for length in lengths], dim)


def device_of(stage: Stage) -> torch.device:
    return next((p.device for p in stage.parameters()), torch.device("cpu"))


# Comparing


def relative_error(wanted: Tensor, computed: Tensor, least: float = 0.0) -> float:
    """The largest difference of two tensors, relative to the largest value that is wanted.

    Args:
        wanted: The truth.
        computed: What is compared with it.
        least: What the difference is relative to at least. Some gradients are zero but for rounding: then the largest
            gradient of the model, or a share of it, says what is small.

    Returns:
        Infinity if shapes differ or a number is not one, 0 for tensors without numbers.
    """
    if wanted.shape != computed.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    scale = max(wanted.abs().max().item(), least, 1e-30)
    error = (computed - wanted).abs().max().item() / scale
    return error if error == error else float("inf")


def changed_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """The names of buffers that a run has changed or made, such as running means.

    Such a model is not exact in slices: it updates them once for each slice, where the whole model does it once.

    Args:
        before: Copies of the buffers by name.
        after: The same buffers after the run.
    """
    return [name for name, buffer in after.items() if name not in before or not torch.equal(before[name], buffer)]


def first_line(error: Exception, limit: int | None = 160) -> str:
    """What some model's own code says when it raises, in one line.

    Args:
        error: What it raised. Errors that were not meant to be read by users (a KeyError says only the key) get their
            kind in front.
        limit: Characters of the line at most.
    """
    line, kind = str(error).strip().partition("\n")[0], type(error).__name__
    unmeant = isinstance(error, AttributeError | LookupError | TypeError)
    return (f"its own code raises {kind}: {line}" if unmeant else line or kind)[:limit]


# Watching


class Blame(NamedTuple):
    where: str  # the module's name
    reason: str  # the likely mistake and its remedy


class _Call(NamedTuple):
    """One call of a module."""

    path: str
    caller: str  # the module whose forward called it
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Trace(TorchFunctionMode):
    """Calls of all modules below ``root``, in the order in which they return, and the torch functions that each module
    calls in its own forward."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root, self._stack = root, list[str]()  # names of the modules whose forwards are running
        self.calls: list[_Call] = []
        self.functions: dict[str, set[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stack:
            self.functions.setdefault(self._stack[-1], set()).add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        handles = []
        for name, module in self._root.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            handles.append(module.register_forward_hook(self._note, with_kwargs=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        path = self._stack.pop()
        if module is not self._root:
            caller = self._stack[-1] if self._stack else ""  # the loss is no module
            self.calls.append(_Call(path, caller, _tensors((args, kwargs)), _tensors(out)))

    @property
    def reads_values(self) -> bool:
        """Whether a module may have decided by the values of a tensor."""
        return any(called & READS for called in self.functions.values())


def _tensors(values: Any) -> tuple[Tensor, ...]:
    with torch._C.DisableTorchFunction():
        return tuple(leaf.detach().clone() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def find_blame(
    module: nn.Module, compute: Callable[[Sequence[int]], object], lengths: Sequence[int], bound: float
) -> Blame:
    """The innermost module that turns right inputs into wrong outputs; the whole one if no other does.

    ``compute`` runs the module, in slices of the lengths that it is called with.
    """
    whole, sliced = Trace(module), Trace(module)
    with whole.recorded():
        compute((sum(lengths),))
    with sliced.recorded():
        compute(lengths)
    per_slice = len(whole.calls)
    if len(sliced.calls) != per_slice * len(lengths):  # another path through the model
        return _blame(module, "", sliced.functions, default=BRANCH)
    for i, call in enumerate(whole.calls):
        parts = [sliced.calls[i + n * per_slice] for n in range(len(lengths))]
        if _agrees(call.outputs, [part.outputs for part in parts], lengths, bound):
            continue
        right = _agrees(call.inputs, [part.inputs for part in parts], lengths, bound)
        return _blame(module, call.path if right else call.caller, sliced.functions)
    return _blame(module, "", sliced.functions)


def _agrees(wanted: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], lengths: Sequence[int], bound: float) -> bool:
    """Tensors that cannot be joined along tokens are left out: nothing is known of them."""
    for j, whole in enumerate(wanted):
        slices = [part[j] for part in parts if j < len(part)]
        dim = next((d for d in range(whole.ndim) if [s.shape[d:][:1] for s in slices] == [(n,) for n in lengths]), None)
        if dim is None or whole.shape[dim] != sum(lengths):
            continue
        joined = torch.cat(slices, dim)
        if joined.shape != whole.shape:
            continue
        if relative_error(whole, joined) > bound:
            return False
    return True


def _blame(root: nn.Module, path: str, functions: dict[str, set[str]], default: str = "") -> Blame:
    module, called = root.get_submodule(path), functions.get(path, set())
    where = f"{path} ({type(module).__name__})" if path else type(module).__name__
    return Blame(where, default or _reason(module, called))


def _reason(module: nn.Module, called: set[str]) -> str:
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return RECURRENCE
    if isinstance(module, nn.modules.conv._ConvNd) or any(name.startswith("conv") for name in called):
        return CONVOLUTION
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return STATISTICS
    if isinstance(module, nn.MultiheadAttention) or called & ATTENTION:
        return OWN_ATTENTION
    if called & READS:
        return BRANCH
    if called & {"arange"}:
        return POSITIONS
    return MIXES if called & ({"softmax"} | STATISTIC) else UNKNOWN


class CacheUse:
    """How modules use the cache, to notice two that share a name, and one that changes what attention needs later."""

    def __init__(self, module: nn.Module) -> None:
        self._stage, self._path = module, [""]
        self._users: dict[tuple[str, object], str] = {}  # of the current slice, by kind and name
        self._outputs: list[tuple[str, Tensor, int]] = []  # of attention: caller, output, and its version
        self._clash: tuple[object, str, str] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the module that is being computed is known."""
        handles = []
        for name, module in self._stage.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, *_: object) -> None:
        self._path.pop()

    def watch(self, cache: SliceCache) -> None:
        begin, store = cache.begin, cache.store
        set_state, keep_attention = cache.set_state, cache.keep_attention
        self._users.clear()
        self._outputs.clear()

        def note_begin(context: int, length: int, **options: bool) -> SliceContext:
            self._users.clear()  # a backward may compute layers again
            return begin(context, length, **options)

        def note_store(name: object) -> object:
            self._note("attend", name)
            return store(cast(str, name))

        def note_state(name: object, state: Tensor) -> Tensor:
            self._note("set_state", name)
            return set_state(cast(str, name), state)

        def note_output(name: object, out: Tensor, lse: Tensor) -> None:
            self._outputs.append((self._path[-1], out, out._version))
            keep_attention(cast(str, name), out, lse)

        cache.__dict__.update(begin=note_begin, store=note_store, set_state=note_state, keep_attention=note_output)

    def _note(self, kind: str, name: object) -> None:
        key = (kind, name)
        if key in self._users and self._clash is None:
            self._clash = (name, self._users[key], self._path[-1])
        self._users[key] = self._path[-1]

    def blame(self) -> Blame | None:
        """The first mistake that was seen; None if there was none."""
        changed = [path for path, out, version in self._outputs if out._version != version]
        if changed:
            return Blame(changed[0], CHANGED_IN_PLACE)
        if self._clash is None:
            return None
        name, one, two = self._clash
        return Blame(two, SHARED_NAME.format(name=name, one=one, two=two))


# Mistakes, and what to write instead


ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"}
READS = {"__bool__", "item", "tolist"}
STATISTIC = {"mean", "std", "var", "cumsum", "cumprod", "flip", "roll", "sort", "max", "min", "norm", "sum", "topk"}

CONVOLUTION = (
    "a convolution over tokens sees only those of its slice; take the last kernel_size - 1 tokens of the slice before "
    "from cache.get_state(name), put them in front, and leave your own by cache.set_state(name, ...)"
)
RECURRENCE = (
    "a recurrence begins anew in every slice; take its state from cache.get_state(name) and leave it by "
    "cache.set_state(name, state)"
)
OWN_ATTENTION = (
    "attention sees only the tokens of its slice; call tp.attend(q, k, v, cache, layer) in place of "
    "F.scaled_dot_product_attention"
)
BRANCH = (
    "the forward branches on the values of its slice (if, while, bool(tensor), item()), and slices decide otherwise "
    "than the whole sequence; compute both branches and choose for each token (torch.where)"
)
POSITIONS = (
    "positions are counted from the slice's first token; take cache.positions(device), which counts from the sequence's"
)
STATISTICS = "statistics are those of the tokens of a slice; take a norm over features, such as nn.LayerNorm"
MIXES = (
    "tokens are mixed that lie in one slice only: attention, a mean, a sum or the like over tokens; use tp.attend, or "
    "hand the state on by cache.get_state and cache.set_state"
)
UNKNOWN = (
    "a token's result depends on which tokens share its slice; what comes from earlier tokens must go through "
    "tp.attend or cache.get_state and cache.set_state, and nothing may come from later ones"
)
CHANGED_IN_PLACE = (
    "the output of tp.attend is changed in place, but its backward needs it; write out = out * 2 in place of out *= 2"
)
SHARED_NAME = (
    "{one} and {two} use the cache under the same name {name!r}, and overwrite each other's keys, values or states; "
    "give each layer a name of its own, such as its number in the model"
)
