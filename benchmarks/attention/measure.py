"""What slicing costs: causal attention over 2048 tokens, forward and backward, whole against in slices."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Contender, arguments, best, pin, race, report
from terapipe import SliceCache, attend

TOKENS, HEADS, SIZE = 2048, 8, 64


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


def main() -> None:
    rounds = 15 if arguments(__doc__ or "").quick else 60
    pin(0)
    tensors = [torch.randn(1, HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    contenders = {"whole": whole(*tensors)} | {f"{n} slices": sliced(n, *tensors) for n in (1, 4, 8, 16, 32)}
    times = best(race(contenders, rounds, warmup=2))
    figures = {f"ratio_{n}": times[f"{n} slices"] / times["whole"] for n in (8, 16)}
    rows = [[name, t * 1e3, t / times["whole"]] for name, t in times.items()]
    report(__doc__ or "", ("attention", "best ms", "over whole"), rows, figures)
