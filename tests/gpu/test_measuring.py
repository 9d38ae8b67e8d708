"""Measurements on a GPU: by its own clock, with its own memory."""

import json

import pytest
import torch

import terapipe
from terapipe import GPT, GPTConfig
from terapipe.cli import main
from terapipe.doctor import examine
from terapipe.modeling.compiling import compile_layers
from terapipe.runtime.profiler import RESERVED, Profiler
from terapipe.runtime.stopwatch import Stopwatch
from tests.pretend.waits import counting_waits

GPU = torch.device("cuda", 0)
CONFIG = GPTConfig(layers=2, hidden=32, heads=2, vocab=61, max_seq_len=256)


@pytest.fixture(scope="module")
def profile() -> terapipe.Profile:
    return Profiler(GPT(CONFIG), layers=2, seq_len=256, sizes=(1,)).run(0.5)


def test_plans_have_the_memory_of_the_gpu(profile: terapipe.Profile) -> None:
    """Not that of the host, shared by its ranks; and less what the context and NCCL need."""
    assert profile.machine["device"] == "Pretend GPU"
    assert profile.machine["device_memory"] == (80 << 30) - RESERVED
    result = terapipe.plan(None, profile, batch_size=1, seq_len=256)
    assert result.source is not None
    assert result.source.budget == (80 << 30) - RESERVED
    assert result.source.tile == 128, "of the device's kernels"


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
    assert 8 * max(examine.CUDA_LENGTHS) == 256 << 20


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


def test_the_doctor_tries_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    """Objects go by gloo, tensors by NCCL: where one of them fails, so does a run, sooner or later."""
    assert main(["doctor", "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "gloo and NCCL; " in said
    assert "GPUs for 2 ranks" in said
