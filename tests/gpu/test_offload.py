"""Offload on a GPU: memory that is really free, copies on streams of their own, and a host that never waits."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import terapipe
from terapipe import GPT, GPTConfig, Pipeline, Plan
from terapipe.api import predicted_peaks
from terapipe.modeling import offload
from terapipe.modeling.kernel_choice import kernel_for
from terapipe.modeling.kernels import KernelRequest
from terapipe.planning.recompute import MODES
from tests.pretend.waits import counting_waits

GPU = torch.device("cuda", 0)
TOKENS = 2048
CONFIG = GPTConfig(4, 128, 8, 2, 512, vocab=64, max_seq_len=TOKENS)  # few weights, so that activations show
# A step takes seconds here: the modes that keep most and least are for `make test-all`.
each_mode = pytest.mark.parametrize(
    "recompute",
    [pytest.param(mode, marks=[] if mode in ("light", "block") else [pytest.mark.exhaustive]) for mode in MODES],
)


def plan_of(recompute: str, offload: bool) -> Plan:
    return Plan((1,), ((TOKENS // 32,) * 32,), (0, 4), recompute=recompute, offload=offload)


def make_pipe(plan: Plan) -> Pipeline:
    return Pipeline(GPT(CONFIG, seed=3).to(torch.bfloat16), plan, device=GPU)


def step(pipe: Pipeline) -> None:
    ids = torch.arange(TOKENS, dtype=torch.int64).remainder(61)[None]
    pipe.step(ids, terapipe.next_token_labels(ids))


def peak_of_a_step(plan: Plan) -> int:
    gc.collect()
    before = torch.cuda.memory_allocated(GPU)
    pipe = make_pipe(plan)
    for _ in range(2):
        pipe.zero_grad()
        torch.cuda.reset_peak_memory_stats(GPU)
        step(pipe)
    return torch.cuda.max_memory_allocated(GPU) - before


@each_mode
def test_device_bytes_are_the_planners(recompute: str) -> None:
    peak_of_a_step(plan_of(recompute, False))  # makes cuBLAS's workspaces, if nobody has
    kernel = kernel_for(KernelRequest(GPU, torch.bfloat16, CONFIG.head_size)).name
    peaks = {}
    for moved in (False, True):
        (predicted,) = predicted_peaks(CONFIG, plan_of(recompute, moved), "bfloat16", kernel, 0)
        peaks[moved] = peak_of_a_step(plan_of(recompute, moved))
        assert peaks[moved] == pytest.approx(predicted, rel=0.05 if moved else 0.1)
    assert peaks[True] < peaks[False]


@each_mode
def test_the_host_never_waits_and_its_memory_is_made_once(recompute: str) -> None:
    pipe = make_pipe(plan_of(recompute, True))
    step(pipe)
    host = pipe._executors.copier.host
    made = host.nbytes
    assert made > 0
    with counting_waits() as waits:
        step(pipe)
    assert not waits
    assert host.nbytes == made
    assert all(piece.is_pinned() for pieces in host._free.values() for piece in pieces)


class LateCopier(offload.Copier):
    """Copies only when somebody waits for it, as a slow engine would."""

    queue: list[tuple[Tensor, Tensor]]

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.device == GPU:
            target.zero_()  # what is used before it arrives is wrong
        self.queue.append((target, source))

    def wait(self, mark: torch.cuda.Event | None) -> None:
        for target, source in self.queue:
            target.copy_(source)
        self.queue.clear()
        super().wait(mark)


def gradients_with(copier: Callable[[torch.device], offload.Copier], plan: Plan) -> dict[str, Tensor]:
    pipe = make_pipe(plan)
    mine = pipe._executors.copier
    mine.__class__, mine.__dict__["queue"] = copier, []  # type: ignore[assignment]
    step(pipe)
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


@each_mode
def test_every_use_waits_for_its_copy(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretend device copies at once, so a wait that is missing would not show."""
    plan = plan_of(recompute, True)
    wanted = gradients_with(offload.Copier, plan)
    found = gradients_with(LateCopier, plan)
    assert all(torch.equal(grad, wanted[name]) for name, grad in found.items())
    monkeypatch.setattr(LateCopier, "wait", lambda self, mark: None)
    broken = gradients_with(LateCopier, plan)
    assert not all(torch.equal(grad, wanted[name]) for name, grad in broken.items())
