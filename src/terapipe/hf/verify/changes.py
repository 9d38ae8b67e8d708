"""What was changed in a model after transformers made it, and whether that is exact in slices.

A small copy is made from the model's configuration, so it has none of the modules, parametrizations and hooks that were
put into the model later. They are checked here, in the model itself: the model as its configuration says it is made on
the meta device, and modules that differ from it run with few tokens. What works on each token alone is exact in slices,
whatever the rest of the model does, and what carries state from one forward to the next is not.

    model ----------\\
                     changes --> copy of the model with only the layers that have them --> calls of changed modules
    config -> meta --/                                                                     whole = slice by slice?

Examples, and what comes of them:

    layer.mlp.act_fn = nn.ReLU()             another class, which works on each token alone: exact
    weight_norm(layer.mlp.up_proj)           a parametrization, of weights only: exact
    layer.register_forward_hook(scale)       a hook that multiplies each token: exact
    layer.mlp = BatchNorm inside             its forward updates buffers: exact in evaluation mode only
    layer.mlp = mixes tokens (a convolution) results for some of the tokens differ from those for all: refused
    model.register_forward_hook(...)         around the layers: stages call it otherwise, refused without a run
"""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.quantized import bitsandbytes_layers, torchao_layers
from terapipe.hf.structure import (
    ModelStructure,
    PassThrough,
    owned_copy,
    stub,
    token_logits,
    with_layers,
)
from terapipe.hf.verify.reference import Batch, updated_buffers
from terapipe.hf.weights import meta_model
from terapipe.modeling.stage_chain import first_line, relative_error

ROWS, TOKENS, CUT = 2, 11, 4  # of a check: small numbers that are no sizes of a model's tensors
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative errors; rounding is far less, mixed tokens far more
HALF = (torch.bfloat16, torch.float16)
LISTED = 3  # names in a message
# Hooks of these modules are known: they record outputs, ask for gradients, or are there during a call only.
KNOWN_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils", "peft.")
ADAPTED = ("base_layer", "original_module")  # what layers of peft hold of the model
SAVED = "modules_to_save"  # of peft: a dict of modules in place of one

REMEDY = "undo that, or do it in the __init__ of a subclass of {}, of which a small copy can be made and verified"


@dataclass(frozen=True)
class Hook:
    """A forward hook of a module, or one that comes before its forward.

    Args:
        call: The hook itself.
        comes_before: Whether it is a pre-hook, which may change arguments; else it may change the output.
        with_kwargs: Whether it is given arguments by name, too.
    """

    call: Callable[..., Any]
    comes_before: bool
    with_kwargs: bool


@dataclass(frozen=True)
class Change:
    """A module that is not as its configuration says.

    Args:
        name: Of the module in the model.
        what: What is different, in words that follow the name: "is a ReLU where its configuration has a SiLU".
        is_replaced: Whether its class or its forward is another one: then the whole module is tried.
        hooks: That were added: then they are tried, each by itself.
        refusal: Why it is not exact, if that needs no check.
    """

    name: str
    what: str
    is_replaced: bool = False
    hooks: tuple[Hook, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class CheckedChanges:
    """Changes that are exact in slices: what a ``Decoder`` must know of them later.

    Args:
        first: One of them, in words; empty if there are none. Tensor parallel refuses a model with any.
        untrainable: Why they are exact in evaluation mode only; empty if they are in training mode, too.
    """

    first: str = ""
    untrainable: str = ""


def check_changes(model: PreTrainedModel, structure: ModelStructure) -> CheckedChanges:
    """Refuses changes of a model that are not exact in slices. ``Decoder`` calls it once, when it is made.

    Args:
        model: With its weights, if anything in it was changed; else it may be on the meta device.
        structure: Where its layers are.

    Raises:
        UnsupportedModelError: A change is not exact in evaluation mode, or cannot be tried.
    """
    changes = list(_changes(model, meta_model(model.config, kind=type(model)), structure))
    name = type(model).__name__
    for change in changes:
        if change.refusal:
            raise UnsupportedModelError(f"{change.name or name} {change.what}: {change.refusal}")
    if not changes:
        return CheckedChanges()
    if any(p.is_meta for p in model.parameters()):
        raise UnsupportedModelError(
            f"{changes[0].name} {changes[0].what}, which cannot be checked on the meta device; give {name} its weights "
            f"first, or {REMEDY.format(name)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if reason := _Probe(model, structure, changes).reason(training=False):
            raise UnsupportedModelError(f"{reason}; {REMEDY.format(name)}")
        untrainable = _Probe(model, structure, changes).reason(training=True)
    return CheckedChanges(f"{changes[0].name} {changes[0].what}", untrainable)


# Finding changes


def _changes(model: PreTrainedModel, plain: PreTrainedModel, structure: ModelStructure) -> Iterator[Change]:
    """All changes in a model.

    Args:
        model: The user's.
        plain: The model as its configuration says, on the meta device.
        structure: Where the layers are. Changes of modules around them are refused: a stage calls the inner part of the
            model, with hooks and stubs of its own.
    """
    layers, wanted = (len(list(m.get_submodule(structure.layers).children())) for m in (model, plain))
    if layers != wanted:
        yield Change(
            structure.layers,
            f"has {layers} layers",
            refusal=f"the configuration of {type(model).__name__} says {wanted}; set its number of layers to {layers}",
        )
        return
    for change in _compare(model, plain, ""):
        around = f"{structure.layers}.".startswith(f"{change.name}.") or not change.name
        if around and not change.refusal:
            refusal = "stages call it otherwise than the model does; change modules inside layers, embedding or head"
            yield Change(change.name, change.what, refusal=refusal)
        else:
            yield change


def _compare(module: nn.Module, plain: nn.Module, name: str) -> Iterator[Change]:
    """Changes of a module and of those inside it, side by side with the plain one. Below a module of another class
    nothing is compared: it is tried as a whole."""
    if type(module).__module__.startswith("peft."):  # adapters of known kinds are exact
        for inner_name, inner in _modules_inside(module, name):
            yield from _compare(inner, plain, inner_name)
        return
    yield from _differences(module, plain, name)
    if parametrize.type_before_parametrizations(module) is not type(plain):
        return
    own, wanted = ({key: m for key, m in one._modules.items() if m is not None} for one in (module, plain))
    own.pop("parametrizations", None)
    for key in own | wanted:
        path = f"{name}.{key}".removeprefix(".")
        if key not in own:
            yield Change(path, "is missing", refusal=f"its configuration has a {type(wanted[key]).__name__} there")
        elif key in wanted:
            yield from _compare(own[key], wanted[key], path)
        elif not type(own[key]).__module__.startswith("peft."):
            yield Change(path, f"is a {type(own[key]).__name__} that its configuration does not have", is_replaced=True)


def _modules_inside(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The model's own modules inside a layer of peft."""
    for key, child in module.named_children():
        inner = f"{name}.{key}"
        if key in ADAPTED:
            yield inner, child
        elif key == SAVED:
            yield from ((f"{inner}.{one}", saved) for one, saved in child.named_children())
        elif type(child).__module__.startswith("peft."):
            yield from _modules_inside(child, inner)


def _differences(module: nn.Module, plain: nn.Module, name: str) -> Iterator[Change]:
    """Changes of one module itself: class, forward, parametrizations, hooks."""
    kind, wanted = parametrize.type_before_parametrizations(module), type(plain)
    if kind is not wanted:
        yield Change(name, f"is a {kind.__name__} where its configuration has a {wanted.__name__}", is_replaced=True)
    elif "forward" in vars(module) and name:
        yield Change(name, "has another forward than its class", is_replaced=True)
    if parametrize.is_parametrized(module):
        yield Change(name, f"has a parametrization of {', '.join(module.parametrizations)}")  # type: ignore[arg-type]
    hooks = tuple(_hooks(module))
    if hooks:
        yield Change(name, f"has a forward hook ({_name(hooks[0].call)})", hooks=hooks)
    if module._backward_hooks or module._backward_pre_hooks:
        refusal = "it would see the gradient of one slice at a time; change gradients after the step"
        yield Change(name, "has a backward hook", refusal=refusal)


def _hooks(module: nn.Module) -> Iterator[Hook]:
    """Forward hooks that somebody added. Those of transformers and peft are known to leave values as they are."""
    for hooks, with_kwargs, comes_before in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, True),
        (module._forward_hooks, module._forward_hooks_with_kwargs, False),
    ):
        for number, call in hooks.items():
            if not str(getattr(_function(call), "__module__", "")).startswith(KNOWN_HOOKS):
                yield Hook(call, comes_before, number in with_kwargs)


def _function(call: Any) -> Any:
    """Unwraps partials: returns the function that they call in the end."""
    return _function(call.func) if isinstance(call, functools.partial) else call


def _name(call: Any) -> str:
    function = _function(call)
    return str(getattr(function, "__qualname__", type(function).__name__)).rpartition("<locals>.")[2]


# Checking them


class _Probe:
    """A copy of the model, with buffers of its own and the layers that have changes: of layers that were changed alike,
    the first. It is called with a few tokens, and remembers what changed modules are called with and return.

    80 layers with the same new activation are one layer here, and 79 stubs. So the check costs a forward of 11 tokens
    through one layer, whatever the size of the model.

    Args:
        model: The user's, with weights, which the copy shares.
        structure: Where its layers are.
        changes: That need a check.
    """

    def __init__(self, model: PreTrainedModel, structure: ModelStructure, changes: list[Change]) -> None:
        around = f"{structure.layers}."
        by_layer: dict[str, list[Change]] = {}  # by the number of the layer; "" for modules outside of layers
        for change in changes:
            inside = change.name.startswith(around)
            by_layer.setdefault(change.name.removeprefix(around).partition(".")[0] if inside else "", []).append(change)
        alike: dict[Any, str] = {}  # the first layer of each kind of changes
        for layer, own in by_layer.items():
            alike.setdefault(tuple(_kind(model, change, f"{around}{layer}") for change in own), layer)
        chosen = list(alike.values())
        self._changes = [change for layer in chosen for change in by_layer[layer]]
        passing = PassThrough(structure.returns)
        few = with_layers(model, structure.layers, lambda i, m: m if str(i) in chosen else stub(m, passing))
        self._model = owned_copy(few, own_buffers=True)

    def reason(self, *, training: bool) -> str:
        """Why the changes are not exact, empty if they are.

        First the copy runs as a whole: a forward that updates buffers is not exact, whoever updates them. Then each
        changed module, or hook, is called with the arguments that it had there: whole and in parts.

        Args:
            training: In which mode.
        """
        self._model.train(training)
        for module in self._model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # which is known to be exact, and would differ
        calls: dict[str, _Call] = {}
        try:
            updated = updated_buffers(self._model, lambda: self._run(calls))
        except Exception as error:  # whatever the changed model raises
            change = self._changes[0]
            return f"{change.name} {change.what}, and a run of few tokens fails: {first_line(error)}"
        if updated:
            names = ", ".join(updated[:LISTED])
            remedy = "; take modules without such buffers, or evaluation mode" if training else ""
            return f"the forward updates {names}: once for each slice, where the whole model does it once{remedy}"
        for change in self._changes:
            if change.name in calls and (reason := self._inexact(change, calls[change.name])):
                return f"{change.name} {change.what}, which is not exact in slices: {reason}"
        return ""

    def _run(self, calls: dict[str, "_Call"]) -> None:
        """Calls the copy once, and puts the first call of each changed module into ``calls``."""
        handles = [h for change in self._changes for h in _record(self._model, change.name, calls)]
        with torch.no_grad():
            token_logits(self._model, input_ids=Batch.of(self._model, TOKENS).ids, use_cache=False)
        for handle in handles:
            handle.remove()

    def _inexact(self, change: Change, call: "_Call") -> str:
        """Why one change is not exact, empty if it is: tried with the arguments of a call."""
        module = self._model.get_submodule(change.name)
        if _computes_in_half(module):
            module = copy.deepcopy(module).float()  # half precision would hide small errors
            for layer in bitsandbytes_layers(module):
                layer.compute_dtype = torch.float32
            for layer in list(torchao_layers(module)):  # which no cast reaches
                layer.weight = nn.Parameter(layer.weight.dequantize().float(), requires_grad=False)
        try:
            if change.is_replaced:
                return _not_local(lambda cut: module(*cut[0], **cut[1]), call[:2], list(module.parameters()))
            for hook in change.hooks:
                if reason := _not_local(functools.partial(_call_hook, hook, module), call, [], strictly=False):
                    return reason
        except Exception as error:  # whatever the module or the hook raises
            return first_line(error)
        return ""


def _computes_in_half(module: nn.Module) -> bool:
    """Whether weights are in half precision, or a quantized layer rounds its input to it."""
    of_weights = (p.dtype for p in module.parameters() if p.is_floating_point())
    of_layers = (getattr(layer, "compute_dtype", None) for layer in bitsandbytes_layers(module))
    return any(dtype not in BOUNDS for dtype in of_weights) or any(dtype in HALF for dtype in of_layers)


def _kind(model: nn.Module, change: Change, layer: str) -> tuple[Any, ...]:
    """Equal for changes that need to be checked once. Hooks are the same only if they are one function: closures of one
    code may differ."""
    module = model.get_submodule(change.name)
    forward = getattr(vars(module).get("forward"), "__func__", None)
    hooks = tuple(id(hook.call) for hook in change.hooks)
    return change.name.removeprefix(layer), change.what, type(module), repr(module), forward, hooks


_Call = tuple[tuple[Any, ...], dict[str, Any], Any]  # arguments, named arguments, and what was returned


def _record(model: nn.Module, name: str, calls: dict[str, _Call]) -> list[Any]:
    """Hooks that put the first call of a module into ``calls``, as it is without the hooks of others.

    Arguments are noted before any other hook changes them, the output before any other hook sees it: so hooks can be
    tried with both.

    Args:
        model: The copy.
        name: Of the module.
        calls: By name; filled in the next forward.
    """
    begun: dict[str, Any] = {}

    def begin(module: nn.Module, arguments: Any, named: Any) -> None:
        begun.setdefault(name, (_clone(arguments), _clone(named)))

    def end(module: nn.Module, arguments: Any, output: Any) -> None:
        calls.setdefault(name, (*begun[name], _clone(output)))

    module = model.get_submodule(name)
    return [
        module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        module.register_forward_hook(end, prepend=True),
    ]


def _clone(values: Any) -> Any:
    """Copies of all tensors in nested values: a module may change its arguments in place."""
    leaves, form = tree_flatten(values)
    return tree_unflatten([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves], form)


def _call_hook(hook: Hook, module: nn.Module, call: _Call) -> Any:
    """What goes on after the hook: the arguments of the module, or its output, as torch passes them on. A hook that
    returns None leaves them, or changed them in place."""
    arguments, named, output = call
    if hook.comes_before:
        result = hook.call(module, arguments, named) if hook.with_kwargs else hook.call(module, arguments)
        return (arguments, named) if result is None else result
    result = hook.call(module, arguments, named, output) if hook.with_kwargs else hook.call(module, arguments, output)
    return output if result is None else result


class _NotTokensError(Exception):
    """Something has no tokens, or they are not where those of hidden states are."""


def _not_local(
    call: Callable[[Any], Any], arguments: Any, weights: list[nn.Parameter], *, strictly: bool = True
) -> str:
    """Why the call is not the same for each row and each part of its tokens alone; empty if it is.

    Compares a random sum of all results, and its gradients, which are sensitive to every one of them:

        whole    call(2 rows of 11 tokens)                                 sum of w * result over all
        parts    call(row 0, tokens 0-3) + call(row 0, tokens 4-10)        the same weights w, cut alike
               + call(row 1, tokens 0-3) + call(row 1, tokens 4-10)

    If each token's result depends on that token alone, both sums are equal, and so are their gradients to inputs and
    weights. A module that looks at another token, or at how many there are, gives other ones.

    Args:
        call: Takes arguments and returns results, in any nesting.
        arguments: Of all tokens.
        weights: Whose gradients are compared besides those of arguments.
        strictly: Whether all arguments and results must have tokens that can be told apart. Of a hook's, those without
            are passed as they are.
    """
    leaves, form = tree_flatten(arguments)
    inputs = [_leaf(x) if isinstance(x, Tensor) else x for x in leaves]
    sources = [x for x in [*inputs, *weights] if isinstance(x, Tensor) and x.requires_grad]
    projections: list[Tensor] = []
    sums = []
    pieces = [(row, part) for row in range(ROWS) for part in (slice(0, CUT), slice(CUT, TOKENS))]
    try:
        for piece in (None, *pieces):
            cut = [_take_piece(x, piece, strictly=strictly) for x in inputs]
            results = [x for x in tree_leaves(call(tree_unflatten(cut, form))) if _is_number(x)]
            if piece is None:
                compared = [strictly or _has_tokens(x) for x in results]
                projections = [torch.randn_like(x) for x in compress(results, compared)]
            results = list(compress(results, compared))
            wanted = [_take_piece(x, piece, strictly=strictly) for x in projections]
            if [x.shape for x in results] != [x.shape for x in wanted]:
                return "shapes of what it returns do not follow those of its tokens"
            sums.append(sum((x * w).sum() for x, w in zip(results, wanted, strict=True)))
            if piece is None:
                sizes = ((x.detach() * w).abs().sum() for x, w in zip(results, wanted, strict=True))
                size = max(float(sum(sizes)), 1e-30)
    except _NotTokensError as error:
        return str(error)
    whole, parts = sums[0], sum(sums[1:])
    difference = whole - parts
    worst = abs(float(difference.detach() if isinstance(difference, Tensor) else difference)) / size
    if sources and isinstance(whole, Tensor) and whole.requires_grad:
        worst = max(worst, _gradient_error(whole, parts, sources))
    bound = max(BOUNDS.get(x.dtype, 1e-3) for x in projections) if projections else 0.0
    return "" if worst <= bound else f"results for some of the tokens differ by {worst:.1e} from those for all of them"


def _gradient_error(whole: Any, parts: Any, sources: list[Tensor]) -> float:
    """The largest difference of gradients, relative to the largest gradient."""
    wanted, mine = (
        torch.autograd.grad(value, sources, allow_unused=True, materialize_grads=True) for value in (whole, parts)
    )
    largest = max(float(g.abs().max()) for g in wanted if g.numel())
    return max(relative_error(a, b, largest) for a, b in zip(wanted, mine, strict=True))


def _leaf(x: Tensor) -> Tensor:
    """A tensor to differentiate by, at least in float32; whole numbers as they are."""
    x = x.detach()
    if x.is_floating_point():
        x = x.to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
    return x


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _has_tokens(x: Tensor) -> bool:
    """Whether the first dimensions are rows and tokens, one row for all, or all tokens in one dimension, as experts see
    them. The sizes 2 and 11 are those of nothing else in a model."""
    return tuple(x.shape[:2]) in ((ROWS, TOKENS), (1, TOKENS)) or x.shape[:1] == (ROWS * TOKENS,)


def _take_piece(x: Any, piece: tuple[int, slice] | None, *, strictly: bool) -> Any:
    """The part of a tensor that belongs to some tokens of a row; a copy, which may be changed in place."""
    if not isinstance(x, Tensor) or not x.ndim:
        return x
    sizes = tuple(x.shape)
    if not _has_tokens(x) and strictly and (sizes[0] == ROWS or TOKENS in sizes or ROWS * TOKENS in sizes):
        raise _NotTokensError(f"it works on a tensor of shape {sizes}, in which tokens cannot be told apart")
    if piece is None or not _has_tokens(x):
        return x.clone()
    row, part = piece
    if sizes[0] == ROWS * TOKENS:
        return x[row * TOKENS + part.start : row * TOKENS + part.stop].clone()
    return x[row : row + 1, part].clone() if sizes[0] == ROWS else x[:, part].clone()
