"""Export to the Hugging Face format: Hugging Face models as they are, our GPT as a GPT-2.

Our GPT computes what GPT-2 computes, with other names and another order of two tensors::

    ours                                  GPT-2
    layers.3.attention.qkv.weight         transformer.h.3.attn.c_attn.weight
      (out, in)                             (in, out): `Conv1D`, transposed
      rows: head 0 q k v, head 1 q k v ...  columns: q of all heads, then k, then v

"""

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
    """Refuses an impossible checkpoints.export before training.

    Args:
        config: Of the run.
        shape: That of a preset; None for other models.
    """
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
    """Refuses a shape that GPT-2 does not have, and an installation without transformers, which writes it.

    Args:
        shape: Of the preset.
    """
    if shape.num_kv_heads != shape.heads:
        raise ValueError(
            "checkpoints.export writes a preset as a GPT-2, which has keys and values for every head, got "
            f"{shape.num_kv_heads} kv_heads for {shape.heads} heads; leave it out: checkpoints are written in any case"
        )
    import_extra("transformers", "hf", "checkpoints.export")


def export_gpt(
    checkpoint: Path, shape: GPTConfig, dtype: torch.dtype, end: int, folder: Path, finish: Callable[[Path], None]
) -> None:
    """Writes a GPT-2 from a checkpoint, in one process that has memory for the whole model. Other files in the folder
    stay.

    From the files, not from the pipeline: so other ranks need not take part, and what is exported is what was saved.

    Args:
        checkpoint: Its folder, of any layout.
        shape: Of the model.
        dtype: To write.
        end: The tokenizer's end token, which GPT-2 also begins with.
        folder: Is replaced as a whole, when the new one is complete.
        finish: Adds files, the tokenizer's, before the folder is put in place.
    """
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
    """Returns a `GPT2LMHeadModel` with these weights. It has no dropout: our GPT was trained without.

    Args:
        state: Names and tensors of our GPT.
        shape: Of the model.
        dtype: Of its weights.
        end: The id that begins and ends a text.
    """
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


# Our module names, without the number of the layer, and those of GPT-2.
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
    """Names and tensors of GPT-2, as drawn above.

    Queries, keys and values of each head lie together in ours: a rank of tensor parallelism takes whole heads, and so
    takes neighboring rows.
    """
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
