"""Whether a model is exact in slices and stages, whoever wrote it: weights, slices, stages, recomputation, loss.

A model of one's own can be wrong in ways that raise nothing: attention that sees only its slice, a convolution without
carried state, a loss that is a mean. So a stage is run on a few made-up tokens, whole and in uneven slices, and outputs
and gradients are compared. Where they differ, a second run with watchers names the module and the likely mistake
(stage_chain.py)::

    weights    the stage's = the model's                     else: stage() drew new ones
    loss       of all tokens = of a third + of the rest      else: it is a mean
    slices     whole = (9, 1, 12, 7) tokens                  else: find_blame names the module
    block      slices, layers computed again = slices        else: a layer keeps something between calls
    full       slices, stage computed again = slices
    stages     all layers in one = one stage after another   else: stage(first, last) gives other layers

``verify`` does all of it for a whole model, ``check_stage`` all but the last for a stage that a pipeline holds, before
its first step. On a step nothing of this runs.
"""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import IGNORE, PipelineModel, RandomState, Stage, require_model, require_stage
from terapipe.modeling.stage_chain import (
    CacheUse,
    ChainResult,
    Mistake,
    SliceLoss,
    StageChain,
    Trace,
    changed_buffers,
    device_of,
    find_blame,
    first_line,
    relative_error,
    token_dim,
)
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.recompute import MODES, Recompute

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
    """One way in which a model is not exact.

    Attributes:
        check: "slices", "stages", "weights", "loss", or a mode of recomputation.
        where: The module or parameter.
        error: Relative; infinity if it cannot be computed at all.
        reason: What is wrong and what to do.
    """

    check: str
    where: str
    error: float
    reason: str

    def __str__(self) -> str:
        size = "" if self.error == float("inf") else f" (relative error {self.error:.1e})"
        return f"{self.where}: {self.reason}{size}"


class Check(NamedTuple):
    """The outcome of checking one stage.

    Attributes:
        errors: By check, the largest relative error.
        problems: Empty if all is exact.
        dtype: In which it was computed.
        raised: Whether the model's own code raised in slices.
    """

    errors: dict[str, float]
    problems: list[Problem]
    dtype: torch.dtype
    raised: bool = False


@dataclass(frozen=True)
class Verification:
    """What ``verify`` saw. ``print`` it for a table with a line for each check, and the mistakes by name::

        MyModel is NOT exact in slices and stages (float64, 0.3 s)
          slices     largest relative error 1.2e+00
          slices: layers.0.attention (Attention): attention sees only the tokens of its slice; call tp.attend(...) ...

    Attributes:
        model: The model's class.
        dtype: In which it was computed: float64 if it is small enough to be copied.
        errors: By check, the largest relative error of outputs and gradients.
        problems: What is wrong; modes of recomputation may be, while the model is exact without them.
        seconds: How long it took.
    """

    model: str
    dtype: str
    errors: Mapping[str, float]
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether slices and stages give the loss and the gradients of the whole model."""
        return all(problem.check in MODES for problem in self.problems)

    @property
    def recompute_modes(self) -> tuple[Recompute, ...]:
        """The modes of recomputation that are exact, too."""
        wrong = {problem.check for problem in self.problems}
        return tuple(mode for mode in MODES if mode not in wrong) if self.exact else ()

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        lines = [f"{self.model} is {verdict} in slices and stages ({self.dtype}, {self.seconds:.1f} s)"]
        lines += [f"  {check:10s} largest relative error {error:.1e}" for check, error in self.errors.items()]
        return "\n".join([*lines, *(f"  {problem.check}: {problem}" for problem in self.problems)])


def verify(
    model: PipelineModel,
    *,
    num_stages: int = 2,
    slice_lengths: Sequence[int] = LENGTHS,
    device: torch.device | None = None,
) -> Verification:
    """Runs ``model`` on two made-up sequences, whole and cut, and compares outputs and every gradient.

    Args:
        model: Of any size: one that is too large to be copied in float64 is run as it is, with wider bounds.
        num_stages: Stages that it is also cut into.
        slice_lengths: Tokens of the slices. Uneven ones, and one of a single token, find more mistakes.
        device: Where it runs; by default where the model's weights are, or the CPU.

    Returns:
        A table to print; ``exact`` says whether it can be trained.
    """
    require_model(model)
    if not 1 <= num_stages <= model.num_layers:
        raise ValueError(
            f"a model of {model.num_layers} layers has 1 to {model.num_layers} stages, got num_stages {num_stages}"
        )
    began = time.perf_counter()
    if device is None:
        device = device_of(model.whole_module() or nn.Module())
    whole = require_stage(model.stage(0, model.num_layers, device))
    again = model.stage(0, model.num_layers, device)
    problem = check_weights(model.whole_module(), whole) or check_weights(whole, again)
    if problem is not None:
        return _result(model, Check({}, [problem], torch.float64), began)
    check = StageCheck(whole, first=True, last=True, lengths=slice_lengths)
    errors, problems, dtype, _ = check.run()
    if num_stages > 1 and all(problem.check in MODES for problem in problems):
        edges = [model.num_layers * k // num_stages for k in range(num_stages + 1)]
        parts = [model.stage(a, b, device) for a, b in pairwise(edges)]
        drawn = [problem for part in parts if (problem := check_weights(whole, part))]
        error, wrong = (float("inf"), drawn[:1]) if drawn else check.check_stages(parts, model.tied)
        errors, problems = errors | {"stages": error}, problems + wrong
    return _result(model, Check(errors, problems, dtype), began)


def _result(model: object, check: Check, began: float) -> Verification:
    dtype, seconds = str(check.dtype).removeprefix("torch."), time.perf_counter() - began
    return Verification(type(model).__name__, dtype, check.errors, tuple(check.problems), seconds)


def check_stage(
    model: PipelineModel,
    stage: Stage,
    *,
    first: bool,
    last: bool,
    own_loss: bool,
    plan_lengths: Sequence[Sequence[int]],
) -> dict[Recompute, str]:
    """The cheap form that a pipeline runs before its first step, on a stage that it holds.

    Args:
        model: Whose stage it is.
        stage: It is left as it was.
        first: Whether it is the model's first stage, which takes token ids.
        last: Whether it is the model's last stage, which has a loss.
        own_loss: Whether the stage's ``loss`` is what trains it.
        plan_lengths: Those of the plan's slices, by microbatch: where none is cut, slices need not be exact.

    Returns:
        Why modes of recomputation are not exact, by mode.

    Raises:
        ValueError: for anything else that is not exact.
    """
    problem = check_weights(model.whole_module(), stage)
    if problem is not None:
        raise ValueError(_refusal(model, problem))
    whole = all(len(row) == 1 for row in plan_lengths)
    lengths: tuple[int, ...] = (sum(LENGTHS),) if whole else LENGTHS
    check = StageCheck(stage, first=first, last=last, own_loss=own_loss, lengths=lengths).run()
    unit = gcd(*(length for row in plan_lengths for length in row))
    if check.raised and unit > 1:  # some layers know only multiples of a number of tokens
        lengths = (4 * unit,) if whole else (2 * unit, unit, unit)
        check = StageCheck(stage, first=first, last=last, own_loss=own_loss, lengths=lengths).run()
    for problem in check.problems:
        if problem.check not in MODES:
            raise ValueError(_refusal(model, problem))
    return {mode: str(problem) for problem in check.problems for mode in MODES if mode == problem.check}


def _refusal(model: object, problem: Problem) -> str:
    """The message of a step that is refused: the mistake, how to look for more, and how to go on regardless."""
    return (
        f"{type(model).__name__} would be trained with wrong gradients. {problem}. terapipe.verify(model) checks all "
        "of it in one process; Pipeline(..., verify=False) leaves this check out"
    )


# One stage


class _Run(NamedTuple):
    """What one run computed.

    Attributes:
        result: Outputs and loss.
        gradients: Samples of those of all parameters, by name.
        buffers: Copies of all buffers after the run.
    """

    result: ChainResult
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class StageCheck:
    """One stage and the made-up batch it is checked with.

    Args:
        stage: It is copied in float64 if it is small, and otherwise run as it is; weights, gradients, buffers, modes
            and random generators are the same afterwards.
        first: Whether it is the model's first stage, and so takes token ids.
        last: Whether it is the model's last stage, and so has a loss.
        own_loss: Whether the stage's ``loss`` is what trains it; otherwise its ``logits`` are compared.
        lengths: Tokens of the slices.

    Attributes:
        dtype: That of the stage's parameters.
        bound: The largest relative error that rounding explains in this dtype.
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

    def run(self, modes: Iterable[Recompute] = MODES[1:]) -> Check:
        """Checks the stage. Finds the first problem of slices, or if there is none, those of the modes of
        recomputation.

        Args:
            modes: Those to check. "none" is what they are compared with.
        """
        with self._left_as_it_was():
            problems, errors = self._check_slices()
            if not problems:
                for mode in modes:
                    errors[mode], wrong = self._check_mode(mode)
                    problems += wrong
        return Check(errors, problems, self.dtype, self._has_raised)

    # Whole against slices

    def _check_slices(self) -> tuple[list[Problem], dict[str, float]]:
        """Compares the whole sequence with slices. Cheap and clear checks come first: where the loss is a mean or
        nothing has a gradient, comparing slices would only say that all is wrong."""
        use = CacheUse(self._stage)
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
                problem = _problem_of(use)
                if problem is None and errors[worst] > self.bound:
                    problem = self._explain(whole, errors, self._lengths)
                if problem is None and trace.reads_values and len(self._lengths) > 1:
                    problem = self._check_branches(whole)
            if problem is None and is_random:
                problem = self._check_buffers()
        except Exception as error:  # whatever the model's own code raises
            return [self._look_at_cache(use) or self._error_problem("slices", error)], {}
        return ([problem] if problem else []), {"slices": errors[worst]}

    def _look_at_cache(self, use: CacheUse) -> Problem | None:
        """What modules did with the cache before they failed: a name that two of them share often ends in an error of
        shapes, which would say nothing of the cause."""
        if use.blame() is None:
            with suppress(Exception), use.watched():
                self._compute((self._tokens,), watch=use.watch)
        return _problem_of(use)

    def _check_branches(self, whole: _Run) -> Problem | None:
        """A forward that decides by values may have decided alike by chance. Slices of single tokens are many more
        chances to decide otherwise."""
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
        """Buffers with numbers that a forward computes with: a counter of calls, which is whole, does no harm."""
        return [name for name in changed_buffers(self._initial, run.buffers) if run.buffers[name].is_floating_point()]

    def _blame_buffer(self, name: str, error: float) -> Problem:
        module, _, buffer = name.rpartition(".")
        return Problem("slices", module, error, Mistake.BUFFER.format(name=buffer))

    def _check_sum(self) -> Problem | None:
        """Whether the loss of some tokens is the sum of the losses of its parts. A mean is not, and would weigh short
        slices more."""
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
        return Problem("loss", f"{type(self._stage).__name__}.loss", error, Mistake.LOSS_IS_NO_SUM)

    def _check_gradient(self, whole: _Run) -> Problem | None:
        """Whether the stage passes a gradient back: without one, all slices are wrong in the same way."""
        trained = [name for name, p in self._stage.named_parameters() if p.requires_grad]
        missing = [name for name in trained if name not in whole.gradients]
        if whole.result.attached or not (missing or not self._first):
            return None
        where = missing[0] if missing else type(self._stage).__name__
        return Problem("slices", where, float("inf"), Mistake.NO_GRADIENT)

    def _explain(self, whole: _Run, errors: dict[str, float], lengths: Sequence[int]) -> Problem:
        """Names the module and the likely mistake, from a run that looks at every module."""
        worst = max(errors, key=errors.__getitem__)
        error = errors[worst]
        if changed := self._changed_buffers(whole):
            return self._blame_buffer(changed[0], error)
        if max(errors["output"], errors["loss"]) <= self.bound:
            return Problem("slices", worst, error, Mistake.GRADIENT_ONLY)
        blame = find_blame(self._stage, lambda cut: self._compute(cut), lengths, self.bound)
        return Problem("slices", blame.where, error, blame.reason)

    def _error_problem(self, check: str, error: Exception) -> Problem:
        """The problem that the model's own code raises. Autograd's error of a graph that is gone means that a slice
        kept a tensor of an earlier one."""
        self._has_raised = check == "slices"
        line = first_line(error, limit=None)
        if "second time" in line or "already been freed" in line:
            line = Mistake.KEPT_OUTSIDE
        return Problem(check, type(self._stage).__name__, float("inf"), line)

    def _irreproducible(self, check: str, what: str) -> Problem:
        return Problem(check, type(self._stage).__name__, float("inf"), f"{what}: {Mistake.OTHER_RANDOM}")

    def _check_mode(self, mode: Recompute) -> tuple[float, list[Problem]]:
        """Compares slices with recomputation to slices without, in training mode, with the same random numbers. A
        second run without says whether the stage gives the same numbers twice at all."""
        try:
            plain = self._compute(self._lengths)
            repeated, again = self._compute(self._lengths), self._compute(self._lengths, mode=mode)
        except Exception as error:
            return float("inf"), [self._error_problem(mode, error)]
        errors = _errors(plain, again)
        if relative_error(plain.result.output, repeated.result.output) > self.bound:
            return max(errors.values()), [self._irreproducible(mode, "a forward cannot be computed again")]
        return self._judge(mode, errors, Mistake.NOT_AGAIN.format(mode=mode))

    def check_stages(self, parts: Sequence[Stage], tied: Sequence[str]) -> tuple[float, list[Problem]]:
        """Compares the stages one after the other with this one, which holds all layers.

        Args:
            parts: All stages of the model in order.
            tied: Names of parameters of which the first and the last stage hold a copy each; their gradients are
                summed.

        Returns:
            The largest relative error, and the problem if it is more than rounding.
        """
        with self._left_as_it_was(), self._without_dropout():
            try:
                whole = self._compute((self._tokens,))
                chain = [(_copy_in_float64(part) if self._is_copy else None) or part for part in parts]
                for part in chain:
                    part.train(self._stage.training)
                split = self._compute((self._tokens,), chain=chain, tied=tied)
            except Exception as error:
                return float("inf"), [self._error_problem("stages", error)]
        errors = _errors(whole, split._replace(buffers=whole.buffers))
        return self._judge("stages", errors, Mistake.WRONG_STAGES)

    def _judge(self, check: str, errors: dict[str, float], reason: str) -> tuple[float, list[Problem]]:
        """The largest error, and a problem where it is, if rounding does not explain it."""
        worst = max(errors, key=errors.__getitem__)
        return errors[worst], [Problem(check, worst, errors[worst], reason)] if errors[worst] > self.bound else []

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
        """One run, with the same buffers and random numbers each time.

        Args:
            lengths: Tokens of the slices.
            mode: What backwards compute again.
            watch: Called with each new cache.
            chain: Stages to run in place of this one.
            tied: Names of a parameter that the first and the last of them share, each under its own name.
        """
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
        """What a run computes of the last hidden states: the last stage's own loss, or a weighted sum of what it gives.
        Weights differ from place to place, so that errors at several places do not cancel."""
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
        """Whether a second run gives the same numbers: otherwise no comparison says anything."""
        return relative_error(whole.result.output, self._compute((self._tokens,)).result.output) <= self.bound

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
        """Hidden states for a stage that is not the first, or for its loss alone, the same each time."""
        generator = torch.Generator().manual_seed(seed)
        shape = self._stage.hidden_shape(SIZE, tokens)
        return torch.randn(shape, generator=generator).to(device=self._device, dtype=self.dtype)

    # Leaving everything as it was

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Inside, the stage may be run. Gradients, buffers and random generators are put back, also after an error."""
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
        """Runs may change buffers; each begins with those that the stage had."""
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
            is_random = not (undrawn.is_now and self._is_reproducible(first))
            if is_random:
                self._stage.eval()
            yield is_random
        finally:
            for module, p in dropouts:
                module.p = p
            for each, training in modes:
                each.training = training


# Parts of a check


def _problem_of(use: CacheUse) -> Problem | None:
    """Names what modules did with the cache that they must not do; None if they did nothing of the kind."""
    blame = use.blame()
    return None if blame is None else Problem("slices", blame.where, float("inf"), blame.reason)


def check_weights(model: nn.Module | None, stage: nn.Module) -> Problem | None:
    """Whether a stage has the weights of the model that it is a part of, wherever both have them.

    Args:
        model: The whole one; None if there is none to compare with.
        stage: A part of it, under the same names.

    Returns:
        The first weight that differs.
    """
    whole = {} if model is None else dict(model.named_parameters())
    for name, p in stage.named_parameters():
        own = whole.get(name)
        if own is None or own.is_meta or isinstance(p, DTensor) or own.shape != p.shape:
            continue
        if not torch.equal(_sample(own).to(p.device, p.dtype), _sample(p)):
            return Problem("weights", name, float("inf"), Mistake.DRAWN_ANEW)
    return None


def _copy_in_float64(stage: Stage) -> Stage | None:
    """A copy whose rounding is far below any mistake; None where the stage is too large, split over devices, or cannot
    be copied or converted."""
    parameters = list(stage.parameters())
    if sum(p.numel() for p in parameters) > COPIED or any(isinstance(p, DTensor) for p in parameters):
        return None
    with suppress(Exception):  # such as tensors that are no leaves
        double = copy.deepcopy(stage)
        return None if _generators(double) else double.double()
    return None


def _generators(module: nn.Module) -> list[torch.Generator]:
    """Generators that modules hold themselves: they cannot be copied, and torch's seed does not set them."""
    return [value for m in module.modules() for value in vars(m).values() if isinstance(value, torch.Generator)]


def _sample(x: Tensor) -> Tensor:
    """At most ``SAMPLE`` entries, evenly spread, of this device's part: a large stage has no room for a second copy of
    its gradients."""
    flat = to_local(x.detach()).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


def _errors(wanted: _Run, other: _Run) -> dict[str, float]:
    """The error of the output, of each gradient, and of each buffer that the forward changed, by name.

    A gradient that one run has and the other has not counts as zeros there.
    """
    loss, other_loss = (torch.tensor(run.result.loss, dtype=torch.float64) for run in (wanted, other))
    errors = {"output": relative_error(wanted.result.output, other.result.output)}
    errors["loss"] = relative_error(loss, other_loss, FLOOR)
    gradients, others = dict(wanted.gradients), dict(other.gradients)
    if wanted.result.input_gradient is not None and other.result.input_gradient is not None:
        gradients["input"], others["input"] = wanted.result.input_gradient, other.result.input_gradient
    least = FLOOR * max((g.abs().max().item() for g in gradients.values() if g.numel()), default=0.0)
    for name in gradients.keys() | others.keys():
        zeros = torch.zeros_like(gradients[name] if name in gradients else others[name])
        errors[name] = relative_error(gradients.get(name, zeros), others.get(name, zeros), least)
    for name, buffer in wanted.buffers.items():
        if buffer.is_floating_point() and buffer.shape == other.buffers[name].shape:
            errors[name] = relative_error(buffer, other.buffers[name])
    return errors
