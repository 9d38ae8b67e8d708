"""A GPTConfig of the same cost as a Hugging Face decoder, from which the planner computes bytes and FLOPs."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from terapipe.modeling.hf.decoder import Decoder
from terapipe.modeling.hf.structure import text_config
from terapipe.presets import GPTConfig

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")


def shape_of(decoder: Decoder) -> GPTConfig:
    """The GPT with as many parameters per layer and token; of a layer's experts, only those that a token visits count.

    - Parameters of a layer's matrices beyond a GPT's attention count as feed-forward: a gated one of width f becomes
      one of width 1.5 f.
    - In a GPT all heads together are as wide as the hidden states. If the model's are not, the GPT gets heads whose
      keys and values have the right size, or the nearest to it (see ``_heads``). The difference in parameters goes to
      the feed-forward.
    - ``max_seq_len`` does not limit sequences: it is the number of rows of other parameters before the layers, each as
      wide as the hidden states. These are learned positions if there are any, else 1.
    """
    config, layers = text_config(decoder.model.config), decoder.num_layers
    hidden, vocab, tied = int(config.hidden_size), int(config.vocab_size), bool(decoder.tied)
    heads, kv_heads = _heads(config, hidden)
    attention = 2 * hidden * hidden * (1 + kv_heads / heads)
    ffn = max(1, round((_matrices(decoder) - attention) / (2 * hidden)))
    ends = ((1 if tied else 2) * vocab + 2) * hidden  # embedding, head, and the norm before it
    rows = max(1, (_outside(decoder) - ends) // hidden)
    return GPTConfig(layers, hidden, heads, kv_heads, ffn, vocab, rows, tied)


def _heads(config: Any, hidden: int) -> tuple[int, int]:
    """Numbers of heads of queries, and of keys and values.

    A GPT with hidden size h and a heads has heads of size h / a, so with b heads of keys and values it caches 2 h b / a
    numbers per token. We need 2 kv_heads * width: the pair (a, b) with b / a nearest to kv_heads * width / h, where a
    divides h and b divides a. Among equals, the numbers nearest to the model's own.
    """
    heads = _number(config, "num_attention_heads") or 1
    # SliceCache holds the inputs of attention, also for latent attention, which could keep less.
    latent = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    width = latent or _number(config, "head_dim") or hidden // heads
    kv_heads = next((n for name in KV_HEADS if (n := _number(config, name))), heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # whatever else the configuration of a Falcon says
    ratio = min(1.0, kv_heads * width / hidden)
    return min(
        ((a, b) for a in _divisors(hidden) for b in _divisors(a)),
        key=lambda pair: (abs(pair[1] / pair[0] - ratio), abs(pair[1] - kv_heads), abs(pair[0] - heads)),
    )


def _number(config: Any, name: str) -> int:
    """The largest, if layers differ."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, Sequence) else value)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _layers(decoder: Decoder) -> list[nn.Module]:
    return list(decoder.model.get_submodule(decoder.structure.layers).children())


def _matrices(decoder: Decoder) -> float:
    """Parameters in the matrices of one layer, on average."""
    sizes = [
        p.numel() * decoder.visited(name)
        for layer in _layers(decoder)
        for name, p in layer.named_parameters()
        if p.ndim > 1
    ]
    return sum(sizes) / decoder.num_layers


def _outside(decoder: Decoder) -> int:
    """Parameters outside of layers."""
    inside = {p for layer in _layers(decoder) for p in layer.parameters()}
    return sum(p.numel() for p in decoder.model.parameters() if p not in inside)
