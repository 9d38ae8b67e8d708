"""A decoder of one's own, pipelined inside the sequence: attention, and a gated linear recurrence that carries a state.

    torchrun --nproc-per-node 2 examples/own_model.py

Three things make a model fit: attention calls ``attend``, a layer with any other state asks the cache for the one that
the slice before left and leaves one to the slice after, and ``stage`` gives some of the layers.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe import Pipeline, Plan, SliceCache, attend, next_token_labels

LAYERS, HIDDEN, HEADS, VOCAB = 4, 64, 4, 257  # bytes, and one for the end of a document


class Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # tells this layer from others in the cache
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(attend(q, k, v, cache, self.number).transpose(1, 2).flatten(2))


class Recurrence(nn.Module):
    """h[t] = a[t] * h[t - 1] + (1 - a[t]) * u[t], with gates a[t] that depend on the token."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.gate, self.inner, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        gates, inner = torch.sigmoid(self.gate(x)), self.inner(x)
        state = cache.get_state(self.number)  # what the slice before left; None at the beginning of a sequence
        states = []
        for t in range(x.shape[1]):
            new = (1 - gates[:, t]) * inner[:, t]
            state = new if state is None else gates[:, t] * state + new
            states.append(state)
        cache.set_state(self.number, states[-1])
        return self.out(torch.stack(states, 1))


class Decoder(nn.Module):
    """A whole model, and with some of its layers left out a stage of it."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        self.num_layers, self.tied = LAYERS, ()
        torch.manual_seed(0)  # so that every rank draws the same model
        kinds = (Attention, Recurrence)
        layers = {str(i): kinds[i % 2](i) for i in range(LAYERS)}
        embedding, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if first <= int(name) < last})
        self.embedding = embedding if first == 0 else None
        self.head = head if last == LAYERS else None

    def stage(self, first: int, last: int, device: torch.device) -> "Decoder":
        return Decoder(first, last).to(device=device, dtype=next(self.parameters()).dtype)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = x + layer(F.rms_norm(x, (HIDDEN,)), cache)
        return x

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(F.rms_norm(hidden, (HIDDEN,)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def make_cache(self, size: int, tokens: int) -> SliceCache:
        return SliceCache(tokens)

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        return (size, length, HIDDEN)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers.values())


def main() -> None:
    plan = Plan((1,), ((100, 60, 56, 40),), (0, 2, 4), "terapipe")
    pipe = Pipeline(Decoder(), plan)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(20):
        input_ids = text[step * 64 : step * 64 + 256].unsqueeze(0)
        loss = pipe.step(input_ids, next_token_labels(input_ids))
        optimizer.step()
        optimizer.zero_grad()
        if pipe.is_first and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
