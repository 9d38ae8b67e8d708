"""Stages of a model computed slice by slice in one process, without a schedule, and watched while they run.

Verification runs the same stage whole and in slices with ``StageChain``, and compares the results by
``relative_error``. Where they differ, two watchers say why::

    StageChain   forwards and backwards of all slices through all stages         what was computed
    Trace        every call of every module: inputs, outputs, torch functions    find_blame: which module, which mistake
    CacheUse     every use of the cache: by whom, under which name               names used twice, outputs changed

A model's mistake raises nothing by itself: attention that sees only its slice still returns numbers. So the watchers
look at numbers, and the sentences of ``Mistake`` say what is likely wrong and what to write instead.
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
from terapipe.modeling.stage import IGNORE, RandomState, SlicedStage, Stage
from terapipe.modeling.weight_grads import accumulate_deferred
from terapipe.planning.recompute import Recompute

SliceLoss = Callable[[Tensor, int, int], Tensor]  # of a slice's last hidden states, its first token and its end
Sums = dict[str, Tensor]  # for auxiliary losses, by their names


class ChainResult(NamedTuple):
    """What a run computed, beside the gradients in ``.grad`` of the parameters.

    Attributes:
        loss: The sum of the slices' losses, with auxiliary losses.
        output: Hidden states of the last stage, of all tokens.
        input_gradient: That of the first stage's input; None for token ids.
        attached: Whether the output of every stage has a gradient.
    """

    loss: float
    output: Tensor
    input_gradient: Tensor | None
    attached: bool


class StageChain:
    """The forwards of all slices in order, each through all stages, then the backwards in reverse.

    ::

        forwards    stage 0, slice 0    stage 1, slice 0    stage 0, slice 1    stage 1, slice 1
        backwards   stage 1, slice 1    stage 0, slice 1    stage 1, slice 0    stage 0, slice 0

    Weight gradients come last, as in orders with split backwards. It does what an executor does on several ranks, with
    the same ``SlicedStage`` and caches, but without messages: what is wrong here is wrong in the model.

    Args:
        stages: Those of one model in order, or one stage alone.

    Attributes:
        caches: One for each stage, of the last run.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = [SlicedStage(stage) for stage in stages]
        self.caches: list[SliceCache] = []

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

        Auxiliary losses are computed between forwards and backwards, from the sums of all slices and stages.

        Args:
            x: Token ids, or hidden states for a first stage that is not the model's first.
            lengths: Tokens of each slice; one length is the whole sequence.
            loss: Called with each slice's hidden states; its values are summed.
            mode: What backwards compute again.
            watch: Called with each new cache, for checks that look into it.
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
        """The auxiliary losses of the totals, and the gradient of each with respect to any of its summands.

        The gradient of a function of a sum is the same for every summand: so one vector for each loss goes to all
        slices.

        Args:
            sums: Those of each slice and stage, by the name of the loss.
        """
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
        """The outputs of all slices as one tensor, and the gradients of all inputs, if they have any."""
        dim = token_dim(self._stages[-1].stage, size)
        if not inputs[0].is_floating_point():
            return torch.cat(outputs, dim), None
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return torch.cat(outputs, dim), torch.cat(gradients, token_dim(self._stages[0].stage, size))


class _Slice:
    """What is kept of a slice between its forwards and its backwards.

    Args:
        start: Tokens before the slice.
        length: Its tokens.
    """

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self.inputs: list[Tensor] = []  # of each stage, at last of the loss
        self._outputs: list[Tensor] = []
        self.sums: list[Sums] = []  # of each stage
        self._random: list[RandomState] = []
        self.deferred: list[Any] = []  # gradients of weights, of all stages
        self.attached = True

    def forward(self, sliced: SlicedStage, cache: SliceCache, x: Tensor, mode: Recompute) -> Tensor:
        """One stage's forward. Returns the input of what follows: a leaf, as if it had been received from another rank.

        Args:
            sliced: The stage.
            cache: The stage's.
            x: The stage's input, a leaf that gets a gradient.
            mode: With "full" nothing is recorded, and ``backward`` computes it again.
        """
        context = cache.begin(self.start, self.length)
        self._random.append(RandomState.now(x.device))
        with torch.set_grad_enabled(mode != "full"):
            out = sliced.forward(x, cache, recompute=mode)
        self.inputs.append(x)
        self._outputs.append(out)
        self.sums.append(context.pop_sums())
        return out.detach().requires_grad_()

    def backward(self, sliced: SlicedStage, cache: SliceCache, k: int, mode: Recompute, gradients: Sums) -> None:
        """One stage's backward, from the gradient that the next stage left in its input.

        Args:
            sliced: The stage.
            cache: The stage's.
            k: The stage's number.
            mode: As in the forward.
            gradients: Those of the sums for auxiliary losses, by name.
        """
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
    """The dimension of hidden states that grows with the tokens of a slice.

    Args:
        stage: Whose ``hidden_shape`` is asked.
        size: Sequences.
    """
    few, many = stage.hidden_shape(size, 16), stage.hidden_shape(size, 32)
    return next(dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b)


def _split_tokens(stage: Stage, x: Tensor, size: int, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The input of each slice. Hidden states may have fewer places than tokens (sequence parallelism), as
    ``hidden_shape`` says."""
    if not x.is_floating_point():
        return torch.split(x, list(lengths), 1)
    dim = token_dim(stage, size)
    return torch.split(x, [stage.hidden_shape(size, length)[dim] for length in lengths], dim)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are; the CPU if it has none, or has them on the meta device."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


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


class Mistake:
    """What is likely wrong, and what to write instead: the sentences that users see."""

    CONVOLUTION = (
        "a convolution over tokens sees only those of its slice; take the last kernel_size - 1 tokens of the slice "
        "before from cache.get_state(name), put them in front, and leave your own by cache.set_state(name, ...)"
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
        "the forward branches on the values of its slice (if, while, bool(tensor), item()), and slices decide "
        "otherwise than the whole sequence; compute both branches and choose for each token (torch.where)"
    )
    POSITIONS = (
        "positions are counted from the slice's first token; take cache.positions(device), which counts from the "
        "sequence's"
    )
    STATISTICS = "statistics are those of the tokens of a slice; take a norm over features, such as nn.LayerNorm"
    MIXES = (
        "tokens are mixed that lie in one slice only: attention, a mean, a sum or the like over tokens; use "
        "tp.attend, or hand the state on by cache.get_state and cache.set_state"
    )
    UNKNOWN = (
        "a token's result depends on which tokens share its slice; what comes from earlier tokens must go through "
        "tp.attend or cache.get_state and cache.set_state, and nothing may come from later ones"
    )
    CHANGED_IN_PLACE = (
        "the output of tp.attend is changed in place, but its backward needs it; write out = out * 2 in place of out "
        "*= 2"
    )
    SHARED_NAME = (
        "{one} and {two} use the cache under the same name {name!r}, and overwrite each other's keys, values or "
        "states; give each layer a name of its own, such as its number in the model"
    )
    LOSS_IS_NO_SUM = (
        f"the loss of a slice must be the sum over its labels that are not {IGNORE}, and that of two parts their sum; "
        "do not divide by their number (reduction='sum', ignore_index=-100): the step divides by that of the whole "
        "batch"
    )
    BUFFER = (
        "the forward changes the buffer {name!r}, so that a slice is computed with other numbers than the one before "
        "it; keep that layer in evaluation mode, or take one that changes no buffer, such as nn.LayerNorm"
    )
    GRADIENT_ONLY = (
        "outputs of slices are right and this gradient is not: something goes from slice to slice without its "
        "gradient; hand it on by tp.attend or cache.set_state, and do not detach it"
    )
    NO_GRADIENT = "the stage's output has no gradient; do not detach it, nor compute it under torch.no_grad()"
    WRONG_STAGES = (
        "stages one after the other give other numbers than all layers in one; stage(first, last) must give the "
        "layers from first to last - 1, the embedding if first is 0, and head and loss if last is the number of "
        "layers"
    )
    KEPT_OUTSIDE = (
        "a module keeps a tensor of an earlier slice, whose backward comes later; hand it on by cache.set_state and "
        "take it from cache.get_state, through which gradients come back"
    )
    OTHER_RANDOM = (
        "it draws random numbers that torch's seed does not determine (a torch.Generator of its own, numpy, random); "
        "draw them from torch's default generator"
    )
    NOT_AGAIN = (
        "computed again by recompute={mode!r}, a layer gives other gradients; it must not keep anything between calls"
    )
    DRAWN_ANEW = (
        "stage() returned another weight than the model has; let stages share the model's modules, or copy its "
        "weights, rather than draw them anew"
    )


class Blame(NamedTuple):
    """Who made a mistake, and which.

    Attributes:
        where: The module's name.
        reason: The likely mistake and its remedy.
    """

    where: str
    reason: str


class _Call(NamedTuple):
    """One call of a module.

    Attributes:
        path: The module's name.
        caller: The module whose forward called it.
        inputs: Copies of all tensors among its arguments.
        outputs: Copies of all tensors that it returned.
    """

    path: str
    caller: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Trace(TorchFunctionMode):
    """Calls of all modules below ``root``, in the order in which they return, and the torch functions that each module
    calls in its own forward.

    Args:
        root: A stage.

    Attributes:
        calls: One entry for each call of a module.
        functions: Names of torch functions by the name of the module whose forward called them.
    """

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
        """Inside, calls are recorded."""
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
        """A hook that is called when a module returns; ``_stack`` then ends with its name."""
        path = self._stack.pop()
        if module is not self._root:
            caller = self._stack[-1] if self._stack else ""  # the loss is no module
            self.calls.append(_Call(path, caller, _tensors((args, kwargs)), _tensors(out)))

    @property
    def reads_values(self) -> bool:
        """Whether a module may have decided by the values of a tensor."""
        return any(called & READS for called in self.functions.values())


def _tensors(values: Any) -> tuple[Tensor, ...]:
    """Copies, because models may change tensors in place later. Without ``__torch_function__``, or copying would be
    recorded."""
    with torch._C.DisableTorchFunction():
        return tuple(leaf.detach().clone() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def find_blame(
    module: nn.Module, compute: Callable[[Sequence[int]], object], lengths: Sequence[int], bound: float
) -> Blame:
    """The innermost module that turns right inputs into wrong outputs; the whole one if no other does.

    It runs the module whole and in slices. Modules return from the inside out, so the first call whose outputs differ
    is the innermost::

        whole      norm  attention.qkv  attention  ...       call i of the whole run ...
        slice 0    norm  attention.qkv  attention  ...       ... is compared with call i of each slice, joined by tokens
        slice 1    norm  attention.qkv  attention  ...
                                        ^ inputs right, outputs wrong: this one. Inputs wrong, too: its caller's own
                                        code

    Args:
        module: A stage.
        compute: Runs the module, in slices of the lengths that it is called with.
        lengths: Those of slices that give other numbers than the whole sequence.
        bound: The largest relative error that rounding explains.
    """
    whole, sliced = Trace(module), Trace(module)
    with whole.recorded():
        compute((sum(lengths),))
    with sliced.recorded():
        compute(lengths)
    per_slice = len(whole.calls)
    if len(sliced.calls) != per_slice * len(lengths):  # another path through the model
        return _blame(module, "", sliced.functions, default=Mistake.BRANCH)
    for i, call in enumerate(whole.calls):
        parts = [sliced.calls[i + n * per_slice] for n in range(len(lengths))]
        if _agrees(call.outputs, [part.outputs for part in parts], lengths, bound):
            continue
        right = _agrees(call.inputs, [part.inputs for part in parts], lengths, bound)
        return _blame(module, call.path if right else call.caller, sliced.functions)
    return _blame(module, "", sliced.functions)


def _agrees(wanted: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], lengths: Sequence[int], bound: float) -> bool:
    """Whether tensors of slices, joined along tokens, are those of the whole sequence. Tensors that cannot be joined
    along tokens are left out: nothing is known of them.

    Args:
        wanted: Tensors of the whole run.
        parts: For each slice, the tensors in their places.
        lengths: Tokens of each slice; the dimension that has these sizes is that of tokens.
        bound: The largest relative error that rounding explains.
    """
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


ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"}
READS = {"__bool__", "item", "tolist"}
STATISTIC = {"mean", "std", "var", "cumsum", "cumprod", "flip", "roll", "sort", "max", "min", "norm", "sum", "topk"}


def _reason(module: nn.Module, called: set[str]) -> str:
    """The likely mistake, by what the module is and which torch functions its own forward called; the surest signs
    first."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return Mistake.RECURRENCE
    if isinstance(module, nn.modules.conv._ConvNd) or any(name.startswith("conv") for name in called):
        return Mistake.CONVOLUTION
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return Mistake.STATISTICS
    if isinstance(module, nn.MultiheadAttention) or called & ATTENTION:
        return Mistake.OWN_ATTENTION
    if called & READS:
        return Mistake.BRANCH
    if called & {"arange"}:
        return Mistake.POSITIONS
    return Mistake.MIXES if called & ({"softmax"} | STATISTIC) else Mistake.UNKNOWN


class CacheUse:
    """How modules use the cache, to notice two that share a name, and one that changes what attention needs later.

    Args:
        module: The stage.
    """

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
        """Puts methods before those of the cache that note who calls them.

        Args:
            cache: One of a new run. It must not be used for anything else.
        """
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

        def note_output(name: object, q: Tensor, out: Tensor, lse: Tensor) -> None:
            self._outputs.append((self._path[-1], out, out._version))
            keep_attention(cast(str, name), q, out, lse)

        cache.__dict__.update(begin=note_begin, store=note_store, set_state=note_state, keep_attention=note_output)

    def _note(self, kind: str, name: object) -> None:
        """A name that two modules use within one slice is a clash: the second overwrites the first one's state."""
        key = (kind, name)
        if key in self._users and self._clash is None:
            self._clash = (name, self._users[key], self._path[-1])
        self._users[key] = self._path[-1]

    def blame(self) -> Blame | None:
        """The first mistake that was seen; None if there was none."""
        changed = [path for path, out, version in self._outputs if out._version != version]
        if changed:
            return Blame(changed[0], Mistake.CHANGED_IN_PLACE)
        if self._clash is None:
            return None
        name, one, two = self._clash
        return Blame(two, Mistake.SHARED_NAME.format(name=name, one=one, two=two))
