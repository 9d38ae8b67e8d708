"""Finds the module that gives other numbers in slices than for the whole sequence, and what it called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


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
        scale = max(whole.abs().max().item(), 1e-30)
        if not (joined - whole).abs().max().item() <= bound * scale:
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
