"""Measurements on a GPU: by its own clock, with its own memory."""

import gc
import json

import pytest
import torch

import terapipe
from terapipe import GPT, GPTConfig, Pipeline, Plan
from terapipe.api import predicted_peaks
from terapipe.cli import main
from terapipe.doctor.examination import CUDA_LENGTHS
from terapipe.modeling.compiling import compile_layers
from terapipe.modeling.kernel_choice import kernel_for
from terapipe.modeling.kernels import KernelRequest
from terapipe.modeling.key_values import KeyValueStore
from terapipe.planning.cost import StageSpec
from terapipe.planning.device import usable_of_measured
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.profile import KINDS, FittedCost
from terapipe.runtime.profiler import Profiler
from terapipe.runtime.stopwatch import Stopwatch
from tests.pretend.waits import counting_waits

GPU = torch.device("cuda", 0)
CONFIG = GPTConfig(layers=2, hidden=32, heads=2, vocab=61, max_seq_len=256)


@pytest.fixture(scope="module")
def profile() -> terapipe.Profile:
    return Profiler(GPT(CONFIG), layers=2, seq_len=256, sizes=(1,)).run(0.5)


def test_plans_have_the_memory_of_the_gpu(profile: terapipe.Profile) -> None:
    """Not that of the host, shared by its ranks; and less what context and NCCL were measured to take, not a guess."""
    assert profile.machine["device"] == "Pretend GPU"
    assert profile.machine["device_memory"] == 80 << 30
    assert profile.machine["reserved"] == 512 << 20, "of the context"
    result = terapipe.plan(None, profile, batch_size=1, seq_len=256)
    assert result.source is not None
    assert result.source.budget == usable_of_measured((80 << 30) - (512 << 20))
    assert result.source.tile == 128, "of the device's kernels"


def test_a_profile_knows_its_kernel_and_its_host(profile: terapipe.Profile) -> None:
    """What the host takes to issue a computation was known, and thrown away."""
    assert profile.attention == "memory-efficient"
    assert profile.machine["blas"] == 96 << 20
    timed = [sample for sample in profile.samples if sample.host]
    assert {sample.kind for sample in timed} == set(KINDS)
    assert {sample.length for sample in timed} <= {32, 64}, "short ones"
    host = FittedCost(profile).by_side()[1]
    assert host.forward > 0
    assert host.backward > 0
    assert FittedCost(profile).forward(StageSpec(2), 1, 1, 0) >= host.of_forward(StageSpec(2))


def test_a_profile_under_autocast() -> None:
    """It is of bfloat16 products with float32 weights, of which the plan's memory has copies."""
    with torch.autocast("cuda", torch.bfloat16):
        made = Profiler(GPT(CONFIG), layers=2, seq_len=256)
    made.round(made.points[:1])
    assert all(store.read(slice(None), slice(0, 1))[0].dtype == torch.bfloat16 for store in stores(made))
    for _ in range(2):
        made.round()
    profile = made.profile()
    assert (profile.dtype, profile.autocast) == ("float32", "bfloat16")
    assert profile.attention in ("flash", "cudnn"), "which float32 does not have"
    memory = terapipe.plan(None, profile, batch_size=1, seq_len=256, autocast=True).memory
    assert isinstance(memory, ShapeMemory)
    assert (memory.element, memory.state, memory.autocast) == (2, 8, True)


def stores(made: Profiler) -> list[KeyValueStore]:
    return [store for cache in made._caches.values() for store in cache._stores.values()]


def peak_of_a_step(config: GPTConfig, plan: Plan) -> int:
    """Bytes that a pipeline and its second step add to what was there before."""
    gc.collect()
    before = torch.cuda.memory_allocated(GPU)
    pipe, ids = Pipeline(GPT(config).to(torch.bfloat16), plan, device=GPU), torch.zeros(1, 1024, dtype=torch.int64)
    for _ in range(2):
        pipe.zero_grad()
        torch.cuda.reset_peak_memory_stats(GPU)
        pipe.step(ids, terapipe.next_token_labels(ids))
    return torch.cuda.max_memory_allocated(GPU) - before


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_peaks_of_a_step_are_the_planners(kv_heads: int | None) -> None:
    """FlashAttention writes dK and dV for every query head of the whole context, which nobody counted."""
    config = GPTConfig(1, 256, 16, kv_heads, 64, vocab=64, max_seq_len=1024)
    plan = Plan((1,), ((64,) * 16,), (0, 1), recompute="full")
    peak_of_a_step(config, plan)  # makes cuBLAS's workspaces, if nobody has
    kernel = kernel_for(KernelRequest(GPU, torch.bfloat16, config.head_size)).name
    (predicted,) = predicted_peaks(config, plan, "bfloat16", kernel, 0)
    assert peak_of_a_step(config, plan) == pytest.approx(predicted, rel=0.1)


def test_a_dry_run_counts_what_kernels_need_inside() -> None:
    """Its tensors are fake: kernels allocate nothing."""
    config = GPTConfig(4, 1024, 16, 1, vocab=64, max_seq_len=32768)
    result = terapipe.plan(config, "dgx-h100:1", batch_size=1, seq_len=32768, pp=1, dp=1, tp=1, num_slices=6)
    found = terapipe.dry_run(config, result)
    assert found.device == "cuda"
    assert found.peak == pytest.approx(result.peak_bytes, rel=0.08)


def test_computations_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two waits of the host, a short slice seemed to take as long as it takes to queue it."""
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    watch, x = Stopwatch(GPU), torch.ones(64, 64, device=GPU)
    watch(lambda: x @ x)
    with counting_waits() as waits:
        seconds = watch(*[lambda: x @ x] * 5)
    assert len(seconds) == 5
    assert all(s >= 0 for s in seconds)
    assert [wait.kind for wait in waits] == ["torch.cuda.synchronize"] * 2, "before and after, not around each"
    assert held[0] == 0
    assert held[1] > 0, "the device is held back while the host queues"


def test_links_are_measured_with_large_messages() -> None:
    """4 MiB show the latency of a fast link, not its rate."""
    assert 8 * max(CUDA_LENGTHS) == 256 << 20


def test_compiling_without_triton_is_refused_at_once() -> None:
    """It was found out in the first step, on one rank after the other."""
    with pytest.raises(ValueError, match="compiling for a GPU needs triton, and none was found"):
        compile_layers(GPT(CONFIG).stage(0, 2, GPU))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_exactness_is_checked_on_the_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There transformers takes other code than on the CPU."""
    assert main(["verify", name, "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"]
    assert found["dtype"] == "float32"
    assert found["worst"] < 1e-5


@pytest.mark.gpu_seldom
def test_the_doctor_tries_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    """Objects go by gloo, tensors by NCCL: where one of them fails, so does a run, sooner or later."""
    assert main(["doctor", "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "gloo and NCCL; " in said
    assert "GPUs for 2 ranks" in said
