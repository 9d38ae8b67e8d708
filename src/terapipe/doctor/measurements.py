"""Proofs of what is measured on this hardware: waits, bytes, seconds, links."""

import warnings
from typing import Any

import torch

from terapipe import api
from terapipe.doctor.examine import links, share_cores
from terapipe.doctor.proof import Proof, Size, meet
from terapipe.launch.processes import launch
from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernels import Need, kernel_for
from terapipe.modeling.stage import next_token_labels
from terapipe.planning.hardware import blas_workspaces
from terapipe.planning.layout import split_layers
from terapipe.planning.slices import Plan
from terapipe.runtime.environment import ensure_process_group, local_device, rank_and_size
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline

CLOSE = 0.1  # of the predicted bytes, how far off the measured ones may be

# Against the planner


def memory(ranks: int, size: Size) -> Proof:
    """The peak of a step against what the planner counts."""
    found: list[tuple[int, int]] = launch(_memory, ranks, size)
    ratios = [measured / predicted for measured, predicted in found]
    says = f"measured over predicted peaks: {', '.join(f'{r:.2f}' for r in ratios)}"
    return Proof("memory", all(abs(r - 1) <= CLOSE for r in ratios), says, {"bytes": found})


def _memory(size: Size) -> list[tuple[int, int]]:
    share_cores()
    ranks, device = rank_and_size()[1], local_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ensure_process_group(device)
    plan = _plan(size, ranks)
    with torch.device("meta"):
        model = GPT(size.model).to(dtype)
    pipe = Pipeline(model, plan)
    ids = torch.arange(size.seq_len)[None] % size.model.vocab
    labels = next_token_labels(ids)
    pipe.step(ids, labels).item()  # buffers that the first step makes stay
    pipe.zero_grad()
    counter = MemoryCounter(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        pipe.step(ids, labels).item()
        measured = torch.cuda.max_memory_allocated(device)
    else:
        with counter:
            counter.count(pipe)
            pipe.step(ids, labels)
        measured = counter.peak
    kernel = kernel_for(Need(device, dtype, size.model.head_size)).name
    blas = blas_workspaces(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 0
    predicted = api.predicted_peaks(size.model, plan, str(dtype).removeprefix("torch."), kernel, blas)[pipe.rank]
    found = pipe.gather((measured, predicted))
    meet()
    return found


def _plan(size: Size, ranks: int) -> Plan:
    lengths = (size.seq_len // 8,) * 8
    return Plan((1,), (lengths,), split_layers(size.model, ranks, size.seq_len))


def prediction(ranks: int, size: Size) -> Proof:
    """A profile, a plan made from it, and the plan's real step."""
    found: dict[str, float] = launch(_prediction, ranks, size)
    ratio = found["measured"] / found["predicted"]
    says = f"a step took {found['measured']:.3f} s, {ratio:.2f} of the prediction"
    return Proof("prediction", None, says, found)


def _prediction(size: Size) -> dict[str, float]:
    share_cores()
    ranks, device = rank_and_size()[1], local_device()
    ensure_process_group(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = GPT(size.model).to(dtype)
    profile = api.profile(model, seq_len=size.seq_len, seconds=size.profile_seconds)
    result = api.plan(model, profile, batch_size=1, seq_len=size.seq_len, pp=ranks, dp=1, tp=1)
    pipe = Pipeline(model, result.plan)
    ids = torch.arange(size.seq_len)[None] % size.model.vocab
    times = []
    for _ in range(size.steps + 1):
        pipe.step(ids, next_token_labels(ids)).item()
        times.append(pipe.timeline().makespan)
        pipe.zero_grad()
    meet()
    return {"measured": min(times[1:]), "predicted": result.simulate().makespan}


# The device


def waits(ranks: int, size: Size) -> Proof:
    """Operations that make the host wait for the device in a step, by torch's own count."""
    if not torch.cuda.is_available():
        return Proof("host waits", None, "no GPU: nothing to wait for", {})
    found: dict[str, Any] = launch(_waits, ranks, size)
    says = f"{found['count']} in a step of {found['slices']} slices"
    return Proof("host waits", found["count"] <= ALLOWED_WAITS, says, found)


ALLOWED_WAITS = 3  # of a whole step: see docs/gpu.md


def _waits(size: Size) -> dict[str, Any]:
    share_cores()
    device = local_device()
    ensure_process_group(device)
    plan = _plan(size, rank_and_size()[1])
    with torch.device("meta"):
        model = GPT(size.model).to(torch.bfloat16)
    pipe = Pipeline(model, plan)
    ids = torch.arange(size.seq_len)[None] % size.model.vocab
    pipe.step(ids, next_token_labels(ids)).item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        pipe.step(ids, next_token_labels(ids))
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    meet()
    return {"count": len(lines), "slices": sum(map(len, plan.lengths)), "lines": sorted(set(lines))}


def links_between(ranks: int, size: Size) -> Proof:
    if ranks == 1:
        return Proof("links", None, "one rank: no links", {})
    found: list[dict[str, Any]] = launch(_links, ranks)
    rates = ", ".join(f"{row['rate'] / 1e9:.2f} GB/s after {1e6 * row['latency']:.0f} us" for row in found)
    return Proof("links", None, f"from rank 0: {rates}", {"links": found})


def _links() -> list[dict[str, Any]]:
    share_cores()
    rank, size = rank_and_size()
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ensure_process_group(device)
    found = links(rank, size, device, 20.0)
    meet()
    return found
