"""Gradients in bfloat16 against float32, by number of slices; and loss curves, sliced and unsliced, in both."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.harness import arguments, pin, summary, table
from terapipe import GPT, GPTConfig, Pipeline, Plan, next_token_labels

CONFIG = GPTConfig(layers=4, hidden=256, heads=4, vocab=512, max_seq_len=1024)
SLICES = (1, 2, 4, 8, 16, 32, 64, 128)
SHORT = GPTConfig(layers=2, hidden=64, heads=2, vocab=64, max_seq_len=128)
STEPS = 1000


def made(config: GPTConfig, slices: int, dtype: torch.dtype) -> Pipeline:
    plan = Plan.uniform(
        batch_size=1, seq_len=config.max_seq_len, num_slices=slices, boundaries=(0, config.layers // 2, config.layers),
        chunks=2,
    )  # fmt: skip
    return Pipeline(GPT(config).to(dtype), plan)


def gradients(slices: int, dtype: torch.dtype, ids: Tensor) -> dict[str, Tensor]:
    """Of the same bfloat16 weights, computed in this dtype."""
    pipe = made(CONFIG, slices, torch.bfloat16)
    if dtype is not torch.bfloat16:
        rounded = {name: p.detach().to(dtype) for name, p in pipe.named_parameters()}
        pipe = made(CONFIG, slices, dtype)
        pipe.load_state_dict(rounded, strict=False)
    pipe.step(ids, next_token_labels(ids))
    return {name: p.grad.double() for name, p in pipe.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The norm of the difference, of all gradients together, relative to theirs."""
    differences = torch.stack([(found[name] - truth[name]).norm() for name in truth])
    return (differences.norm() / torch.stack([g.norm() for g in truth.values()]).norm()).item()


def curve(slices: int, dtype: torch.dtype, steps: int) -> list[float]:
    """Losses of a small model that learns a noisy cycle, with float32 optimizer state."""
    pipe = made(SHORT, slices, dtype)
    masters = [p.detach().float().requires_grad_() for p in pipe.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    losses = []
    for ids in batches(steps):
        losses.append(pipe.step(ids, next_token_labels(ids)).item())
        for master, p in zip(masters, pipe.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, pipe.parameters(), strict=True):
                p.copy_(master)
        pipe.zero_grad()
    return losses


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        cycle = (
            torch.arange(SHORT.max_seq_len) * 7 + torch.randint(SHORT.vocab, (1,), generator=generator)
        ) % SHORT.vocab
        noise = torch.rand(SHORT.max_seq_len, generator=generator) < 0.1
        drawn = torch.randint(SHORT.vocab, (SHORT.max_seq_len,), generator=generator)
        yield torch.where(noise, drawn, cycle)[None]


def main() -> None:
    quick = arguments(__doc__ or "").quick
    pin(0)
    ids = torch.randint(CONFIG.vocab, (1, CONFIG.max_seq_len), generator=torch.Generator().manual_seed(0))
    truth = gradients(1, torch.float32, ids)
    counts = SLICES[::3] if quick else SLICES
    errors = {n: error(gradients(n, torch.bfloat16, ids), truth) for n in counts}
    float32 = {n: error(gradients(n, torch.float32, ids), truth) for n in counts}
    rows = [[n, f"{100 * errors[n]:.2f} %", f"{float32[n]:.1e}"] for n in counts]
    table("Error of gradients against unsliced float32", ("slices", "bfloat16", "float32"), rows)
    steps = 50 if quick else STEPS
    names = {
        f"{str(d).removeprefix('torch.')}, {n} slices": (n, d) for d in (torch.float32, torch.bfloat16) for n in (1, 16)
    }
    curves = {name: curve(n, d, steps) for name, (n, d) in names.items()}
    at = sorted({0, steps // 10, steps // 4, steps // 2, steps - 1})
    table("Loss", ("step", *curves), [[i, *(mean(c, i) for c in curves.values())] for i in at])
    last = {name: mean(c, steps - 1) for name, c in curves.items()}
    summary({
        **{f"error_{n}": e for n, e in errors.items()},
        "growth": errors[counts[-1]] / errors[counts[0]],
        "loss_bf16_sliced_over_unsliced": last["bfloat16, 16 slices"] / last["bfloat16, 1 slices"],
        "loss_bf16_over_float32": last["bfloat16, 16 slices"] / last["float32, 1 slices"],
    })  # fmt: skip


def mean(losses: list[float], step: int, window: int = 20) -> float:
    """Of the last steps up to this one."""
    part = losses[max(0, step - window + 1) : step + 1]
    return sum(part) / len(part)
