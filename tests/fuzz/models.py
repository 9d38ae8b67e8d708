"""The models of cases: the same weights each time that one is asked for."""

import copy
from functools import cache
from typing import Any

import torch
from torch import nn

from terapipe import GPT, GPTConfig, PipelineModel
from tests.fuzz.case import Case, Gpt, HuggingFace
from tests.fuzz.own import OwnModel
from tests.support.models import TINY, make_model, variant

IDS = 19  # token ids are below it in all models


def config_of(case: Case) -> GPTConfig:
    """The shape of a case's GPT."""
    model, depth = case.model, case.plan.num_layers
    assert isinstance(model, Gpt)
    windows = tuple(model.windows[i % len(model.windows)] for i in range(depth))
    head_dim = {} if model.head_dim is None else {"head_dim": model.head_dim}
    return variant(layers=depth, kv_heads=model.kv_heads, tied=model.tied, windows=windows, ffn=24, **head_dim)


def model_of(case: Case, copy_number: int) -> Any:
    """A case's model, in its mode and with what it freezes.

    Args:
        case: What is asked for.
        copy_number: Models of transformers are made once in each process, and so many copies of each.
    """
    dtype = getattr(torch, case.dtype)
    if isinstance(case.model, HuggingFace):
        model: PipelineModel = _decoder(case.model, copy_number)
    elif isinstance(case.model, Gpt):
        model = make_model(config_of(case), dtype)
    else:
        model = OwnModel(case.model, case.plan.num_layers).to(dtype)
    module = module_of(model)
    module.train(case.training)
    module.zero_grad()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(_is_trained(case, name))
    return model


def module_of(model: Any) -> nn.Module:
    """The plain model of a pipeline's."""
    return model if isinstance(model, GPT | OwnModel) else model.model


def _is_trained(case: Case, name: str) -> bool:
    own = isinstance(case.model, HuggingFace) and case.model.lora and "lora_" not in name
    return not (own or ".base." in name or any(part in name for part in case.frozen))


@cache
def _decoder(model: HuggingFace, copy_number: int) -> Any:
    """Of weights in float64. Copies are made of the first, which took much longer."""
    from terapipe.hf import Decoder
    from tests.support.hf_models import small

    if copy_number:
        return copy.deepcopy(_decoder(model, 0))
    whole: Any = small(model.type).double()
    if model.lora:
        import peft

        torch.manual_seed(0)
        options = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        whole = peft.get_peft_model(whole, options).double()
    return Decoder(whole, backend="attention")


def vocabulary_of(case: Case) -> int:
    """The number of logits."""
    return 97 if isinstance(case.model, HuggingFace) else TINY.vocab
