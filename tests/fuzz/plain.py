"""What a case's loss and gradients are, by the plain model in one piece."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe import GPT, Plan
from terapipe.modeling.stage import IGNORE
from tests.fuzz.case import Case, HuggingFace, Step
from tests.fuzz.models import IDS, model_of, module_of, vocabulary_of
from tests.fuzz.own import OwnModel, Rows, balance_of
from tests.support.objectives import OBJECTIVES, log_probs_of

VALUES, TOKENS, TOTAL = "values", "token outputs", "total"
PAIRS = ("dpo", "dpo over the batch", "simpo", "orpo over the batch")  # which take an even number of rows
ALL_OBJECTIVES = ("cross-entropy", VALUES, TOKENS, TOTAL, *OBJECTIVES)
DIVISOR = 7.0  # of TOTAL


class Result(NamedTuple):
    """What is compared.

    Attributes:
        losses: Of each step.
        gradients: Of all steps together, by the names of parameters.
    """

    losses: list[float]
    gradients: dict[str, Tensor]


Masks = dict[tuple[int, str], Tensor]  # of dropout, by step and layer


class Batch(NamedTuple):
    """A batch of all replicas."""

    ids: Tensor
    labels: Tensor
    targets: Any
    rows: int  # of each replica


def plan_of(case: Case, step: Step) -> Plan:
    """How a batch is cut."""
    return step.plan or case.plan


def batch_of(case: Case, step: Step) -> Batch:
    """The numbers of a batch, whose every row has a label that counts. They do not depend on dtypes."""
    return _batch_of(replace(case, dtype="float64", autocast=False), step)


@lru_cache(maxsize=8)  # every rank asks
def _batch_of(case: Case, step: Step) -> Batch:
    plan, generator = plan_of(case, step), torch.Generator().manual_seed(step.seed)
    shape = (plan.batch_size * case.replicas, plan.seq_len)
    ids, labels = (torch.randint(IDS, shape, generator=generator) for _ in range(2))
    labels = torch.where(labels == ids, (labels + 1) % IDS, labels)  # labels that are the ids are refused
    if step.ignored:
        last = labels[:, -1].clone()
        labels[torch.rand(shape, generator=generator) < 0.4] = IGNORE
        labels[:, -1] = last
    return Batch(ids, labels, _targets(case, step, ids, labels, generator), plan.batch_size)


def _targets(case: Case, step: Step, ids: Tensor, labels: Tensor, generator: torch.Generator) -> Any:
    """What the objective is given: numbers near those that the model has, so that losses are not flat."""
    name = case.objective.removesuffix(" over the batch")

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if name == VALUES:
        return {"values": some(*ids.shape, vocabulary_of(case))}
    if name in ("weighted", "distillation"):
        more = {"weights": some(*ids.shape).abs()} if name == "weighted" else {}
        return {"labels": labels, **(more or {"teacher_logits": some(*ids.shape, vocabulary_of(case))})}
    if name not in ("dpo", "kto", "grpo", "ppo"):
        return labels
    with torch.no_grad():
        model = model_of(case, 0)
        log_probs = log_probs_of(logits_of(model, ids, step, {})[0].double(), labels)
    near, rows = log_probs + 0.1 * some(*ids.shape), len(ids)
    extra = {
        "dpo": {"reference": log_probs.sum(1) + some(rows)},
        "kto": {"reference": log_probs.sum(1) + some(rows), "desirable": torch.arange(rows) % 2 == 0},
        "grpo": {"old": near, "reference": log_probs + 0.3 * some(*ids.shape), "advantages": some(rows)},
        "ppo": {"old": near, "advantages": some(*ids.shape)},
    }
    return {"labels": labels, **extra[name]}


def values_loss(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A loss of the user's own, without labels."""
    return (logits - targets["values"]).square().sum()


def weigh_values(values: Tensor, counted: Tensor) -> Tensor:
    """What the caller of ``token_outputs`` makes of log-probabilities."""
    weights = torch.linspace(0.5, 1.5, values.shape[1], dtype=values.dtype)
    return (-values * weights).sum() / counted + 0.01 * values.square().mean()


def plain_result(case: Case, masks: Masks, dtype: str = "") -> Result:
    """Loss and gradients of the plain model.

    Args:
        case: What is computed.
        masks: What the pipeline's dropout drew.
        dtype: Another dtype, for the truth about one that is coarse.
    """
    case = replace(case, dtype=dtype or case.dtype, autocast=case.autocast and not dtype)
    batches = [batch_of(case, step) for step in case.steps]  # first: they may use the same model
    model, losses = model_of(case, 0), []
    for number, (step, batch) in enumerate(zip(case.steps, batches, strict=True)):
        mine = {name: mask.to(getattr(torch, case.dtype)) for (at, name), mask in masks.items() if at == number}
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            logits, rows = logits_of(model, batch.ids, step, mine)
            loss = _loss(case, logits, batch)
            if rows is not None and rows.sums:
                loss = loss + _balance(case, plan_of(case, step), rows.sums) * _share(case, batch)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
    named = module_of(model).named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return Result(losses, gradients)


def _loss(case: Case, logits: Tensor, batch: Batch) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    name = case.objective
    if name == VALUES:
        return values_loss(wide, batch.targets) / batch.ids.numel()
    if name == TOKENS:
        counted = (batch.labels != IGNORE).sum()
        values = log_probs_of(wide, batch.labels).split(batch.rows)
        return torch.stack([weigh_values(part, counted) for part in values]).sum()
    if name in OBJECTIVES:
        plain: Callable[[Tensor, Any], Tensor] = OBJECTIVES[name][1]
        return plain(wide, batch.targets)
    total = F.cross_entropy(wide.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / (DIVISOR if name == TOTAL else (batch.labels != IGNORE).sum())


def _share(case: Case, batch: Batch) -> Any:
    """What an auxiliary loss is multiplied by: the part of the labels that this batch has, by the caller's word."""
    return (batch.labels != IGNORE).sum() / DIVISOR if case.objective == TOTAL else 1.0


def logits_of(model: Any, ids: Tensor, step: Step, masks: dict[str, Tensor]) -> tuple[Tensor, Rows | None]:
    """The logits of all rows, and what layers of a model of one's own added to sums."""
    documents = step.documents or ((0,),) * len(ids)
    if isinstance(model, OwnModel):
        rows = Rows(positions_of(documents, ids.shape[1]), masks)
        return model.logits(model(ids, rows)), rows
    if step.documents is None:
        return _plain_logits(model, ids), None
    whole = []
    for row, starts in zip(ids, documents, strict=True):
        parts = [_plain_logits(model, row[None, a:b]) for a, b in pairwise([*starts, len(row)])]
        whole.append(torch.cat(parts, 1))
    return torch.cat(whole), None


def _plain_logits(model: Any, ids: Tensor) -> Tensor:
    if isinstance(model, GPT):
        return model.logits(model(ids))
    logits: Tensor = model.model(input_ids=ids, use_cache=False).logits
    return logits


def positions_of(documents: tuple[tuple[int, ...], ...], tokens: int) -> Tensor:
    """The place of every token in its document."""
    rows = [[t - max(start for start in starts if start <= t) for t in range(tokens)] for starts in documents]
    return torch.tensor(rows)


def _balance(case: Case, plan: Plan, sums: list[Tensor]) -> Tensor:
    """The auxiliary loss, from the sums of every layer and row."""
    assert not isinstance(case.model, HuggingFace)
    over, per_row = case.model.balance, torch.stack(sums).sum(0)  # type: ignore[union-attr]
    if over == "replicas":
        return balance_of(per_row.sum(0))
    sizes = plan.sizes if over == "microbatch" else (plan.batch_size,)
    edges = [0, *accumulate(sizes * case.replicas)]
    parts = [balance_of(per_row[a:b].sum(0)) * (b - a) for a, b in pairwise(edges)]
    return torch.stack(parts).sum() / len(per_row)
