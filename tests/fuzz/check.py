"""A case through a pipeline, compared with the plain model."""

import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import terapipe
from terapipe import Layout, Pipeline
from terapipe.modeling.stage import IGNORE
from terapipe.runtime.comm.transport import Transport
from terapipe.scheduling.actions import Op
from tests.fuzz.case import Case, HuggingFace, Step
from tests.fuzz.models import model_of
from tests.fuzz.own import Dropout
from tests.fuzz.plain import (
    DIVISOR,
    TOKENS,
    TOTAL,
    VALUES,
    Batch,
    Masks,
    Result,
    batch_of,
    plain_result,
    plan_of,
    values_loss,
    weigh_values,
)
from tests.support.models import gradients, mesh_of
from tests.support.objectives import OBJECTIVES
from tests.support.ranks import Ranks
from tests.support.turns import World

EQUAL, WRONG, REFUSED, CRASHED = "equal", "wrong", "refused", "crashed"
PROCESSES = {"tensor parallel": Layout(1, 1, 2), "sharded": Layout(2, 1, 1)}
SOURCE = str(Path(terapipe.__file__).parent)
SECONDS = 300  # that a case may take: far more than any does, however busy the machine is
COARSE_PARTS = ("gemma", "llama4", "gpt_oss", "deepseek")  # types that compute parts of themselves in float32
BOUNDS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 0.1}
SMALL = 1e-3  # gradients are compared relative to the largest, but to this at least: some losses are nearly flat


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Args:
        kind: "equal", "wrong", "refused" or "crashed".
        reason: Where it differs most, or an error's words.
        error: The largest difference.
    """

    kind: str
    reason: str = ""
    error: float = 0.0


def show(case: Case) -> None:
    """Runs one case, prints what came of it, and exits with 1 if it is wrong or crashed: the end of pasted programs."""
    torch.set_num_threads(1)
    outcome = outcome_of(case)
    print(f"{outcome.kind}: {outcome.reason}", flush=True)
    close_groups()
    sys.exit(outcome.kind in (WRONG, CRASHED))


def outcome_of(case: Case) -> Outcome:
    """Computes a case twice and compares."""
    with _limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            masks: Masks = {}
            results = piped_results(case, masks)
            return compare(case, results, masks)
        except Exception as error:
            kind = REFUSED if _is_refusal(error) else CRASHED
            where = "" if kind == REFUSED else "\n" + "".join(traceback.format_exception(error))
            return Outcome(kind, f"{type(error).__name__}: {error}{where}")


def _is_refusal(error: Exception) -> bool:
    """Whether the library said no, by a ValueError that it raised itself."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for note in getattr(error, "__notes__", ()):  # the traceback of an error that came from another process
        files += re.findall(r'File "([^"]+)"', note)
    return isinstance(error, ValueError) and files[-1].startswith(SOURCE)


@contextmanager
def _limited() -> Iterator[None]:
    """A case that hangs is one that crashed."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Through a pipeline

_groups: dict[int, Ranks] = {}


def close_groups() -> None:
    """Ends the processes that cases with other layouts have started."""
    while _groups:
        _groups.popitem()[1].close()


def piped_results(case: Case, masks: Masks) -> list[Result]:
    """What each rank computed.

    Args:
        case: What is computed.
        masks: Is filled with what dropout draws.
    """
    torch.manual_seed(0)
    if case.ranks != "turns":
        return _in_processes(case)
    size = case.replicas * case.plan.num_ranks
    if size == 1:
        return [piped(case, None, masks)]
    return World(case.replicas, case.plan.num_ranks).run(lambda transport: piped(case, transport, masks))


def _in_processes(case: Case) -> list[Result]:
    size = PROCESSES[case.ranks].devices
    if size in _groups and not _groups[size].usable:
        _groups.pop(size).close()
    if size not in _groups:
        _groups[size] = Ranks(size)
    try:
        return _groups[size](piped, case, None, {})
    except BaseException as error:
        if not isinstance(error, ValueError):  # the group may be waiting for ever
            _groups.pop(size).close()
        raise


def piped(case: Case, transport: Transport | None, masks: Masks) -> Result:
    """One rank's losses and gradients."""
    mesh = mesh_of(PROCESSES[case.ranks]) if case.ranks != "turns" else None
    loss_fn = values_loss if case.objective == VALUES else OBJECTIVES.get(case.objective, (None,))[0]
    number = 0 if transport is None else transport.global_rank
    options: dict[str, Any] = {"fused_weight_grads": case.fused, "verify": case.verifies, "loss_fn": loss_fn}
    pipe = Pipeline(
        model_of(case, 1 + number),
        case.plan,
        mesh=mesh,
        shard=case.ranks == "sharded",
        transport=transport,
        **options,
    )
    losses = []
    for at, step in enumerate(case.steps):
        with _noted(pipe, case, step, at, masks):
            losses.append(_step(pipe, case, step))
    return Result(losses, {name: g.clone() for name, g in gradients(pipe).items()})


def _step(pipe: Pipeline, case: Case, step: Step) -> float:
    batch, plan = batch_of_rank(pipe, case, step), plan_of(case, step)
    first, last = pipe.is_first, pipe.is_last
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        if case.objective == TOKENS:
            return _token_outputs(pipe, case, step, batch)
        rows = pipe.dp_rank * plan.batch_size
        documents = None if step.documents is None else step.documents[rows : rows + plan.batch_size]
        total = {"total": DIVISOR} if case.objective == TOTAL and last else {}
        data = batch.ids if first else None, batch.targets if last else None, documents
        evaluated = pipe.evaluate(*data, **total) if case.evaluates and step.plan is None else None
        loss = pipe.step(*data, plan=step.plan, **total)
    if evaluated is not None and not _has_dropout(case):
        difference = abs(evaluated.item() - loss.item())
        assert difference <= 1e-5 * abs(loss.item()) + 1e-12, f"evaluate gives {evaluated.item()}, step {loss.item()}"
    return loss.item()


def _token_outputs(pipe: Pipeline, case: Case, step: Step, batch: Batch) -> float:
    """The caller's own loss of log-probabilities; its sum over replicas."""
    plan = plan_of(case, step)
    rows = pipe.dp_rank * plan.batch_size
    documents = None if step.documents is None else step.documents[rows : rows + plan.batch_size]
    values = pipe.token_outputs(batch.ids, batch.labels, documents=documents, plan=step.plan)
    counted = (batch_of(case, step).labels != IGNORE).sum()
    loss = weigh_values(values, counted)
    if case.switches:
        pipe.train(not case.training)
    loss.backward()
    pipe.train(case.training)
    return float(pipe.transport.all_reduce(loss.detach().clone(), "dp"))


def batch_of_rank(pipe: Pipeline, case: Case, step: Step) -> Batch:
    """The rows of one replica."""
    batch = batch_of(case, step)
    mine = slice(pipe.dp_rank * batch.rows, (pipe.dp_rank + 1) * batch.rows)
    return Batch(batch.ids[mine], batch.labels[mine], tree_map(lambda x: x[mine], batch.targets), batch.rows)


def _has_dropout(case: Case) -> bool:
    layers = getattr(case.model, "layers", ())
    return any("dropout" in kind for kind in layers)


@contextmanager
def _noted(pipe: Pipeline, case: Case, step: Step, at: int, masks: Masks) -> Iterator[None]:
    """Inside, what dropout draws in forwards is put where the plain model finds it."""
    plan = plan_of(case, step)
    first_row, rows = pipe.dp_rank * plan.batch_size, case.replicas * plan.batch_size

    def note(name: str, mask: Tensor) -> None:
        action = pipe._executors.current.at
        if action is None or action.op is not Op.F:
            return
        s = action.slice
        whole = masks.setdefault((at, name), torch.full((rows, plan.seq_len, mask.shape[2]), torch.nan).to(mask.dtype))
        whole[first_row + s.row : first_row + s.row + s.size, s.context : s.end] = mask

    for stage in pipe.stages.values():
        for module in stage.modules():
            if isinstance(module, Dropout):
                module.note = note
    yield


# Comparing


def compare(case: Case, results: list[Result], masks: Masks) -> Outcome:
    """How far any rank's losses and gradients are from the plain model's.

    In float64 and float32 the bound is one of rounding. What is coarser is compared with the truth in float64, from
    which the plain model in that dtype is some way off, too."""
    wanted = plain_result(case, masks)
    bound = BOUNDS["bfloat16" if case.autocast else case.dtype]
    if isinstance(case.model, HuggingFace) and any(part in case.model.type for part in COARSE_PARTS):
        bound = 1e-4
    if case.dtype != "float64":
        truth = plain_result(case, masks, "float64")
        bound = max(bound, 4 * difference(truth, [wanted])[0])
        wanted = truth
    error, reason = difference(wanted, results)
    if not error <= bound:
        return Outcome(WRONG, f"{reason} differs by {error:.2g}, more than {bound:.2g}", error)
    return Outcome(EQUAL, error=error)


def difference(wanted: Result, results: list[Result]) -> tuple[float, str]:
    """The largest difference of any rank's loss or gradient, and which it is."""
    scale = max([g.abs().max().item() for g in wanted.gradients.values()] + [SMALL])
    pairs: list[tuple[float, str]] = []
    for result in results:
        for i, (loss, other) in enumerate(zip(wanted.losses, result.losses, strict=True)):
            pairs.append((abs(loss - other) / max(abs(loss), SMALL), f"the loss of step {i}"))
        for name, gradient in result.gradients.items():
            truth = wanted.gradients.get(_plain_name(name, wanted.gradients))
            gap = gradient.double() if truth is None else gradient.double() - truth.double()
            pairs.append((gap.abs().max().item() / scale, f"the gradient of {name}"))
    names = {_plain_name(name, wanted.gradients) for result in results for name in result.gradients}
    for name in set(wanted.gradients) - names:
        pairs.append((wanted.gradients[name].abs().max().item() / scale, f"the missing gradient of {name}"))
    return max(pairs, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"))


def _plain_name(name: str, names: dict[str, Tensor]) -> str:
    """Both copies of a tied weight are the plain model's one."""
    if name in names or not name.endswith("head.weight"):
        return name
    return next((other for other in names if "embedding" in other or "embed_tokens" in other or "wte" in other), name)
