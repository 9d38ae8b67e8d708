"""Adapters of a model that no process has as a whole: each rank adds those of its own layers, and all are saved as one.

peft adds adapters to a model in memory. A model that comes from a folder, stage by stage, gets them stage by stage::

    meta_model(config)             plain, on the meta device
      with_adapter(...)            the same with adapters, on the meta device: names, shapes, what is trained
    AdaptedWeights.fill            the base of one stage from its files (quantized, if asked), then its adapters

Weights of adapters are drawn from a seed and the name of their layer, so they are the same however the model is split.
"""

import copy
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from terapipe.extras import import_extra
from terapipe.files import recover, replace_folder, sibling
from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.structure import LAYERS, ModelStructure
from terapipe.hf.weights import StageWeights, Weights
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.pipeline import Pipeline

NAME = "default"  # of an adapter, as peft calls the only one
DRAWN = (True, False, "gaussian")  # values of init_lora_weights that need no data and leave the base as it is
PREFIX = "base_model.model."  # of all names in a folder of peft


def with_adapter(plain: PreTrainedModel, adapter: Any, structure: ModelStructure) -> PreTrainedModel:
    """A copy of a model on the meta device, with adapters on the meta device.

    Args:
        plain: Without adapters; it stays as it is.
        adapter: A ``LoraConfig`` of peft.
        structure: Where the layers are. Adapters elsewhere are refused: embedding and head may be tied.

    Raises:
        UnsupportedModelError: Adapters of another kind, of modules outside of the layers, or with weights that are not
            just drawn.
    """
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if kind != "LORA" or adapter.init_lora_weights not in DRAWN:
        raise UnsupportedModelError(
            f"adapters of a model that is read stage by stage are LORA, with init_lora_weights True, False or "
            f"'gaussian', got {kind} with {getattr(adapter, 'init_lora_weights', None)!r}; load the model as a whole, "
            "add them with peft, and pass it to Decoder"
        )
    model = _inject(copy.deepcopy(plain), adapter)
    for name, p in model.named_parameters():
        if p.requires_grad and structure.place(name.rpartition(".")[0]) != LAYERS:
            raise UnsupportedModelError(
                f"adapters of a model that is read stage by stage must be in its layers, got {name}; load the model as "
                "a whole, add them with peft, and pass it to Decoder"
            )
    return model


def _inject(model: PreTrainedModel, adapter: Any) -> PreTrainedModel:
    """Adds adapters in place, and freezes all else. Peft writes into the configuration that it is given."""
    peft: Any = import_extra("peft", "quantized", "adapters")
    empty = any(p.is_meta for p in model.parameters())
    peft.inject_adapter_in_model(copy.deepcopy(adapter), model, adapter_name=NAME, low_cpu_mem_usage=empty)
    return model


@dataclass(frozen=True)
class AdaptedWeights:
    """The weights of a base, from any source, with adapters of which the weights are drawn.

    Args:
        base: Of all that is frozen.
        plain: The model without adapters, on the meta device.
        adapter: A ``LoraConfig`` of peft.
        seed: Of the adapters' weights.
    """

    base: Weights
    plain: PreTrainedModel
    adapter: Any
    seed: int = 0

    def fill(self, model: PreTrainedModel, wanted: StageWeights) -> PreTrainedModel:
        """See ``Weights.fill``. Adapters are in float32 or wider: half precision would lose small updates."""
        filled = _inject(self.base.fill(self.plain, wanted), self.adapter)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name, layer in filled.named_modules():
                if NAME in getattr(layer, "lora_A", ()) and wanted.has_parameters(name):
                    self._draw(name, layer)
        return filled

    def _draw(self, name: str, layer: Any) -> None:
        """Makes the weights of one layer's adapter real, and draws them from the seed and the layer's name."""
        weight = layer.get_base_layer().weight
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            dtype = torch.promote_types(next(part.parameters()).dtype, torch.float32)
            dtype = torch.promote_types(dtype, weight.dtype) if weight.is_floating_point() else dtype
            part.to_empty(device=weight.device).to(dtype)
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        layer.reset_lora_parameters(NAME, self.adapter.init_lora_weights or True)


def save_adapter(pipe: Pipeline, folder: str | Path, *, finish: Callable[[Path], None] = lambda partial: None) -> None:
    """Saves the adapters of a pipeline as peft's ``save_pretrained`` would: ``PeftModel.from_pretrained`` of the base
    and this folder gives the model that was trained.

    All ranks call it together; the first one writes.

    Args:
        pipe: A pipeline of a ``Decoder`` with LoRA.
        folder: Where to. It is replaced as a whole when the new one is complete.
        finish: Called on the first rank with the folder as it was written, before it is put in place, as in
            ``save_pretrained``.
    """
    folder, transport = Path(folder).resolve(), pipe.transport
    adapters = getattr(getattr(next(iter(pipe.stages.values())), "model", None), "peft_config", None) or {}
    if NAME not in adapters:
        raise ValueError(f"a pipeline with adapters of peft is needed, got one with {list(adapters) or 'none'}")
    with pipe.failing_together():
        mine = {name: p.detach().cpu().clone() for name, p in pipe.named_parameters() if ".lora_" in name}
        writes = transport.dp_rank == transport.tp_rank == 0
        parts = pipe.gather(mine if writes else {})
        if writes and transport.rank == 0:
            tensors = {f"{PREFIX}{n.replace(f'.{NAME}.', '.')}": x for part in parts for n, x in part.items()}
            partial = sibling(folder, "partial")
            recover(folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            adapters[NAME].save_pretrained(partial)
            save_file({name: x.contiguous() for name, x in tensors.items()}, partial / "adapter_model.safetensors")
            finish(partial)
            replace_folder(folder, partial)
        transport.gather(None, ALL)
