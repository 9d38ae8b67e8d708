"""A decoder of one's own, pipelined inside the sequence: attention, and a gated linear recurrence that carries a state.

    torchrun --nproc-per-node 2 examples/own_model.py

Three things make a model fit: attention calls ``attend``, a layer with any other state asks the cache for the one that
the slice before left and leaves one to the slice after, and ``stage`` gives some of the layers. With ``tp`` they are
split over devices by torch's own ``parallelize_module``: attention by its heads, the recurrence by its width.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from terapipe import Pipeline, PipelineModel, Plan, SliceCache, Stage, attend, next_token_labels
from terapipe.modeling import TensorParallel

LAYERS, HIDDEN, HEADS, VOCAB = 4, 64, 4, 257  # bytes, and one for the end of a document


class Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # tells this layer from others in the cache
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, HIDDEN // HEADS))  # all of them, or those of this device
        q, k, v = heads.permute(3, 0, 2, 1, 4)
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


class Decoder(Stage, PipelineModel):
    """A whole model, and with some of its layers left out a stage of it."""

    num_layers, hidden_size, vocabulary = LAYERS, HIDDEN, (VOCAB, VOCAB)

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)  # so that every rank draws the same model
        kinds = (Attention, Recurrence)
        layers = {str(i): kinds[i % 2](i) for i in range(LAYERS)}
        embedding, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if first <= int(name) < last})
        self.embedding = embedding if first == 0 else None
        self.head = head if last == LAYERS else None

    def stage(self, first: int, last: int, device: torch.device, tp: TensorParallel | None = None) -> "Decoder":
        part = Decoder(first, last).to(device=device, dtype=next(self.parameters()).dtype)
        if tp is not None:
            wide, narrow = ColwiseParallel(), RowwiseParallel()
            styles = {f"layers.*.{name}": wide for name in ("qkv", "gate", "inner")} | {"layers.*.out": narrow}
            styles["embedding"] = RowwiseParallel(input_layouts=Replicate())
            styles["head"] = ColwiseParallel(use_local_output=False)
            parallelize_module(part, tp.mesh, styles, src_data_rank=None)
        return part

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = x + layer(F.rms_norm(x, (HIDDEN,)), cache)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(F.rms_norm(hidden, (HIDDEN,)))


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
