"""Models of one's own from a small grammar of layers, each with a plain form that knows nothing of slices.

A layer is ``forward(x, cache)`` where a slice is computed, and with a ``Rows`` in place of the cache it is the plain
layer of whole rows. What differs between the two is in few places: attention, and states that slices carry on.
"""

import copy
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe import PipelineModel, Stage, attend
from terapipe.modeling.stage import AuxiliaryLoss, SumsOver, TensorParallel
from tests.fuzz.case import Own

HIDDEN, HEADS, VOCAB, TOKENS, EXPERTS = 16, 4, 19, 64, 3
PLACES = 8  # of a convolution's kernel
DROPPED = 0.3


class Rows:
    """In place of a cache: whole rows.

    Args:
        positions: Of every token in its document, (rows, tokens).
        masks: What dropout of each layer multiplied by, where the pipeline drew it.
    """

    def __init__(self, positions: Tensor, masks: dict[str, Tensor]) -> None:
        self.positions, self.masks = positions, masks
        self.sums: list[Tensor] = []  # for the auxiliary loss: of every layer, (rows, EXPERTS)
        places = torch.arange(positions.shape[1])
        starts = places - positions  # the first token of a token's document
        self.distance = places[:, None] - places[None, :]
        self.sees = (self.distance >= 0)[None] & (places[None, None, :] >= starts[:, :, None])


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    *,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    chunk: int | None,
) -> Tensor:
    """As ``attend``, by the formula."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    sees = rows.sees
    if window is not None:
        sees = sees & (rows.distance < window)
    if chunk is not None:
        parts = rows.positions // chunk
        sees = sees & (parts[:, :, None] == parts[:, None, :])
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v
    return torch.softmax(scores, -1) @ v


class Attention(nn.Module):
    def __init__(self, name: str, kv_heads: int = HEADS, width: int = HIDDEN // HEADS, **options: Any) -> None:
        super().__init__()
        self.name, self.kv_heads, self.width, self.options = name, kv_heads, width, options
        size = HIDDEN // HEADS
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, kv_heads * size, bias=False)
        self.v, self.out = nn.Linear(HIDDEN, kv_heads * width), nn.Linear(HEADS * width, HIDDEN)
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if options.pop("sinks", False) else None

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in self._layers())
        options = {"softcap": None, "window": None, "chunk": None, **self.options, "sinks": self.sinks}
        if isinstance(cache, Rows):
            mixed = plain_attention(q, k, v, cache, **options)
        else:
            mixed = attend(q, k, v, cache, self.name, **options)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _layers(self) -> list[tuple[nn.Module, int]]:
        return [(self.q, HEADS), (self.k, self.kv_heads), (self.v, self.kv_heads)]


class TwoAttentions(nn.Module):
    """One layer that attends twice, with the same weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = Attention(name)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        name = self.inner.name
        first = self.inner(x, cache)
        self.inner.name = f"{name} again"
        try:
            return first + 0.5 * self.inner(torch.tanh(first), cache)
        finally:
            self.inner.name = name


class Mlp(nn.Module):
    def __init__(self, name: str, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN), activation

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Checkpointed(Mlp):
    """A layer that computes itself again."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return checkpoint(super().forward, x, cache, use_reentrant=False)  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 40, bias=False), nn.Linear(20, HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Twice(nn.Module):
    """One linear layer, called twice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Bare(nn.Module):
    """Parameters that are no module's: a matrix, a scale, a bias."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(HIDDEN, HIDDEN)), nn.Parameter(torch.ones(HIDDEN))
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.scale + torch.einsum("bti,ij->btj", x.sin(), self.weight)


class LowRank(nn.Module):
    """A frozen matrix and a trained one of two columns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.a, self.b = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Recurrence(nn.Module):
    """h[t] = a[t] * h[t - 1] + (1 - a[t]) * u[t], anew in every document."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.gate, self.inner, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        gates, inner = torch.sigmoid(self.gate(x)), torch.tanh(self.inner(x))
        positions = cache.positions if isinstance(cache, Rows) else cache.positions(x.device)
        gates = gates * (positions > 0)[..., None]
        state = torch.zeros_like(inner[:, 0]) if isinstance(cache, Rows) else cache.get_state(self.name)
        states = []
        for t in range(x.shape[1]):
            new = (1 - gates[:, t]) * inner[:, t]
            state = new if state is None else gates[:, t] * state + new
            states.append(state)
        if not isinstance(cache, Rows):
            cache.set_state(self.name, states[-1])
        return self.out(torch.stack(states, 1))


class Convolution(nn.Module):
    """A causal convolution of each feature, which does not look beyond the beginning of a document."""

    def __init__(self, name: str, places: int) -> None:
        super().__init__()
        self.name, self.places = name, places
        self.inner, self.kernel = nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.zeros(places, HIDDEN))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        inner, before = self.inner(x), x.new_zeros(len(x), self.places - 1, HIDDEN)
        if isinstance(cache, Rows):
            positions = cache.positions
            wide = torch.cat([before.to(inner.dtype), inner], 1)
        else:
            positions = cache.positions(x.device)
            left = cache.get_state(self.name)
            wide = torch.cat([before.to(inner.dtype) if left is None else left, inner], 1)
            if self.places > 1:
                cache.set_state(self.name, wide[:, wide.shape[1] - self.places + 1 :])
        out = torch.zeros_like(inner)
        for back in range(self.places):
            first = self.places - 1 - back
            part = wide[:, first : first + x.shape[1]] * self.kernel[back]
            out = out + torch.where((positions >= back)[..., None], part, 0.0)
        return F.silu(out)


class Experts(nn.Module):
    """A mixture of two of three experts, whose router has an auxiliary loss if the model has one."""

    def __init__(self, name: str, balance: bool) -> None:
        super().__init__()
        self.balance = balance
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        shares = torch.softmax(self.router(x), -1)
        best = torch.zeros_like(shares).scatter(-1, shares.topk(2, -1).indices, 1.0)
        if self.balance:
            sums = shares.to(torch.float64).sum(1)
            if isinstance(cache, Rows):
                cache.sums.append(sums)
            else:
                cache.add_sums("balance", sums.sum(0))
        parts = [layer(x) * (shares * best)[..., i, None] for i, layer in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class Dropout(nn.Module):
    """Draws as torch does, and tells what it drew, so that the plain model can drop the same."""

    def __init__(self, name: str, native: bool) -> None:
        super().__init__()
        self.name, self.native, self.linear = name, native, nn.Linear(HIDDEN, HIDDEN)
        self.note: Callable[[str, Tensor], None] = lambda name, mask: None

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = self.linear(x)
        if isinstance(cache, Rows):
            return x * cache.masks[self.name] if self.name in cache.masks else x
        if not self.training:
            return x
        if self.native:
            mask = F.dropout(torch.ones_like(x), DROPPED, training=True)
        else:
            mask = torch.empty_like(x).bernoulli_(1 - DROPPED) / (1 - DROPPED)
        self.note(self.name, mask.detach())
        return x * mask


class Strided(nn.Module):
    """Views, an operation in place, and an output that is not contiguous."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        inner = self.linear(x).relu_().unflatten(-1, (4, 4)).transpose(2, 3).flatten(2)
        return self.out(inner.transpose(0, 1)).transpose(0, 1)


KINDS: dict[str, Callable[[str, bool], nn.Module]] = {
    "attention": lambda name, _: Attention(name),
    "one-head": lambda name, _: Attention(name, kv_heads=1),
    "wide-values": lambda name, _: Attention(name, kv_heads=2, width=7),
    "sinks": lambda name, _: Attention(name, sinks=True),
    "softcap": lambda name, _: Attention(name, softcap=2.0),
    "window-1": lambda name, _: Attention(name, window=1),
    "window-3": lambda name, _: Attention(name, window=3),
    "window-9": lambda name, _: Attention(name, kv_heads=2, window=9, sinks=True),
    "chunk-4": lambda name, _: Attention(name, chunk=4),
    "chunk-7": lambda name, _: Attention(name, kv_heads=2, chunk=7, softcap=3.0),
    "two-attentions": lambda name, _: TwoAttentions(name),
    "mlp": lambda name, _: Mlp(name),
    "relu": lambda name, _: Mlp(name, F.relu),
    "checkpointed": lambda name, _: Checkpointed(name),
    "gated": lambda name, _: Gated(name),
    "twice": lambda name, _: Twice(name),
    "bare": lambda name, _: Bare(name),
    "low-rank": lambda name, _: LowRank(name),
    "recurrence": lambda name, _: Recurrence(name),
    "convolution-1": lambda name, _: Convolution(name, 1),
    "convolution-4": lambda name, _: Convolution(name, 4),
    "convolution-8": lambda name, _: Convolution(name, PLACES),
    "experts": Experts,
    "dropout": lambda name, _: Dropout(name, native=False),
    "native-dropout": lambda name, _: Dropout(name, native=True),
    "strided": lambda name, _: Strided(name),
}


class Block(nn.Module):
    """Kinds joined by ``+`` are computed side by side, each added to its input; behind a norm of either sort.

    Args:
        kind: Of the layer.
        number: Of the layer.
        balance: Whether routers add to the auxiliary loss.
    """

    def __init__(self, kind: str, number: int, balance: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN) if number % 2 else nn.LayerNorm(HIDDEN)
        # Each has a name of its own in the cache.
        parts = enumerate(kind.split("+"))
        self.parts = nn.ModuleList(KINDS[part](f"{number}.{i}", balance) for i, part in parts)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        inner = self.norm(x)
        for part in self.parts:
            x = x + part(inner, cache)
        return x


def balance_of(totals: Tensor) -> Tensor:
    """The auxiliary loss: least where all experts have the same share."""
    shares = totals / totals.sum()
    return 0.3 * EXPERTS * shares.square().sum()


class OwnModel(Stage, PipelineModel):
    """A whole model, and with some of its layers left out a stage of it.

    Args:
        description: What it is made of.
        num_layers: How many layers it has.
    """

    hidden_size, vocabulary, has_bare_ends = HIDDEN, (VOCAB, VOCAB), True

    def __init__(self, description: Own, num_layers: int) -> None:
        super().__init__()
        self.description, self.num_layers = description, num_layers
        self.config = {"layers": description.layers, "tied": description.tied}
        self.tied = ("embedding.weight", "head.weight") if description.tied else ()
        kinds, balance = description.layers, bool(description.balance)
        if balance and any("experts" in kind for kind in kinds[:num_layers]):
            over: SumsOver = description.balance  # type: ignore[assignment]
            self.has_auxiliary_losses = True
            self.auxiliary_losses = {"balance": AuxiliaryLoss(EXPERTS, balance_of, over)}
        self.embedding: nn.Embedding | None = nn.Embedding(VOCAB, HIDDEN)
        self.places: nn.Embedding | None = nn.Embedding(TOKENS, HIDDEN)
        self.layers = nn.ModuleDict({str(i): Block(kinds[i % len(kinds)], i, balance) for i in range(num_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(HIDDEN)
        self.head: nn.Linear | None = nn.Linear(HIDDEN, VOCAB, bias=False)
        if description.tied:
            self.head.weight = self.embedding.weight
        self._draw_weights()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """By name, whatever else the model has: so a case that is made smaller keeps the weights that it keeps."""
        for name, p in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            scale = 1.0 if "embedding" in name else 0.4 if p.dim() > 1 else 0.1
            p.copy_(values * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0))

    def stage(
        self,
        first: int,
        last: int,
        device: torch.device,
        tp: TensorParallel | None = None,
        *,
        embeds: bool | None = None,
        has_head: bool | None = None,
    ) -> "OwnModel":
        embeds, has_head = self.ends_of(first, last, embeds, has_head)
        part = copy.copy(self)
        part._modules = dict(self._modules)
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in range(first, last)})
        if not embeds:
            part.embedding = part.places = None
        if not has_head:
            part.norm = part.head = None
        return copy.deepcopy(part)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        if self.embedding is not None and self.places is not None:
            positions = cache.positions if isinstance(cache, Rows) else cache.positions(x.device)
            x = self.embedding(x) + self.places(positions)
        for layer in self.layers.values():
            x = layer(x, cache)
        return x

    def before_head(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        assert self.norm is not None
        assert self.head is not None
        return self.norm(hidden), self.head

    def logits(self, hidden: Tensor) -> Tensor:
        normed, head = self.before_head(hidden)
        out: Tensor = head(normed)
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def whole_module(self) -> nn.Module:
        return self


__all__ = ["KINDS", "Dropout", "OwnModel", "Rows", "balance_of"]
