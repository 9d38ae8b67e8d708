"""Shapes of models, to build a GPT with and to plan with. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from terapipe.planning.limits import LARGEST, check_whole_number
from terapipe.planning.recompute import MODES, Recompute


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a decoder of the GPT family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many as heads
    ffn: int | None = None  # hidden size of the MLP; None: four times hidden
    vocab: int = 50257
    max_seq_len: int = 2048  # rows of learned positions; 1 where positions are rotated: it bounds no sequence then
    tied: bool = True  # whether head and embedding share their weight
    head_dim: int | None = None  # features of an attention head; None: all heads together are as wide as hidden
    # Of each layer, the tokens that a token sees at most, itself included (sliding windows, chunks); 0: all before it.
    # Empty: all layers see all.
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            check_whole_number(name, getattr(self, name), most=most)
        if self.head_dim is not None:
            check_whole_number("head_dim", self.head_dim, most=LARGEST["hidden"])
        elif self.hidden % self.heads:
            raise ValueError(
                f"hidden must be a multiple of heads, or head_dim be given, got {self.hidden} and {self.heads}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.num_kv_heads}")
        object.__setattr__(self, "windows", tuple(self.windows))  # JSON has lists
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(
                f"windows must have one number for each of {self.layers} layers, or none, got {len(self.windows)}"
            )
        for window in self.windows:
            if isinstance(window, bool) or not isinstance(window, int) or window < 0:
                raise ValueError(f"a window must be a whole number of tokens, or 0 to see all, got {window!r}")

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """Features of all query heads together. In Qwen3, Gemma and others it is not the hidden width."""
        return self.heads * self.head_size

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values. Fewer than query heads with grouped-query attention."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token of the layer sees at most, itself included; None if it sees all.

        Args:
            layer: The layer's number.
        """
        return (self.windows[layer] or None) if self.windows else None

    @property
    def ffn_hidden(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer."""
        h, projected = self.hidden, self.attention_width + 2 * self.num_kv_heads * self.head_size
        attention = (h + 1) * projected + (self.attention_width + 1) * h
        mlp = 2 * h * self.ffn_hidden + self.ffn_hidden + h
        return attention + mlp + 4 * h

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        ends = (self.vocab if self.tied else 2 * self.vocab) * self.hidden + self.max_seq_len * self.hidden
        return self.layers * self.layer_parameters + ends + 2 * self.hidden

    def layer_flops(self, tokens: int) -> float:
        """FLOPs of one layer's forward over a sequence of this length. A multiply-add counts as two.

        Args:
            tokens: Of the sequence, all seen causally: half of the square.
        """
        return 2.0 * tokens * self.layer_parameters + 2.0 * tokens * tokens * self.attention_width

    def head_flops(self, tokens: int) -> float:
        """FLOPs of the head's forward over this many tokens.

        Args:
            tokens: Whose logits are computed.
        """
        return 2.0 * tokens * self.hidden * self.vocab


PRESETS: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(layers=4, hidden=64, heads=4, vocab=256, max_seq_len=1024),
    "gpt-small": GPTConfig(layers=6, hidden=256, heads=4, vocab=256, max_seq_len=4096),
    # The models of the TeraPipe paper.
    "gpt3-1b": GPTConfig(layers=24, hidden=2048, heads=16),
    "gpt3-13b": GPTConfig(layers=40, hidden=5120, heads=40),
    "gpt3-44b": GPTConfig(layers=96, hidden=6144, heads=48),
    "gpt3-175b": GPTConfig(layers=96, hidden=12288, heads=96),
    # The shapes of Llama 3, for planning. A gated MLP of width f has as many FLOPs as a plain one of width 1.5 f.
    # Positions are rotated, so there are no rows of learned ones but one.
    "llama3-8b": GPTConfig(32, 4096, 32, 8, 21504, 128256, 1, tied=False),
    "llama3-70b": GPTConfig(80, 8192, 64, 8, 43008, 128256, 1, tied=False),
    "llama3-405b": GPTConfig(126, 16384, 128, 8, 79872, 128256, 1, tied=False),
}
"""Shapes of known models by name, for ``GPT(config)`` and for planning."""


@dataclass(frozen=True)
class FrozenLayers:
    """Layers of which only a few parameters are trained, such as adapters, in bytes. The rest has no gradients and no
    state of an optimizer, and may be quantized.

    Args:
        layer_bytes: Of a layer's frozen weights, with the scales of quantized ones.
        trained: Parameters of a layer that are trained, in float32 or wider.
        ends_trained: Whether embedding, head and the norm before it are trained.
        quantized: Whether weights are quantized: each product then makes its weight anew, for as long as it takes.
    """

    layer_bytes: float
    trained: float
    ends_trained: bool = False
    quantized: bool = False


class LayerBytes(NamedTuple):
    """Bytes of each token that a layer keeps for its backward, keys and values left out, by modes of recomputation.
    Those of the others are as of any model: inputs, and with ``block`` the outputs of attention."""

    none: float
    light: float


@dataclass(frozen=True)
class ModelSpec:
    """What the planner must know about a model. Your own model may return it from ``planning_spec()``."""

    config: GPTConfig  # a GPT of about the same shape
    min_slice: int = 1  # tokens in the shortest slice with which the model is exact
    recompute_modes: tuple[Recompute, ...] = MODES  # that the model supports
    # Whether gradients of weights are added to their sum by the product itself, and can be deferred. Not so in layers
    # of Hugging Face models that are compiled: compiled code knows the class of their linear layers.
    fused_grads: bool = True
    bare_ends: bool = (
        False  # whether the embedding and the head may be stages of their own: PipelineModel.has_bare_ends
    )
    frozen: FrozenLayers | None = None  # where most weights of layers are; None if all are trained
    # From the bytes of a product's number, and whether products are autocast to it: what a layer keeps, or None where
    # nobody knows. Left out: what a GPT's keeps.
    layer_bytes: Callable[[int, bool], LayerBytes | None] | None = field(default=None, compare=False)

    def compiled(self, *, fused: bool = False) -> "ModelSpec":
        """The same model with compiled layers. Light recomputation cannot look into them.

        Args:
            fused: Whether their linear layers stay outside of what is compiled, as those of our GPT.
        """
        modes = tuple(mode for mode in self.recompute_modes if mode != "light")
        return replace(self, recompute_modes=modes, fused_grads=fused)


def gpt_config(text: str) -> GPTConfig:
    """A preset by its name, or a shape such as ``layers=96,hidden=12288,heads=96,kv_heads=8,ffn=49152,vocab=50257``.

    Args:
        text: What the user typed. ``layers``, ``hidden`` and ``heads`` are needed; the others are as in `GPTConfig`.
    """
    if "=" not in text:
        if text not in PRESETS:
            likely = get_close_matches(text, PRESETS, 1)
            hint = f"did you mean {likely[0]!r}? " if likely else ""
            raise ValueError(
                f"unknown model {text!r}; {hint}the presets are {', '.join(PRESETS)}; or give a shape: "
                "layers=96,hidden=12288,heads=96"
            )
        return PRESETS[text]
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "max_seq_len", "head_dim")
    shape: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = (word.strip() for word in item.partition("="))
        if name not in names or not value.isdecimal() or name in shape:
            raise ValueError(f"a shape is NAME=NUMBER,... with names from {', '.join(names)}, each once, got {item!r}")
        shape[name] = int(value)
    missing = [name for name in names[:3] if name not in shape]
    if missing:
        raise ValueError(f"a shape needs layers, hidden and heads, {text!r} lacks {', '.join(missing)}")
    return GPTConfig(**shape)
