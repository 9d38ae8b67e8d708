"""A DPO step and a distillation step in slices on one process, against plain unsliced PyTorch: time and memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Contender, arguments, best, pin, race, report
from terapipe import GPT, GPTConfig, Pipeline, Plan, losses, next_token_labels
from terapipe.runtime import MemoryCounter

SLICES, ROWS = 16, 2


def shape(tokens: int) -> GPTConfig:
    return GPTConfig(layers=2, hidden=128, heads=4, vocab=32_000, max_seq_len=tokens)


class LogitsCounter(MemoryCounter):
    """Also the most elements of a tensor as wide as the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__(torch.device("cpu"))
        self._vocab, self.largest = vocab, 0

    def _add(self, x: Tensor) -> None:
        super()._add(x)
        if x.ndim > 1 and x.shape[-1] == self._vocab:
            self.largest = max(self.largest, x.numel())


def plain(config: GPTConfig, loss_of: Callable[[Tensor], Tensor], ids: Tensor) -> Contender:
    model = GPT(config)

    def step() -> None:
        loss_of(model.logits(model(ids))).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return step


def sliced(config: GPTConfig, loss_fn: Any, ids: Tensor, targets: Any) -> Contender:
    plan = Plan.uniform(
        batch_size=ROWS, seq_len=ids.shape[1], num_slices=SLICES, microbatch_size=ROWS, boundaries=(0, config.layers)
    )
    pipe = Pipeline(GPT(config), plan, loss_fn=loss_fn)

    def step() -> None:
        pipe.step(ids, targets() if callable(targets) else targets)
        pipe.zero_grad()

    return step


def dpo(config: GPTConfig, ids: Tensor, labels: Tensor) -> dict[str, Contender]:
    reference = torch.tensor([-10.0, -12.0]) * ids.shape[1]

    def loss_of(logits: Tensor) -> Tensor:
        losses_of = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        ratios = -losses_of.sum(1) - reference
        return -F.logsigmoid(0.1 * (ratios[0] - ratios[1]))

    targets = {"labels": labels, "reference": reference}
    return {"plain": plain(config, loss_of, ids), "sliced": sliced(config, losses.dpo(), ids, targets)}


def distill(config: GPTConfig, ids: Tensor, labels: Tensor) -> dict[str, Contender]:
    whole = GPT(config, seed=1)

    def loss_of(logits: Tensor) -> Tensor:
        with torch.no_grad():
            taught = torch.log_softmax(whole.logits(whole(ids)), -1)
        return F.kl_div(torch.log_softmax(logits, -1), taught, log_target=True, reduction="sum") / labels.numel()

    plan = Plan.uniform(
        batch_size=ROWS, seq_len=ids.shape[1], num_slices=SLICES, microbatch_size=ROWS, boundaries=(0, config.layers)
    )
    teacher = Pipeline(GPT(config, seed=1), plan)

    def targets() -> dict[str, Any]:
        return {"labels": labels, "teacher_hidden": teacher.hidden_states(ids)}

    loss_fn = losses.distillation(head=teacher.logits)
    return {"plain": plain(config, loss_of, ids), "sliced": sliced(config, loss_fn, ids, targets)}


def peak(step: Contender, vocab: int) -> tuple[int, int]:
    """Bytes of tensors that the step makes, at most, and the elements of the largest logits."""
    counter = LogitsCounter(vocab)
    with counter:
        step()
    return counter.peak, counter.largest


def main() -> None:
    quick = arguments(__doc__ or "").quick
    tokens, rounds = (2048, 1) if quick else (8192, 2)
    pin(0)
    config = shape(tokens)
    ids = torch.randint(config.vocab, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(ids)
    rows, figures = [], dict[str, float]()
    for name, made in (("dpo", dpo), ("distill", distill)):
        contenders = made(config, ids, labels)
        times = best(race(contenders, rounds))
        peaks = {who: peak(step, config.vocab) for who, step in contenders.items()}
        figures[f"{name}_time"] = times["sliced"] / times["plain"]
        figures[f"{name}_memory"] = peaks["sliced"][0] / peaks["plain"][0]
        figures[f"{name}_slices_of_logits"] = peaks["sliced"][1] / (ROWS * tokens // SLICES * config.vocab)
        for who, seconds in times.items():
            rows.append([name, who, seconds, peaks[who][0] / 2**20, peaks[who][1] / (tokens * config.vocab)])
    header = ("objective", "step", "best s", "peak MiB", "largest logits, in sequences")
    report(__doc__ or "", header, rows, figures)
