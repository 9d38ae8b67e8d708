"""The two models of the benchmark, as terapipe takes them and as modules for torch's schedules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from terapipe import GPT, GPTConfig
from terapipe.hf import Decoder

LAYERS, HIDDEN, VOCAB, MOST = 4, 512, 256, 8192
GPT_CONFIG = GPTConfig(layers=LAYERS, hidden=HIDDEN, heads=8, vocab=VOCAB, max_seq_len=MOST)
LLAMA_CONFIG = LlamaConfig(
    num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=1408, num_attention_heads=8,
    num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=MOST,
)  # fmt: skip

Cuts = tuple[tuple[int, ...], ...]  # lengths of the slices of each sequence


class GPTPart(nn.Module):
    """A stage for torch's schedules: the same modules, whole sequences, torch's own attention."""

    def __init__(self, first: int, last: int, config: GPTConfig = GPT_CONFIG) -> None:
        super().__init__()
        self.stage = GPT(config).stage(first, last, torch.device("cpu"))
        self.last = last == LAYERS

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stage(x)
        return self.stage.head(self.stage.norm(hidden)) if self.last else hidden


class LlamaPart(nn.Module):
    """The same of a Hugging Face Llama: its own layers, as its forward calls them."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        model: Any = llama()
        self.last = last == LAYERS
        self.embedding = model.model.embed_tokens if first == 0 else None
        self.rotary, self.layers = model.model.rotary_emb, model.model.layers[first:last]
        self.norm, self.head = (model.model.norm, model.lm_head) if self.last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        places = torch.arange(hidden.shape[1])[None]
        rotated = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotated, position_ids=places, use_cache=False)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA_CONFIG)


@dataclass(frozen=True)
class Family:
    """A model, and its slices under terapipe-v by the number of sequences, as the planner cuts 2048 tokens from a
    profile on two such cores."""

    key: str  # prefix of its figures
    title: str
    whole: Callable[[], Any]  # for a Pipeline
    part: Callable[[int, int], Any]  # for torch's schedules
    folded: dict[int, Cuts]


GPT_FAMILY = Family(
    "",
    "GPT",
    lambda: GPT(GPT_CONFIG),
    GPTPart,
    {
        1: ((152, 280, 384, 384, 392, 272, 128, 56),),
        2: ((264, 448, 392, 344, 312, 288), (504, 416, 368, 328, 304, 128)),
        4: ((200, 360, 584, 904), (2048,), (2048,), (1272, 480, 208, 88)),
    },
)
LLAMA_FAMILY = Family("hf_", "Llama", lambda: Decoder(llama()), LlamaPart, GPT_FAMILY.folded)
FAMILIES = {family.title: family for family in (GPT_FAMILY, LLAMA_FAMILY)}
