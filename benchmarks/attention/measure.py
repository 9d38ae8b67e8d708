"""What slicing costs: causal attention over 2048 tokens, forward and backward, whole against in slices; and windows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Contender, arguments, best, pin, race, summary, table
from terapipe import SliceCache, attend

TOKENS, HEADS, SIZE = 2048, 8, 64
SLICE = 1024
WINDOWS = {"causal": None, "window 512": 512, "window 4096": 4096}


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Contender:
    def run() -> None:
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        F.scaled_dot_product_attention(*parts, is_causal=True).backward(grad)

    return run


def sliced(slices: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Contender:
    cache = SliceCache(TOKENS)
    length = TOKENS // slices

    def run() -> None:
        outputs = []
        for start in range(0, TOKENS, length):
            cache.begin(start, length)
            parts = [x[:, :, start : start + length].detach().requires_grad_() for x in (q, k, v)]
            outputs.append(attend(*parts, cache, 0))
        for start in reversed(range(0, TOKENS, length)):
            cache.begin(start, length)
            outputs.pop().backward(grad[:, :, start : start + length])

    return run


def one_slice(context: int, window: int | None) -> Contender:
    """Of 1024 tokens behind this context; keys and values of the context are there."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, HEADS, context + SLICE, SIZE, generator=generator) for _ in range(4))
    cache = SliceCache(context + SLICE)
    if context:
        cache.begin(0, context)
        attend(*(x[:, :, :context] for x in (q, k, v)), cache, 0, window=1)
    last = [x[:, :, context:] for x in (q, k, v)]

    def run() -> None:
        cache.begin(context, SLICE)
        attend(*(x.detach().requires_grad_() for x in last), cache, 0, window=window).backward(grad[:, :, context:])

    return run


def windows(rounds: int) -> dict[str, float]:
    cases = {"first": 0, "behind 8192": 8192}
    names = {f"{place}, {name}": (context, w) for place, context in cases.items() for name, w in WINDOWS.items()}
    times = best(race({name: one_slice(*case) for name, case in names.items()}, rounds, warmup=2))
    rows = [[name, t * 1e3, t / times[f"{name.partition(',')[0]}, causal"]] for name, t in times.items()]
    table("A slice of 1024 tokens with a window", ("slice", "best ms", "over causal"), rows)
    return {f"window_{place.split()[0]}": times[f"{place}, window 512"] / times[f"{place}, causal"] for place in cases}


def main() -> None:
    rounds = 15 if arguments(__doc__ or "").quick else 60
    pin(0)
    tensors = [torch.randn(1, HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    contenders = {"whole": whole(*tensors)} | {f"{n} slices": sliced(n, *tensors) for n in (1, 4, 8, 16, 32)}
    times = best(race(contenders, rounds, warmup=2))
    figures = {f"ratio_{n}": times[f"{n} slices"] / times["whole"] for n in (8, 16)}
    rows = [[name, t * 1e3, t / times["whole"]] for name, t in times.items()]
    table(__doc__ or "", ("attention", "best ms", "over whole"), rows)
    summary(figures | windows(rounds))
