"""Keys, values and their gradients of a model with windows, against one whose layers see all."""

from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness import report
from terapipe import GPTConfig, SliceCache, attend
from terapipe.planning import ShapeMemory, StageSpec

TOKENS, SLICES, LAYERS, HEADS, SIZE = 8192, 16, 12, 4, 256


def held_bytes(windows: tuple[int, ...], *, train: bool) -> int:
    """The most bytes of keys, values and their gradients of one microbatch, on fake tensors in bfloat16."""
    cache, edges = SliceCache(TOKENS), range(0, TOKENS + 1, TOKENS // SLICES)
    most, outs = 0, []
    with FakeTensorMode(), torch.set_grad_enabled(train):
        for start, end in pairwise(edges):
            cache.begin(start, end - start, forward_only=not train)
            x = torch.zeros(1, HEADS, end - start, SIZE, dtype=torch.bfloat16, requires_grad=train)
            outs.append([attend(x, x, x, cache, i, window=window or None) for i, window in enumerate(windows)])
            most = max(most, _bytes_of(cache))
        for (start, end), layers in reversed(list(zip(pairwise(edges), outs, strict=True))) if train else ():
            cache.begin(start, end - start)
            for out in reversed(layers):
                cache.backward(out, torch.zeros_like(out))
                most = max(most, _bytes_of(cache))
    return most


def _bytes_of(cache: SliceCache) -> int:
    stores = [x for store in cache._stores.values() for x in vars(store).values() if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in (*stores, *(x for free in cache.gradient_room._free.values() for x in free)))


def main() -> None:
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for name, windows in (("all see all", (0,) * LAYERS), ("5 of 6 see 512", (512, 512, 512, 512, 512, 0) * 2)):
        config = GPTConfig(LAYERS, HEADS * SIZE, HEADS, vocab=8, max_seq_len=1, windows=windows)
        memory, stage = ShapeMemory(config, 2), StageSpec(LAYERS)
        counted = float(memory.kv_cache(stage, 1, TOKENS) + memory.kv_gradients(stage, 1, TOKENS))
        training, evaluation = (held_bytes(windows, train=train) / 2**20 for train in (True, False))
        rows.append([name, training, counted / 2**20, evaluation])
        figures[name] = training
    report(__doc__ or "", ("layers", "training MiB", "counted MiB", "evaluation MiB"), rows, figures)


if __name__ == "__main__":
    main()
