"""How many bytes autograd keeps of a layer for its backward, counted on the model's own layers.

The planner counts a plain GPT of the model's size (planning/memory.py). Layers of Hugging Face models keep more: both
branches of a gated MLP, copies of norms' inputs in float32, parts of rotations. So some layers run on fake tensors, one
slice each, and what is alive afterwards is counted. It takes about a second, and no memory.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.structure import text_config
from terapipe.modeling.stage import PipelineModel, SlicedStage, Stage
from terapipe.planning.presets import LayerBytes
from terapipe.planning.recompute import Recompute
from terapipe.runtime import MemoryCounter
from terapipe.runtime.dry_run import replaceable_parameters

TOKENS, SLICES = 64, 3
CPU = torch.device("cpu")


def bytes_of_layer(
    model: PipelineModel, config: Any, dtype: torch.dtype, autocast: torch.dtype | None
) -> LayerBytes | None:
    """What a layer keeps of each token, on average over all layers.

    Args:
        model: Which stays as it is.
        config: transformers' configuration, whose ``layer_types`` say which layers are alike.
        dtype: Of weights.
        autocast: Of products, if it is another.

    Returns:
        None where layers cannot run on fake tensors (some routers ask for values), or not as they are.
    """
    log = logging.getLogger(fake_tensor.__name__)
    kinds = list(getattr(text_config(config), "layer_types", None) or ())[: model.num_layers]
    kinds = kinds if len(kinds) == model.num_layers else ["layer"] * model.num_layers
    level = log.level
    log.setLevel(logging.CRITICAL)  # it would tell of what cannot run
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), replaceable_parameters():
            twin = model.fake_copy(CPU)
            stages = {kind: _stage(twin, _middle(kinds, kind), dtype) for kind in set(kinds)}
            kept = {kind: _kept(stage, dtype, autocast) for kind, stage in stages.items()}
    except (RuntimeError, UnsupportedModelError):  # fake tensors have no values, which some operators need
        return None
    finally:
        log.setLevel(level)
    return LayerBytes(*(sum(each) / len(kinds) for each in zip(*(kept[kind] for kind in kinds), strict=True)))


def _middle(kinds: Sequence[str], kind: str) -> int:
    """A layer of this kind, which is not the first if there are others."""
    places = [i for i, other in enumerate(kinds) if other == kind]
    return places[len(places) // 2]


def _stage(model: PipelineModel, layer: int, dtype: torch.dtype) -> Stage:
    """One layer alone."""
    make: Any = model.stage
    stage: Stage = make(layer, layer + 1, CPU, embeds=False, has_head=False).to(dtype)
    return stage


def _kept(stage: Stage, dtype: torch.dtype, autocast: torch.dtype | None) -> LayerBytes:
    """What one layer keeps of the last of some slices: the first makes room for keys and values, and with ``light``
    each kind of slice learns what it needs when it first comes. All of them stay alive, so that nothing else goes while
    the last one is counted."""
    sliced, kept = SlicedStage(stage), dict[str, float]()
    modes: tuple[Recompute, ...] = ("none", "light")
    for mode in modes:
        cache, counter, outputs = stage.make_cache(1, SLICES * TOKENS), MemoryCounter(CPU), list[Tensor]()
        for context in range(0, SLICES * TOKENS, TOKENS):
            hidden = torch.empty(stage.hidden_shape(1, TOKENS), dtype=dtype, requires_grad=True)
            cache.begin(context, TOKENS, main_grads=True)
            with counter, nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                before = counter.current
                outputs.append(sliced.forward(hidden, cache, recompute=mode))  # as large as the input, counted before
                kept[mode] = (counter.current - before) / TOKENS
    return LayerBytes(**kept)
