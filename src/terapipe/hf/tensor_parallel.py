"""Tensor parallel for a Hugging Face stage, by the model's own ``tp_plan``."""

from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, get_kv_heads_per_rank

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.structure import ModelStructure, shared_names, text_config
from terapipe.modeling.weight_grads import GradientSum, as_dtensor_like, to_local

SUMMED = "replicated_with_grad_allreduce"  # the style of norms of which each rank sees its own heads


def refuse_uneven_heads(model: PreTrainedModel, degree: int) -> None:
    """Refuses a model without a plan, and heads that the degree does not divide."""
    name, plan = type(model).__name__, model.tp_plan
    if not plan:
        raise UnsupportedModelError(f"{name} has no tp_plan of its own; take tp 1")
    config = text_config(model.config)
    heads = getattr(config, "num_attention_heads", None) or degree
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    per_rank: Any = get_kv_heads_per_rank
    if any(per_rank(plan, count, degree) is None for count in (heads, kv_heads)):
        raise UnsupportedModelError(
            f"{name} has {heads} heads of queries and {kv_heads} of keys and values, which cannot be split evenly "
            f"over {degree} ranks; take a tp that divides both"
        )


def parallelize(model: PreTrainedModel, structure: ModelStructure, mesh: DeviceMesh) -> None:
    """Changes the model of a stage. Its parameters then no longer share memory with the whole model."""
    refuse_uneven_heads(model, mesh.size())
    plan = _plan(model, structure)
    ties = shared_names(model)
    summed = [name for name, style in plan.items() if style == SUMMED]
    rest = {name: style for name, style in plan.items() if name not in summed}
    apply_tensor_parallelism(model, mesh, rest)  # type: ignore[no-untyped-call]
    _tie_again(model, ties)
    _own_parameters(model)
    for name, module in model.named_modules():
        if any(fnmatch(name, pattern) for pattern in summed):
            _sum_gradients(module, mesh)


def _plan(model: PreTrainedModel, structure: ModelStructure) -> dict[str, str]:
    """The model's tp_plan. A tied weight is split in both places or in none; else its gradients could not be added."""
    plan = dict(model.tp_plan)
    ends = [name.rpartition(".")[0] for name in structure.tied]
    if any(end not in plan for end in ends):
        plan = {name: style for name, style in plan.items() if name not in ends}
    return plan


def _tie_again(model: PreTrainedModel, ties: list[list[str]]) -> None:
    """Undoes that each module of a shared parameter got its own copy."""
    for names in ties:
        first, *others = (model.get_parameter(name) for name in names)
        for name, other in zip(names[1:], others, strict=True):
            if getattr(other, "placements", None) != getattr(first, "placements", None):
                raise UnsupportedModelError(
                    f"its tp_plan splits {name} differently from {names[0]}, which is the same weight"
                )
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = first


def _own_parameters(model: nn.Module) -> None:
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or p.is_meta:
                continue
            if p not in copies:
                copies[p] = nn.Parameter(as_dtensor_like(p.detach(), to_local(p.detach()).clone()), p.requires_grad)
            module._parameters[name] = copies[p]


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """All-reduces gradients of norms of which each rank sees its own heads.

    Transformers would reduce the accumulated gradient after each backward, which counts earlier slices several times.
    This reduces what each backward adds.
    """
    plain, hooked, total = module.forward, set(), GradientSum(mesh)

    def forward(*arguments: Any, **named: Any) -> Any:
        for p in module.parameters(recurse=False):
            if torch.is_grad_enabled() and p.requires_grad and id(p) not in hooked:
                p.register_hook(total)  # type: ignore[no-untyped-call]
                hooked.add(id(p))
        return plain(*arguments, **named)

    module.forward = forward
