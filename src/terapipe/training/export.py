"""Export to the Hugging Face format: Hugging Face models as they are, our GPT as a GPT-2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from terapipe.extras import import_extra
from terapipe.files import recover, replace_folder
from terapipe.modeling.gpt import GPT
from terapipe.planning.presets import GPTConfig
from terapipe.runtime.checkpoint import Reader, TensorsOnly, damage, without_dist_warning
from terapipe.training.config import RunConfig


def check_export(config: RunConfig, shape: GPTConfig | None) -> None:
    """Refuse an impossible checkpoints.export before training. ``shape`` is that of a preset."""
    if not config.checkpoints.export:
        return
    if config.model.factory:
        raise ValueError(
            "checkpoints.export writes what Hugging Face can open, and model.factory it cannot; leave it out: "
            "checkpoints are written in any case"
        )
    folder = Path(config.checkpoints.export).resolve()
    if folder.is_file() or config.folder.resolve().is_relative_to(folder):
        what = "a file" if folder.is_file() else "a folder that holds the run itself (logging.folder)"
        raise ValueError(
            f"checkpoints.export must be a folder of its own, which is replaced as a whole, got {folder}, {what}"
        )
    if config.model.preset and shape is not None:
        check_gpt(shape)


def check_gpt(shape: GPTConfig) -> None:
    if shape.num_kv_heads != shape.heads:
        raise ValueError(
            "checkpoints.export writes a preset as a GPT-2, which has keys and values for every head, got "
            f"{shape.num_kv_heads} kv_heads for {shape.heads} heads; leave it out: checkpoints are written in any case"
        )
    import_extra("transformers", "hf", "checkpoints.export")


def export_gpt(
    checkpoint: Path, shape: GPTConfig, dtype: torch.dtype, end: int, folder: Path, finish: Callable[[Path], None]
) -> None:
    """From a checkpoint, in one process that has memory for the whole model. ``finish`` adds files before the folder is
    put in place. Other files in the folder stay."""
    from terapipe.hf.save import write_beside

    problems = damage(checkpoint)
    if problems:
        raise ValueError(f"the checkpoint {checkpoint} to be exported is damaged: {'; '.join(problems)}")
    with torch.device("meta"):
        meta = GPT(shape).to(dtype).state_dict()
    if shape.tied:
        meta.pop("head.weight")
    state = {name: torch.empty(x.shape, dtype=dtype) for name, x in meta.items()}
    with without_dist_warning():
        load({"model": state}, storage_reader=Reader(checkpoint), planner=TensorsOnly(), no_dist=True)
    folder = folder.resolve()
    recover(folder)
    replace_folder(folder, write_beside(folder, as_gpt2(state, shape, dtype, end), finish))


def as_gpt2(state: dict[str, Tensor], shape: GPTConfig, dtype: torch.dtype, end: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.max_seq_len,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn_hidden,
        tie_word_embeddings=shape.tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        dtype=dtype,
    )
    model: Any = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    model.to(dtype)
    keys = model.load_state_dict(dict(_rename(state, shape)), strict=False)
    assert not keys.unexpected_keys and set(keys.missing_keys) <= ({"lm_head.weight"} if shape.tied else set())
    return model


_NAMES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_TRANSPOSED = ("attn.c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 stores these with inputs first


def _rename(state: dict[str, Tensor], shape: GPTConfig) -> list[tuple[str, Tensor]]:
    renamed = []
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            prefix = f"transformer.h.{number}."
        if module == "attention.qkv":  # ours stores queries, keys and values of each head together
            heads = tensor.view(shape.heads, 3, shape.head_size, *tensor.shape[1:])
            tensor = heads.transpose(0, 1).flatten(0, 2)
        new = f"{prefix}{_NAMES[module]}.{kind}"
        renamed.append((new, tensor.T if new.endswith(_TRANSPOSED) else tensor))
    return renamed
