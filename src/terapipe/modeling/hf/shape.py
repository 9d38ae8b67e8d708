"""The shape of a Hugging Face decoder, in the terms of a GPT: what the planner reckons bytes and products with."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from terapipe.modeling.hf.decoder import Decoder
from terapipe.modeling.hf.structure import text_config
from terapipe.presets import GPTConfig

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")


def shape_of(decoder: Decoder) -> GPTConfig:
    """The GPT that holds and multiplies as many numbers; of a layer's experts only those count that a token visits.

    - What a layer's matrices have beyond a GPT's attention is its feed-forward: a gated one of width f is 1.5 f wide.
    - A GPT's heads together are as wide as its hidden states. Where the model's are not, there are as many as give keys
      and values of the right size, or the nearest to it (never wider than the hidden states). The products with them
      count in the feed-forward; but the scores of attention are taken for those of heads of that width.
    - ``max_seq_len`` is not how long sequences may be: it is what else lies before the layers, in rows as wide as the
      hidden states. Learned positions, if there are any, else 1.
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
    """Of queries, and of keys and values: by their width relative to the hidden states, then by their number."""
    heads = _number(config, "num_attention_heads") or 1
    # Caches of slices hold what attention is given, also where a model could keep less (latent attention).
    latent = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    width = latent or _number(config, "head_dim") or hidden // heads
    kv_heads = next((n for name in KV_HEADS if (n := _number(config, name))), heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # whatever else a Falcon's configuration says
    wanted = min(1.0, kv_heads * width / hidden)
    return min(
        ((a, b) for a in _divisors(hidden) for b in _divisors(a)),
        key=lambda pair: (abs(pair[1] / pair[0] - wanted), abs(pair[1] - kv_heads), abs(pair[0] - heads)),
    )


def _number(config: Any, name: str) -> int:
    """Of models whose layers differ, the largest."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, Sequence) else value)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _layers(decoder: Decoder) -> list[nn.Module]:
    return list(decoder.model.get_submodule(decoder.parts.layers).children())


def _matrices(decoder: Decoder) -> float:
    """Their numbers in one layer, on average."""
    found = [
        p.numel() * decoder.visited(name)
        for layer in _layers(decoder)
        for name, p in layer.named_parameters()
        if p.ndim > 1
    ]
    return sum(found) / decoder.num_layers


def _outside(decoder: Decoder) -> int:
    """Parameters that belong to no layer."""
    inside = {p for layer in _layers(decoder) for p in layer.parameters()}
    return sum(p.numel() for p in decoder.model.parameters() if p not in inside)
