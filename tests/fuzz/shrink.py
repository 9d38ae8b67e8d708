"""Makes a failing case smaller while it still fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from terapipe import Plan
from terapipe.planning import by_slice
from terapipe.planning.recompute import for_any_slices
from tests.fuzz.case import Case, Gpt, HuggingFace, Own, Step

TRIES, SECONDS = 400, 300.0
OPTIONS = (
    "ranks",
    "objective",
    "dtype",
    "autocast",
    "frozen",
    "switches",
    "evaluates",
    "fused",
    "verifies",
    "training",
)


def shrink(case: Case, fails: Callable[[Case], bool]) -> tuple[Case, int]:
    """The smallest case that was met, and how many were tried.

    Args:
        case: One that fails.
        fails: Whether another fails in the same way.
    """
    tried, end, seen = 0, time.monotonic() + SECONDS, {repr(case)}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for other in _smaller(case):
            if repr(other) in seen:
                continue
            seen.add(repr(other))
            if tried >= TRIES or time.monotonic() > end:
                return case, tried
            tried += 1
            if fails(other):
                case, is_smaller = other, True
                break
    return case, tried


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that are one thing simpler, those that take most away first."""
    for steps in _fewer(case.steps):
        yield replace(case, steps=steps)
    for name in OPTIONS:
        yield replace(case, **{name: getattr(Case(), name)})
    if case.replicas > 1 and case.ranks != "sharded":
        yield _with_plan(replace(case, replicas=1), case.plan)
    for i, step in enumerate(case.steps):
        for change in ({"plan": None}, {"documents": None}, {"ignored": False}, {"seed": 0}):
            yield _with_step(case, i, replace(step, **change))  # type: ignore[arg-type]
    for plan in _smaller_plans(case):
        yield _with_plan(case, plan)
    for model in _smaller_models(case.model):
        yield replace(case, model=model)
    for i, step in enumerate(case.steps):
        for documents in _fewer_documents(step):
            yield _with_step(case, i, replace(step, documents=documents))


def _with_step(case: Case, i: int, step: Step) -> Case:
    return replace(case, steps=(*case.steps[:i], step, *case.steps[i + 1 :]))


def _fewer(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Without one of the items, if there are several."""
    for i in range(len(items) if len(items) > 1 else 0):
        yield (*items[:i], *items[i + 1 :])


def _fewer_documents(step: Step) -> Iterator[Any]:
    for i, row in enumerate(step.documents or ()):
        for start in row[1:]:
            shorter = tuple(x for x in row if x != start)
            yield (*step.documents[:i], shorter, *step.documents[i + 1 :])  # type: ignore[index]


def _smaller_models(model: Gpt | Own | HuggingFace) -> Iterator[Any]:
    for field in fields(model):
        if field.name not in ("layers", "type"):
            yield replace(model, **{field.name: field.default})  # type: ignore[arg-type]
    if isinstance(model, Own):
        for layers in _fewer(model.layers):
            yield replace(model, layers=layers)
        for i, kind in enumerate(model.layers):
            simpler = [part for part in kind.split("+") if part != kind]
            for part in [*simpler, "attention", "mlp"]:
                if kind not in ("attention", "mlp"):
                    yield replace(model, layers=(*model.layers[:i], part, *model.layers[i + 1 :]))
    if isinstance(model, Gpt):
        for windows in _fewer(model.windows):
            yield replace(model, windows=windows)


# Plans


def _smaller_plans(case: Case) -> Iterator[Plan]:
    """Fewer microbatches, tokens, slices, sequences, stages and layers; then simpler orders and modes."""
    plan = case.plan
    for m in range(len(plan.sizes) if len(plan.sizes) > 1 else 0):
        keep = [i for i in range(len(plan.sizes)) if i != m]
        lengths, sizes = tuple(plan.lengths[i] for i in keep), tuple(plan.sizes[i] for i in keep)
        yield from _changed(plan, lengths=lengths, sizes=sizes)
    for tokens in {max(1, plan.seq_len // 2), plan.seq_len - 1} - {0, plan.seq_len}:
        yield from _changed(plan, lengths=tuple(_first(row, tokens) for row in plan.lengths))
    for m, row in enumerate(plan.lengths):
        for i in range(len(row) - 1):
            merged = (*row[:i], row[i] + row[i + 1], *row[i + 2 :])
            yield from _changed(plan, lengths=(*plan.lengths[:m], merged, *plan.lengths[m + 1 :]))
    for m, size in enumerate(plan.sizes):
        if size > 1:
            yield from _changed(plan, sizes=(*plan.sizes[:m], 1, *plan.sizes[m + 1 :]))
    if not isinstance(case.model, HuggingFace):  # which has four layers
        yield from _fewer_layers(plan)
    yield from _fewer_stages(plan)
    for order in ("terapipe", "terapipe-1f1b"):
        yield from _changed(plan, order=order)
    yield from _changed(plan, order="terapipe", chunks=plan.num_stages)
    for change in ({"recompute": "none"}, {"offload": False}, {"offload_kv": False}):
        yield from _changed(plan, **change)
    for mode in plan.recompute_modes:
        if isinstance(plan.recompute, tuple):
            yield from _changed(plan, recompute=mode)
    if isinstance(plan.offload, tuple):
        yield from _changed(plan, offload=True)


def _fewer_layers(plan: Plan) -> Iterator[Plan]:
    for k in range(plan.num_stages):
        if plan.boundaries[k + 1] - plan.boundaries[k] > (0 if k in (0, plan.num_stages - 1) else 1):
            edges = plan.boundaries
            yield from _changed(plan, boundaries=(*edges[: k + 1], *(edge - 1 for edge in edges[k + 1 :])))


def _fewer_stages(plan: Plan) -> Iterator[Plan]:
    """Two neighboring stages become one, or all stages of each rank."""
    for k in range(1, plan.num_stages):
        edges = (*plan.boundaries[:k], *plan.boundaries[k + 1 :])
        per_stage = {}
        for name in ("recompute", "offload"):
            value = getattr(plan, name)
            per_stage[name] = (*value[:k], *value[k + 1 :]) if isinstance(value, tuple) else value
        yield from _changed(plan, boundaries=edges, chunks=min(plan.chunks, len(edges) - 1), **per_stage)
        yield from _changed(plan, boundaries=edges, chunks=1, **per_stage)
        yield from _changed(plan, boundaries=edges, chunks=len(edges) - 1, **per_stage)


def _first(row: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The slices of the first tokens."""
    lengths = []
    for length in row:
        if tokens > 0:
            lengths.append(min(length, tokens))
            tokens -= length
    return tuple(lengths)


def _changed(plan: Plan, **changes: Any) -> Iterator[Plan]:
    """The plan with changes, if there is such a plan. What is said by slice is said of all where their number is
    another."""
    for loosen in (False, True):
        more = {}
        if loosen:
            more["recompute"] = for_any_slices(changes.get("recompute", plan.recompute))
            more["offload"] = by_slice.for_any_slices(changes.get("offload", plan.offload), any)
        try:
            yield replace(plan, **{**changes, **more})
            return
        except ValueError:
            continue


def _with_plan(case: Case, plan: Plan) -> Case:
    """The case by another plan. Plans of single batches are left out, and documents cut to what is left."""
    rows, steps = plan.batch_size * case.replicas, []
    for step in case.steps:
        documents = step.documents
        if documents is not None:
            shorter = tuple(tuple(start for start in row if start < plan.seq_len) for row in documents[:rows])
            documents = shorter if len(shorter) == rows else None
        shape = (plan.boundaries, plan.chunks, plan.order, plan.lengths, plan.sizes)
        same = shape == (case.plan.boundaries, case.plan.chunks, case.plan.order, case.plan.lengths, case.plan.sizes)
        steps.append(replace(step, documents=documents, plan=step.plan if same else None))
    return replace(case, plan=plan, steps=tuple(steps))
