"""A trained model in Hugging Face's format: such models as they are, and a GPT of ours as the GPT-2 that it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from terapipe.files import put_in_place, recover
from terapipe.modeling.gpt import GPT
from terapipe.presets import GPTConfig
from terapipe.runtime.checkpoint.manifest import damage
from terapipe.runtime.checkpoint.reader import Reader, TensorsOnly
from terapipe.runtime.checkpoint.state import alone_is_fine


def check_gpt(shape: GPTConfig) -> None:
    if shape.num_kv_heads != shape.heads:
        raise ValueError(
            "checkpoints.export writes a preset as a GPT-2, which has keys and values for every head, got "
            f"{shape.num_kv_heads} kv_heads for {shape.heads} heads; leave it out: checkpoints are written in any case"
        )
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"checkpoints.export needs transformers: pip install 'terapipe[hf]' ({error})") from None


def export_gpt(
    checkpoint: Path, shape: GPTConfig, dtype: torch.dtype, end: int, folder: Path, finish: Callable[[Path], None]
) -> None:
    """From a checkpoint, by one process that has room for the whole model. ``finish`` adds to the folder before it is
    put in place; what else is in it stays."""
    from terapipe.runtime.checkpoint.hugging_face import write_beside

    wrong = damage(checkpoint)
    if wrong:
        raise ValueError(f"the checkpoint {checkpoint} to be exported is damaged: {'; '.join(wrong)}")
    with torch.device("meta"):
        names = GPT(shape).to(dtype).state_dict()
    if shape.tied:
        names.pop("head.weight")
    state = {name: torch.empty(x.shape, dtype=dtype) for name, x in names.items()}
    with alone_is_fine():
        load({"model": state}, storage_reader=Reader(checkpoint), planner=TensorsOnly(), no_dist=True)
    folder = folder.resolve()
    recover(folder)
    put_in_place(folder, write_beside(folder, as_gpt2(state, shape, dtype, end), finish))


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
    found = model.load_state_dict(dict(_renamed(state, shape)), strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= ({"lm_head.weight"} if shape.tied else set())
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
_TURNED = ("attn.c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 has these with inputs first


def _renamed(state: dict[str, Tensor], shape: GPTConfig) -> list[tuple[str, Tensor]]:
    found = []
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            prefix = f"transformer.h.{number}."
        if module == "attention.qkv":  # ours has each head's queries, keys and values together
            heads = tensor.view(shape.heads, 3, shape.head_size, *tensor.shape[1:])
            tensor = heads.transpose(0, 1).flatten(0, 2)
        new = f"{prefix}{_NAMES[module]}.{kind}"
        found.append((new, tensor.T if new.endswith(_TURNED) else tensor))
    return found
