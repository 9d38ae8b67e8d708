"""Checks that any stage is exact in slices: whole against slices, each mode of recomputation, the loss.

A model of one's own can be wrong in ways that raise nothing: attention that sees only its slice, a convolution without
carried state, a loss that is a mean. The stage is run on a few made-up tokens, whole and in uneven slices, and outputs
and gradients are compared. Where they differ, a second run with hooks names the module and the likely mistake.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from terapipe.modeling.slice_cache import SliceCache, SliceContext
from terapipe.modeling.stage import IGNORE, RandomState, Stage
from terapipe.modeling.stage_chain import ChainResult, SliceLoss, StageChain, device_of, token_dim
from terapipe.modeling.stage_trace import Trace, find_blame
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.recompute import Recompute

LENGTHS = (9, 1, 12, 7)  # uneven, and one of a single token
SIZE = 2  # sequences
COPIED = 1 << 26  # parameters of a stage up to which it is checked as a copy in float64
SAMPLE = 1 << 16  # entries of a gradient that are compared, at most
# The largest error that rounding explains, by dtype: relative to a parameter's largest gradient, or to a share of the
# largest gradient of all, because some gradients are zero but for rounding. Parts of many models compute in float32
# whatever their dtype.
BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-2}
HALF_BOUND, FLOOR = 0.2, 1e-2


@dataclass(frozen=True)
class Problem:
    """One way in which a model is not exact."""

    check: str  # "slices", "stages", "weights", "loss", or a mode of recomputation
    where: str  # the module or parameter
    error: float  # relative; infinity if it cannot be computed at all
    reason: str  # what is wrong and what to do

    def __str__(self) -> str:
        size = "" if self.error == float("inf") else f" (relative error {self.error:.1e})"
        return f"{self.where}: {self.reason}{size}"


class Check(NamedTuple):
    """The outcome of checking one stage."""

    errors: dict[str, float]  # by check, the largest relative error
    problems: list[Problem]
    dtype: torch.dtype  # in which it was computed
    raised: bool = False  # whether the model's own code raised in slices


class _Run(NamedTuple):
    """What one run computed."""

    result: ChainResult
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class StageCheck:
    """One stage and the made-up batch it is checked with.

    - ``stage``: it is copied in float64 if it is small, and otherwise run as it is; weights, gradients, buffers, modes
      and random generators are the same afterwards.
    - ``first``, ``last``: whether it is the model's first stage, and so takes token ids, or its last, which has a loss.
    - ``own_loss``: whether the stage's ``loss`` is what trains it; otherwise its ``logits`` are compared.
    - ``lengths``: tokens of the slices.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        first: bool,
        last: bool,
        own_loss: bool = True,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        self._stage = _copy_in_float64(stage) or stage
        self._is_copy = self._stage is not stage
        self._lengths, self._tokens = tuple(lengths), sum(lengths)
        self._device = device_of(self._stage)
        self._first, self._last, self._own_loss = first, last, own_loss
        self._initial = {name: b.clone() for name, b in self._stage.named_buffers()}
        floating = [p.dtype for p in self._stage.parameters() if p.is_floating_point()]
        self.dtype = floating[0] if floating else torch.get_default_dtype()
        self.bound = BOUNDS.get(self.dtype, HALF_BOUND)
        self._x, self._labels, self._weights = self._make_batch()
        self._has_raised = False

    def run(self, modes: Iterable[Recompute] = ("block", "full")) -> Check:
        """The first problem of slices, or those of the modes of recomputation."""
        with self._left_as_it_was():
            problems, errors = self._check_slices()
            if not problems:
                for mode in modes:
                    error, reason = self._check_mode(mode)
                    errors[mode] = error
                    problems += reason
        return Check(errors, problems, self.dtype, self._has_raised)

    # Whole against slices

    def _check_slices(self) -> tuple[list[Problem], dict[str, float]]:
        use = _CacheUse(self._stage)
        try:
            if self._last and self._own_loss and (problem := self._check_sum()):
                return [problem], {"loss": problem.error}
            with self._without_dropout() as is_random:
                whole = self._compute((self._tokens,))
                if not self._is_reproducible(whole):
                    return [self._irreproducible("slices", "results differ from call to call without dropout")], {}
                if problem := self._check_gradient(whole):
                    return [problem], {}
                trace = Trace(self._stage)
                with use.watched(), trace.recorded():
                    sliced = self._compute(self._lengths, watch=use.watch)
                errors = _errors(whole, sliced)
                worst = max(errors, key=errors.__getitem__)
                problem = use.problem()
                if problem is None and errors[worst] > self.bound:
                    problem = self._explain(whole, errors, self._lengths)
                if problem is None and trace.reads_values and len(self._lengths) > 1:
                    problem = self._check_branches(whole)
            if problem is None and is_random:
                problem = self._check_buffers()
        except Exception as error:  # whatever the model's own code raises
            return [self._look_at_cache(use) or self._raised("slices", error)], {}
        return ([problem] if problem else []), {"slices": errors[worst]}

    def _look_at_cache(self, use: "_CacheUse") -> Problem | None:
        """What the modules did with the cache before they failed."""
        if use.problem() is None:
            with suppress(Exception), use.watched():
                self._compute((self._tokens,), watch=use.watch)
        return use.problem()

    def _check_branches(self, whole: _Run) -> Problem | None:
        """A forward that decides by values may have decided alike by chance: single tokens are many more chances."""
        lengths = (1,) * self._tokens
        with suppress(Exception):  # a layer may need more tokens
            errors = _errors(whole, self._compute(lengths))
            if max(errors.values()) > self.bound:
                return self._explain(whole, errors, lengths)
        return None

    def _check_buffers(self) -> Problem | None:
        """In training mode, where random numbers forbid to compare anything else."""
        changed = self._changed_buffers(self._compute((self._tokens,)))
        return self._blame_buffer(changed[0], float("inf")) if changed else None

    def _changed_buffers(self, run: _Run) -> list[str]:
        """Floating ones: a counter of calls does no harm."""
        floating = ((name, buffer) for name, buffer in run.buffers.items() if buffer.is_floating_point())
        return [name for name, buffer in floating if not buffer.equal(self._initial[name])]

    def _blame_buffer(self, name: str, error: float) -> Problem:
        module, _, buffer = name.rpartition(".")
        return Problem("slices", module, error, BUFFER.format(name=buffer))

    def _check_sum(self) -> Problem | None:
        """Whether the loss of some tokens is the sum of the losses of its parts."""
        hidden = self._random_hidden(self._tokens)
        dim, middle = token_dim(self._stage, SIZE), self._tokens // 3
        parts = [self._stage.hidden_shape(SIZE, length)[dim] for length in (middle, self._tokens - middle)]
        with torch.no_grad(), RandomState.now(self._device).restored():
            one, two = torch.split(hidden, parts, dim)
            whole = float(self._stage.loss(hidden, self._labels))
            halves = float(self._stage.loss(one, self._labels[:, :middle]))
            halves += float(self._stage.loss(two, self._labels[:, middle:]))
        error = abs(halves - whole) / max(abs(whole), 1e-30)
        if error <= self.bound:
            return None
        return Problem("loss", f"{type(self._stage).__name__}.loss", error, LOSS_IS_NO_SUM)

    def _check_gradient(self, whole: _Run) -> Problem | None:
        """Whether the stage passes a gradient back: without one, all slices are wrong in the same way."""
        trained = [name for name, p in self._stage.named_parameters() if p.requires_grad]
        missing = [name for name in trained if name not in whole.gradients]
        if whole.result.attached or not (missing or not self._first):
            return None
        where = missing[0] if missing else type(self._stage).__name__
        return Problem("slices", where, float("inf"), NO_GRADIENT)

    def _explain(self, whole: _Run, errors: dict[str, float], lengths: Sequence[int]) -> Problem:
        """Names the module and the likely mistake, from a run that looks at every module."""
        worst = max(errors, key=errors.__getitem__)
        error = errors[worst]
        if changed := self._changed_buffers(whole):
            return self._blame_buffer(changed[0], error)
        if max(errors["output"], errors["loss"]) <= self.bound:
            return Problem("slices", worst, error, GRADIENT_ONLY)
        blame = find_blame(self._stage, lambda cut: self._compute(cut), lengths, self.bound)
        return Problem("slices", blame.where, error, blame.reason)

    def _raised(self, check: str, error: Exception) -> Problem:
        self._has_raised = check == "slices"
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        if "second time" in line or "already been freed" in line:
            line = KEPT_OUTSIDE
        return Problem(check, type(self._stage).__name__, float("inf"), line)

    def _irreproducible(self, check: str, what: str) -> Problem:
        return Problem(check, type(self._stage).__name__, float("inf"), f"{what}: {OTHER_RANDOM}")

    # Recomputation

    def _check_mode(self, mode: Recompute) -> tuple[float, list[Problem]]:
        """Slices with recomputation against slices without, in training mode, with the same random numbers."""
        try:
            plain = self._compute(self._lengths)
            repeated, again = self._compute(self._lengths), self._compute(self._lengths, mode=mode)
        except Exception as error:
            return float("inf"), [self._raised(mode, error)]
        errors = _errors(plain, again)
        worst = max(errors, key=errors.__getitem__)
        if not _equal(plain.result.output, repeated.result.output, self.bound):
            return errors[worst], [self._irreproducible(mode, "a forward cannot be computed again")]
        wrong = errors[worst] > self.bound
        return errors[worst], [Problem(mode, worst, errors[worst], NOT_AGAIN.format(mode=mode))] if wrong else []

    # Several stages against one

    def check_stages(self, parts: Sequence[Stage], tied: Sequence[str]) -> tuple[float, list[Problem]]:
        """The stages one after the other against this one, which holds all layers."""
        with self._left_as_it_was(), self._without_dropout():
            try:
                whole = self._compute((self._tokens,))
                chain = [(_copy_in_float64(part) if self._is_copy else None) or part for part in parts]
                for part in chain:
                    part.train(self._stage.training)
                split = self._compute((self._tokens,), chain=chain, tied=tied)
            except Exception as error:
                return float("inf"), [self._raised("stages", error)]
        errors = _errors(whole, split._replace(buffers=whole.buffers))
        worst = max(errors, key=errors.__getitem__)
        wrong = errors[worst] > self.bound
        return errors[worst], [Problem("stages", worst, errors[worst], WRONG_STAGES)] if wrong else []

    # Runs

    def _compute(
        self,
        lengths: Sequence[int],
        *,
        mode: Recompute = "none",
        watch: Callable[[SliceCache], None] = lambda cache: None,
        chain: Sequence[Stage] = (),
        tied: Sequence[str] = (),
    ) -> _Run:
        """With the same buffers and random numbers each time. ``chain`` are stages to run in place of this one, of
        which the first and the last may share a parameter, each under its own name."""
        stages = list(chain) or [self._stage]
        for stage in stages:
            stage.zero_grad(set_to_none=True)
        self._restore_buffers()
        torch.manual_seed(0)
        loss = self._loss(stages[-1])
        result = StageChain(stages).run(self._x, lengths, loss, mode=mode, watch=watch)
        gradients: dict[str, Tensor] = {}
        for own, p in (pair for stage in stages for pair in stage.named_parameters()):
            name = tied[0] if own in tied else own
            if p.grad is not None:
                sample = _sample(p.grad)
                gradients[name] = gradients[name] + sample if name in gradients else sample
        return _Run(result, gradients, {name: b.clone() for name, b in self._stage.named_buffers()})

    def _loss(self, stage: Stage) -> SliceLoss:
        """The last stage's own, or a weighted sum of what it gives."""
        if self._last and self._own_loss:
            return lambda hidden, start, end: stage.loss(hidden, self._labels[:, start:end])
        has_logits = self._last and stage.offers("logits")

        def weigh(hidden: Tensor, start: int, end: int) -> Tensor:
            if has_logits:
                scores = stage.logits(hidden)
                whole = scores.full_tensor() if isinstance(scores, DTensor) else scores
                return (whole * torch.linspace(-1, 1, whole.shape[-1], device=whole.device)).sum()
            dim = token_dim(self._stage, SIZE)
            first = self._stage.hidden_shape(SIZE, start)[dim] if start else 0
            return (hidden * self._weights.narrow(dim, first, hidden.shape[dim])).sum()

        return weigh

    def _is_reproducible(self, whole: _Run) -> bool:
        return _equal(whole.result.output, self._compute((self._tokens,)).result.output, self.bound)

    def _make_batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Input, labels, and what hidden states are weighed with. Every vocabulary has the tokens 0 and 1."""
        generator = torch.Generator().manual_seed(0)
        ids, labels = (
            torch.randint(number or 2, (SIZE, self._tokens), generator=generator).to(self._device)
            for number in self._stage.vocabulary
        )
        labels[0, 3] = IGNORE
        return ids if self._first else self._random_hidden(self._tokens), labels, self._random_hidden(self._tokens, 1)

    def _random_hidden(self, tokens: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = self._stage.hidden_shape(SIZE, tokens)
        return torch.randn(shape, generator=generator).to(device=self._device, dtype=self.dtype)

    # Leaving everything as it was

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        gradients = [(p, p.grad) for p in self._stage.parameters()]
        generators = [(g, g.get_state()) for g in _generators(self._stage)]
        try:
            with RandomState.now(self._device).restored(), torch.enable_grad():
                yield
        finally:
            self._restore_buffers()
            for p, gradient in gradients:
                p.grad = gradient
            for generator, state in generators:
                generator.set_state(state)

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self._stage.named_buffers():
                if name in self._initial and buffer.shape == self._initial[name].shape:
                    buffer.copy_(self._initial[name])

    @contextmanager
    def _without_dropout(self) -> Iterator[bool]:
        """In training mode if that draws no random numbers beside those of nn.Dropout, in evaluation mode otherwise.
        Yields whether it does."""
        dropouts = [(m, m.p) for m in self._stage.modules() if isinstance(m, _DropoutNd)]
        modes = [(m, m.training) for m in self._stage.modules()]
        for module, _ in dropouts:
            module.p = 0.0
        try:
            torch.manual_seed(0)
            undrawn = RandomState.now(self._device)
            first = self._compute((self._tokens,))
            is_random = not (_same_state(undrawn) and self._is_reproducible(first))
            if is_random:
                self._stage.eval()
            yield is_random
        finally:
            for module, p in dropouts:
                module.p = p
            for each, training in modes:
                each.training = training


class _CacheUse:
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

    def problem(self) -> Problem | None:
        changed = [path for path, out, version in self._outputs if out._version != version]
        if changed:
            return Problem("slices", changed[0], float("inf"), CHANGED_IN_PLACE)
        if self._clash is None:
            return None
        name, one, two = self._clash
        return Problem("slices", two, float("inf"), SHARED_NAME.format(name=name, one=one, two=two))


LOSS_IS_NO_SUM = (
    f"the loss of a slice must be the sum over its labels that are not {IGNORE}, and that of two parts their sum; do "
    "not divide by their number (reduction='sum', ignore_index=-100): the step divides by that of the whole batch"
)
BUFFER = (
    "the forward changes the buffer {name!r}, so that a slice is computed with other numbers than the one before it; "
    "keep that layer in evaluation mode, or take one that changes no buffer, such as nn.LayerNorm"
)
GRADIENT_ONLY = (
    "outputs of slices are right and this gradient is not: something goes from slice to slice without its gradient; "
    "hand it on by tp.attend or cache.set_state, and do not detach it"
)
NO_GRADIENT = "the stage's output has no gradient; do not detach it, nor compute it under torch.no_grad()"
WRONG_STAGES = (
    "stages one after the other give other numbers than all layers in one; stage(first, last) must give the layers "
    "from first to last - 1, the embedding if first is 0, and head and loss if last is the number of layers"
)
KEPT_OUTSIDE = (
    "a module keeps a tensor of an earlier slice, whose backward comes later; hand it on by cache.set_state and take "
    "it from cache.get_state, through which gradients come back"
)
OTHER_RANDOM = (
    "it draws random numbers that torch's seed does not determine (a torch.Generator of its own, numpy, random); draw "
    "them from torch's default generator"
)
NOT_AGAIN = (
    "computed again by recompute={mode!r}, a layer gives other gradients; it must not keep anything between calls"
)
CHANGED_IN_PLACE = (
    "the output of tp.attend is changed in place, but its backward needs it; write out = out * 2 in place of out *= 2"
)
SHARED_NAME = (
    "{one} and {two} use the cache under the same name {name!r}, and overwrite each other's keys, values or states; "
    "give each layer a name of its own, such as its number in the model"
)


def check_weights(model: nn.Module | None, stage: nn.Module) -> Problem | None:
    """Whether a stage has the weights of the model that it is a part of, wherever both have them."""
    whole = {} if model is None else dict(model.named_parameters())
    for name, p in stage.named_parameters():
        own = whole.get(name)
        if own is None or own.is_meta or isinstance(p, DTensor) or own.shape != p.shape:
            continue
        if not torch.equal(_sample(own).to(p.device, p.dtype), _sample(p)):
            return Problem("weights", name, float("inf"), DRAWN_ANEW)
    return None


DRAWN_ANEW = (
    "stage() returned another weight than the model has; let stages share the model's modules, or copy its weights, "
    "rather than draw them anew"
)


def _copy_in_float64(stage: Stage) -> Stage | None:
    """None where the stage is too large, split over devices, or cannot be copied or converted."""
    parameters = list(stage.parameters())
    if sum(p.numel() for p in parameters) > COPIED or any(isinstance(p, DTensor) for p in parameters):
        return None
    with suppress(Exception):  # such as tensors that are no leaves
        double = copy.deepcopy(stage)
        return None if _generators(double) else double.double()
    return None


def _generators(module: nn.Module) -> list[torch.Generator]:
    return [value for m in module.modules() for value in vars(m).values() if isinstance(value, torch.Generator)]


def _sample(x: Tensor) -> Tensor:
    """At most so many entries, evenly spread: a large stage has no room for a second copy of its gradients."""
    flat = to_local(x.detach()).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


def _errors(wanted: _Run, other: _Run) -> dict[str, float]:
    """The error of the output, of each gradient, and of each buffer that the forward changed."""
    loss, other_loss = (torch.tensor(run.result.loss, dtype=torch.float64) for run in (wanted, other))
    errors = {"output": _relative(wanted.result.output, other.result.output, 0.0)}
    errors["loss"] = _relative(loss, other_loss, 1.0)
    gradients, others = dict(wanted.gradients), dict(other.gradients)
    if wanted.result.input_gradient is not None and other.result.input_gradient is not None:
        gradients["input"], others["input"] = wanted.result.input_gradient, other.result.input_gradient
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    for name in gradients.keys() | others.keys():
        mine, theirs = gradients.get(name), others.get(name)
        some = mine if mine is not None else theirs
        assert some is not None
        zeros = torch.zeros_like(some)
        errors[name] = _relative(zeros if mine is None else mine, zeros if theirs is None else theirs, largest)
    for name, buffer in wanted.buffers.items():
        if buffer.is_floating_point() and buffer.shape == other.buffers[name].shape:
            errors[name] = _relative(buffer, other.buffers[name], 0.0)
    return errors


def _relative(wanted: Tensor, other: Tensor, largest: float) -> float:
    if wanted.shape != other.shape:
        return float("inf")
    scale = max(wanted.abs().max().item(), FLOOR * largest, 1e-30) if wanted.numel() else 1.0
    error = (other - wanted).abs().max().item() / scale if wanted.numel() else 0.0
    return error if error == error else float("inf")


def _equal(one: Tensor, two: Tensor, bound: float) -> bool:
    return _relative(one, two, 0.0) <= bound


def _same_state(state: RandomState) -> bool:
    now = RandomState.now(state.device)
    same_accelerator = state.accelerator is None or now.accelerator is None or state.accelerator.equal(now.accelerator)
    return state.cpu.equal(now.cpu) and same_accelerator
