"""The GPT family of the paper: a plain model, and the same modules taken apart into stages."""

import copy
import hashlib
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe.modeling.attention import SliceCache, attend
from terapipe.modeling.linear import project
from terapipe.modeling.stage import IGNORE
from terapipe.presets import PRESETS, GPTConfig


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_size = config.heads, config.num_kv_heads, config.head_size
        self.qkv = nn.Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.head_size)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        heads = project(self.qkv, x, cache).view(*x.shape[:2], -1, self.head_size).transpose(1, 2)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            mixed = attend(q, k, v, cache, self.layer)
        return project(self.out, mixed.transpose(1, 2).flatten(2), cache)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, layer)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, config.ffn_hidden)
        self.down = nn.Linear(config.ffn_hidden, config.hidden)

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        x = x + self.attention(self.norm1(x), cache)
        wide = F.gelu(project(self.up, self.norm2(x), cache), approximate="tanh")
        return x + project(self.down, wide, cache)


class GPT(nn.Module):
    """A decoder, or some of its layers: a stage is a GPT with the other layers left out.

    Called with token ids and labels it is the plain model on one device. Every parameter is drawn from a generator
    seeded with its name, so the same seed gives the same model however it is split. To build a model too large for
    one device, build it under ``torch.device("meta")``: each rank then makes real only its own stage.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.first, self.last = 0, config.layers
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocab, config.hidden)
        self.positions: nn.Embedding | None = nn.Embedding(config.max_tokens, config.hidden)
        # Keyed by the layer's number in the whole model, so that a stage's parameters keep their names.
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(config.hidden)
        self.head: nn.Linear | None = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.initialise()

    @classmethod
    def from_preset(cls, name: str, *, seed: int = 0) -> Self:
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        return cls(PRESETS[name], seed=seed)

    @torch.no_grad()
    def initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(self._drawn(name, parameter))

    def _drawn(self, name: str, parameter: Tensor) -> Tensor:
        # A tied head has the embedding's name on the first stage and its own on the last; both draw the same.
        source = "embedding.weight" if self.config.tied and name == "head.weight" else name
        digest = hashlib.blake2b(f"{self.seed}/{source}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        residual = name.endswith(("attention.out.weight", "down.weight"))
        std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
        return torch.empty(parameter.shape).normal_(std=std, generator=generator)

    # The plain model

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        """Hidden states from token ids, or on a later stage from the hidden states before it."""
        if self.embedding is not None and self.positions is not None:
            start = 0 if cache is None else cache.context
            x = self.embedding(x) + self.positions(torch.arange(start, start + x.shape[1], device=x.device))
        for block in self.layers.values():
            x = block(x, cache)
        return x

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Sum over the labels that count; divide by their number for the mean."""
        if self.norm is None or self.head is None:
            raise ValueError(f"only the last stage has a head, this one holds layers {self.first} to {self.last}")
        logits: Tensor = self.head(self.norm(hidden))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precisions are too coarse for a sum
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    # As a Splittable and a Stage

    @property
    def num_layers(self) -> int:
        return self.config.layers

    @property
    def tied(self) -> tuple[str, ...]:
        return ("embedding.weight", "head.weight") if self.config.tied else ()

    def stage(self, first: int, last: int, device: torch.device) -> "GPT":
        """Shares this model's modules; a model on the meta device is left as it is and the stage made anew."""
        if not 0 <= first < last <= self.config.layers:
            raise ValueError(f"a stage is some of the {self.config.layers} layers, got {first} to {last}")
        part = GPT.__new__(GPT)
        nn.Module.__init__(part)
        part.config, part.seed, part.first, part.last = self.config, self.seed, first, last
        starts, ends = first == 0, last == self.config.layers
        part.embedding, part.positions = (self.embedding, self.positions) if starts else (None, None)
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in range(first, last)})
        part.norm, part.head = (self.norm, self.head) if ends else (None, None)
        if any(p.is_meta for p in part.parameters()):
            part = copy.deepcopy(part).to_empty(device=device)
            if self.config.tied and part.embedding is not None and part.head is not None:
                part.head.weight = part.embedding.weight
            part.initialise()
        return part.to(device)

    def make_cache(self, size: int, tokens: int) -> SliceCache:
        if tokens > self.config.max_tokens:
            raise ValueError(f"the model has positions for {self.config.max_tokens} tokens, got sequences of {tokens}")
        return SliceCache(tokens)

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        return (size, length, self.config.hidden)
