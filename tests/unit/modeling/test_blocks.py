"""Attention that does not see all tokens before, or sees them otherwise; and states that are carried on."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terapipe import SliceCache, attend
from tests.support.plans import slicings


def plainly(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(-1, -2) * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1).to(scores)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights @ v.repeat_interleave(repeat, 1)


def documents(starts: tuple[tuple[int, ...], ...], tokens: int) -> Tensor:
    """What is seen where: (sequences, 1, tokens, tokens)."""
    places = torch.arange(tokens)
    rows = []
    for row in starts:
        number = torch.searchsorted(torch.tensor(row), places, right=True)
        rows.append((number[:, None] == number[None]) & (places[:, None] >= places[None]))
    return torch.stack(rows)[:, None]


def compare(
    tokens: int,
    lengths: tuple[int, ...],
    seen: Tensor,
    starts: tuple[tuple[int, ...], ...] = (),
    size: int = 8,
    value_size: int = 8,
    softcap: float | None = None,
    with_sinks: bool = False,
    window: int | None = None,
) -> float:
    """The largest difference of outputs and gradients."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, 4, tokens, size), (2, 2, tokens, size), (2, 2, tokens, value_size), (2, 4, tokens, value_size)]
    q, k, v, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    truth = [x.clone().requires_grad_() for x in (q, k, v, *([sinks] if sinks is not None else []))]
    wanted = plainly(truth[0], truth[1], truth[2], seen, softcap, truth[3] if with_sinks else None)
    wanted.backward(grad)
    mine = [x.clone().requires_grad_() for x in (q, k, v, *([sinks] if sinks is not None else []))]
    cache = SliceCache(tokens)
    if starts:
        cache.set_documents(starts)
    for _ in range(2):  # the second time over what the first left
        for x in mine:
            x.grad = None
        outs, edges = [], [0, *accumulate(lengths)]
        for start, length in zip(edges, lengths, strict=False):
            cache.begin(start, length)
            cut = slice(start, start + length)
            parts = (x[:, :, cut] for x in mine[:3])
            sink = mine[3] if with_sinks else None
            outs.append(attend(*parts, cache, 0, softcap=softcap, sinks=sink, window=window))
        for start, length, out in reversed(list(zip(edges, lengths, outs, strict=False))):
            cache.begin(start, length)
            cache.backward(out, grad[:, :, start : start + length])
    pairs = [(torch.cat(outs, 2), wanted), *((a.grad, b.grad) for a, b in zip(mine, truth, strict=True))]
    return max((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None)


@settings(max_examples=100)
@given(data=st.data(), tokens=st.integers(1, 24))
def test_documents_restart_attention(data: st.DataObject, tokens: int) -> None:
    lengths = data.draw(slicings(tokens, 6))
    cuts = [data.draw(slicings(tokens, 5)) for _ in range(2)]
    starts = tuple(tuple([0, *accumulate(row)][:-1]) for row in cuts)
    assert compare(tokens, lengths, documents(starts, tokens), starts) < 1e-12


@pytest.mark.parametrize("options", [
    {"softcap": 0.7}, {"with_sinks": True}, {"softcap": 2.0, "with_sinks": True}, {"value_size": 5}, {"value_size": 12},
    {"window": 5}, {"window": 5, "with_sinks": True}, {"window": 5, "softcap": 1.0},
])  # fmt: skip
def test_other_attentions(options: dict[str, object]) -> None:
    seen = torch.ones(19, 19, dtype=torch.bool).tril()[None, None]
    if "window" in options:
        seen = seen & torch.ones(19, 19, dtype=torch.bool).triu(-4)
    assert compare(19, (7, 1, 8, 3), seen, **options) < 1e-12  # type: ignore[arg-type]


def test_positions_restart_with_documents() -> None:
    cache = SliceCache(8)
    cache.begin(2, 4)
    assert cache.positions(torch.device("cpu")).tolist() == [[2, 3, 4, 5]]
    cache.set_documents(((0, 3), (0, 5)))
    assert cache.positions(torch.device("cpu")).tolist() == [[2, 0, 1, 2], [2, 3, 4, 0]]


def recurrence(x: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(x.shape[1]):
        state = x[:, t] if state is None else decay * state + x[:, t]
        outs.append(state)
    return torch.stack(outs, 1), outs[-1]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_carried_state_and_its_gradient_cross_slices(recompute: bool) -> None:
    lengths = (3, 1, 4, 2)
    x, grad = (torch.randn(2, 10, 3, dtype=torch.float64) for _ in range(2))
    decay = torch.rand(3, dtype=torch.float64)
    a, d = x.clone().requires_grad_(), decay.clone().requires_grad_()
    recurrence(a, d, None)[0].backward(grad)
    b, e = x.clone().requires_grad_(), decay.clone().requires_grad_()
    cache = SliceCache(10)

    def forward(start: int, length: int) -> Tensor:
        cache.begin(start, length)
        out, state = recurrence(b[:, start : start + length], e, cache.get_state("state"))
        cache.set_state("state", state)
        return out

    edges = [0, *accumulate(lengths)]
    with torch.set_grad_enabled(not recompute):
        outs = [forward(start, length) for start, length in zip(edges, lengths, strict=False)]
    for i in reversed(range(4)):
        out = forward(edges[i], lengths[i]) if recompute else outs[i]
        cache.begin(edges[i], lengths[i])
        cache.backward(out, grad[:, edges[i] : edges[i + 1]])
    assert torch.allclose(b.grad, a.grad, rtol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(e.grad, d.grad, rtol=1e-12)  # type: ignore[arg-type]
    cache.clear()
    cache.begin(0, 3)
    assert cache.get_state("state") is None
