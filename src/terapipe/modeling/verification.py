"""Verification of a whole model, whoever wrote it: weights, slices, stages, recomputation and loss on a few tokens."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import torch
from torch import nn

from terapipe.modeling.stage import PipelineModel, Stage, require_model, require_stage
from terapipe.modeling.stage_check import LENGTHS, Check, Problem, StageCheck, check_weights
from terapipe.planning.recompute import MODES, Recompute


@dataclass(frozen=True)
class Verification:
    """What ``verify`` saw. ``print`` it for a table with a line for each check, and the mistakes by name."""

    model: str  # its class
    dtype: str  # in which it was computed: float64 if it is small enough to be copied
    errors: Mapping[str, float]  # by check, the largest relative error of outputs and gradients
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
    """Runs ``model`` on two made-up sequences, whole and cut, and compares outputs and every gradient."""
    require_model(model)
    if not 1 <= num_stages <= model.num_layers:
        raise ValueError(
            f"a model of {model.num_layers} layers has 1 to {model.num_layers} stages, got num_stages {num_stages}"
        )
    began = time.perf_counter()
    device = device or _device_of(model)
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
    dtype = str(check.dtype).removeprefix("torch.")
    seconds = time.perf_counter() - began
    return Verification(type(model).__name__, dtype, check.errors, tuple(check.problems), seconds)


def _device_of(model: PipelineModel) -> torch.device:
    whole = model.whole_module() or nn.Module()
    device = next((p.device for p in whole.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def check_stage(
    model: PipelineModel,
    stage: Stage,
    *,
    first: bool,
    last: bool,
    own_loss: bool,
    plan_lengths: Sequence[Sequence[int]],
) -> dict[Recompute, str]:
    """The cheap form that a pipeline runs before its first step, on a stage that it holds. Returns why modes of
    recomputation are not exact, and raises ValueError for anything else.

    ``plan_lengths`` are those of the plan's slices, by microbatch: where none is cut, slices need not be exact.
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
    return (
        f"{type(model).__name__} would be trained with wrong gradients. {problem}. terapipe.verify(model) checks all "
        "of it in one process; Pipeline(..., verify=False) leaves this check out"
    )
