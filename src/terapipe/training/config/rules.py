"""What values of run.toml must be, as far as the file alone tells."""

import re
from collections.abc import Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from math import inf
from typing import Any

from terapipe.planning.memory import parse_bytes
from terapipe.planning.order import ORDERS
from terapipe.training.config.sections import MOST, OBJECTIVES, PlanConfig, RunConfig


def refuse_unknown(data: Mapping[str, Any], known: Mapping[str, Any], message: str) -> None:
    for name in data:
        if name not in known:
            likely = get_close_matches(name, known, 1)
            hint = f"did you mean {likely[0]!r}? " if likely else ""
            raise ValueError(f"{message.format(name)}; {hint}there are {', '.join(known)}")


def check(config: RunConfig, name: str) -> None:
    """Rules that need nothing but the file. Others are checked where the values are used, before the first step."""
    for part in fields(config):
        section = getattr(config, part.name)
        for entry in fields(section):
            _check_range(getattr(section, entry.name), entry, f"{name}: {part.name}.{entry.name}")
    kinds = [kind for kind in ("preset", "config", "folder", "factory") if getattr(config.model, kind)]
    if len(kinds) != 1:
        raise ValueError(
            f"{name}: a model is given by exactly one of model.preset, config, folder and factory, got "
            f"{' and '.join(kinds) or 'none'}"
        )
    if not config.data.train:
        raise ValueError(f'{name}: data.train must name at least one file, such as train = "book.txt"')
    for beta in ("beta1", "beta2"):
        if getattr(config.optimizer, beta) == 1:
            raise ValueError(f"{name}: optimizer.{beta} must be below 1, got 1: nothing new would count")
    _check_objective(config, name)
    _check_plan(config.plan, config.data.seq_len, name)
    if config.data.batch_size % (config.plan.dp or 1):
        raise ValueError(
            f"{name}: every replica takes the same number of sequences: plan.dp {config.plan.dp} must divide "
            f"data.batch_size {config.data.batch_size}"
        )


def _check_range(value: Any, entry: Field[Any], where: str) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not number >= 0 or (entry.metadata["positive"] and number == 0):
            least = "positive" if entry.metadata["positive"] else "at least 0"
            raise ValueError(f"{where} must be {least}, got {number!r}")
        if entry.metadata["share"] and number > 1:
            raise ValueError(f"{where} is a share of the whole, at most 1, got {number}")
        most = entry.metadata["most"] or (MOST if isinstance(number, int) else None)
        if number == inf or (most is not None and number > most):
            raise ValueError(f"{where} must be {'finite' if most is None else f'at most {most:g}'}, got {number}")


def _check_objective(config: RunConfig, name: str) -> None:
    objective, data = config.objective, config.data
    if ":" not in objective.kind:
        refuse_unknown({objective.kind: None}, dict.fromkeys(OBJECTIVES), f"{name}: unknown objective.kind {{!r}}")
    for entry in fields(objective):
        kinds = re.match(r"with (\w+)(?: and (\w+))?:", entry.metadata["doc"])
        if kinds and objective.kind not in kinds.groups() and getattr(objective, entry.name) != entry.default:
            raise ValueError(
                f"{name}: objective.{entry.name} is for kind = {' or '.join(filter(None, kinds.groups()))}, got "
                f"{objective.kind!r}; leave it out"
            )
    if objective.kind == "distill" and not objective.teacher:
        raise ValueError(f"{name}: kind = 'distill' needs objective.teacher, the folder of a Hugging Face model")
    if objective.kind == "dpo":
        if data.packing != "padded":
            raise ValueError(f"{name}: pairs need data.packing = 'padded', got {data.packing!r}")
        if data.batch_size % (2 * (config.plan.dp or 1)):
            raise ValueError(
                f"{name}: pairs need an even data.batch_size for each replica, got {data.batch_size} and dp "
                f"{config.plan.dp or 1}"
            )
        if data.eval_share:
            raise ValueError(f"{name}: pairs for evaluation are given by data.eval, not by data.eval_share")
    if objective.weights and (objective.kind != "cross_entropy" or data.packing == "concat" or data.eval_share):
        raise ValueError(
            f"{name}: objective.weights are of documents: they need kind = 'cross_entropy', data.packing = 'packed' or "
            "'padded', and data.eval instead of data.eval_share"
        )


def _check_plan(plan: PlanConfig, seq_len: int, name: str) -> None:
    if plan.num_slices > seq_len:
        raise ValueError(f"{name}: plan.num_slices must be at most data.seq_len {seq_len}, got {plan.num_slices}")
    if plan.slice_lengths and sum(plan.slice_lengths) != seq_len:
        raise ValueError(
            f"{name}: plan.slice_lengths must sum to data.seq_len {seq_len}, got {list(plan.slice_lengths)}, which sum "
            f"to {sum(plan.slice_lengths)}"
        )
    if plan.num_slices and plan.slice_lengths:
        raise ValueError(
            f"{name}: plan.num_slices is a number of equal slices, plan.slice_lengths their lengths; give one"
        )
    if plan.order:
        refuse_unknown({plan.order: None}, ORDERS, f"{name}: unknown plan.order {{!r}}")
    if plan.memory:
        parse_bytes(plan.memory)
