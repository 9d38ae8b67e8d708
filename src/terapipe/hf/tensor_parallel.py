"""Tensor parallel for a Hugging Face stage, by the model's own ``tp_plan``.

Transformers knows for many types which weights to split by columns, which by rows, and which to leave whole, and has
the code that turns them into DTensors. It is used as it is, with three corrections for a stage of a pipeline:

    tied weights      transformers splits module by module, so a shared parameter becomes two: tied again (_tie_again)
    memory            the stage shared its tensors with the whole model; after this it has its own (_own_parameters)
    norms of heads    their gradients are summed over ranks, once for each backward (_sum_gradients)

The plan of a type may still be wrong, or too new for this code: ``ModelVerifier.tensor_parallel`` tries it on a small
copy before the first stage is split.
"""

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
    """Refuses a model without a plan, and heads that the degree does not divide.

    Args:
        model: Of which the ``tp_plan`` and numbers of heads are read.
        degree: Over how many ranks to split.
    """
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
    """Splits the model of a stage over a mesh, in place. Its parameters then share no memory with the whole model.

    Args:
        model: The stage's copy.
        structure: Which weights first and last stage share.
        mesh: The ranks of this stage. All of them call this together.
    """
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
    """The model's tp_plan. A tied weight is split in both places or in none; else its gradients could not be added.

    ``plan`` maps patterns of names to styles: ``{"model.layers.*.self_attn.q_proj": "colwise", ...}``.
    """
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
    """Copies each parameter's local part, once for all of its names. Otherwise a slice of a weight would keep the whole
    weight in memory, and updating it would change the user's model."""
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
    This reduces what each backward adds. The hook is on the parameter, and registered in forwards: FSDP and casts put
    other parameters in place after the stage was split.
    """
    plain, hooked, total = module.forward, set(), GradientSum(mesh)

    def forward(*arguments: Any, **named: Any) -> Any:
        for p in module.parameters(recurse=False):
            if torch.is_grad_enabled() and p.requires_grad and id(p) not in hooked:
                p.register_hook(total)  # type: ignore[no-untyped-call]
                hooked.add(id(p))
        return plain(*arguments, **named)

    module.forward = forward
