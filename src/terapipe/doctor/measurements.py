"""Checks that measure this hardware: kernels that are chosen, waits, bytes, seconds, links.

Every public function but ``gpus_of_processes`` is a ``Check`` of ``proof``. Most only report a figure (``holds`` is
None); three claim something and can fail:

    reserve      no process has memory on a GPU that is not its own
    host waits   a step makes the host wait for the device at most ALLOWED_WAITS times
    memory       the peak of a step is within CLOSE of what the planner counts

These three are what a plan for a GPU rests on: the planner fills the memory that it thinks is there, and a host that
waits cannot launch the next slice's kernels in time. The figures are for whoever reads the file: they show on one
machine what the planner assumes on all.
"""

import shutil
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from terapipe import api
from terapipe.doctor.exactness import small_llama
from terapipe.doctor.examination import Link, links
from terapipe.doctor.proof import Check, Proof, Size, dtype_on, meet, run_ranks
from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernel_choice import kernel_for, kernel_report
from terapipe.modeling.kernels import KernelRequest
from terapipe.modeling.stage import PipelineModel, next_token_labels
from terapipe.planning.cost import StageSpec
from terapipe.planning.device import blas_workspace, blas_workspaces
from terapipe.planning.layout import split_layers
from terapipe.planning.presets import GPTConfig
from terapipe.planning.profile import FittedCost
from terapipe.planning.slices import Plan
from terapipe.runtime.comm import groups
from terapipe.runtime.comm.environment import local_device, rank_and_size
from terapipe.runtime.comm.groups import GROUPS
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.profiler import Profiler, reserved_memory

CLOSE = 0.1  # of the predicted bytes, how far off the measured ones may be
GIB = 1 << 30


def _model(size: Size, dtype: torch.dtype) -> GPT:
    """Builds the model without memory. ``Pipeline`` gives each rank the weights of its own stages only."""
    with torch.device("meta"):
        return GPT(size.model).to(dtype)


def _plan(size: Size, ranks: int) -> Plan:
    """Cuts one sequence into 8 equal slices, and the layers into a stage for each rank."""
    lengths = (size.seq_len // 8,) * 8
    return Plan((1,), (lengths,), split_layers(size.model, ranks, size.seq_len))


def _ids(size: Size) -> torch.Tensor:
    return torch.arange(size.seq_len)[None] % size.model.vocab


def _step_times(pipe: Pipeline, size: Size) -> list[float]:
    """Runs some steps and returns the seconds of each, without the first, which makes buffers and connections."""
    ids, times = _ids(size), []
    for _ in range(size.steps + 1):
        pipe.step(ids, next_token_labels(ids)).item()
        times.append(pipe.timeline().makespan)
        pipe.zero_grad()
    return times[1:]


# Attention


def attention(ranks: int, size: Size) -> Proof:
    """Reports which kernel attention uses in each dtype, and why not a better one.

    Args:
        ranks: Not used: one process.
        size: Has the model whose heads are looked at.
    """
    kernels: dict[str, str] = run_ranks(_attention, 1, size)
    return Proof(None, "; ".join(f"{dtype}: {why}" for dtype, why in kernels.items()), dict(kernels))


def _attention(size: Size) -> dict[str, str]:
    """Returns by dtype which kernel is used, and why the faster ones are not, as ``kernel_report`` puts it."""
    device = local_device()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is in the report
        return {
            str(dtype).removeprefix("torch."): str(kernel_report(device, dtype, size.model.head_size))
            for dtype in (torch.bfloat16, torch.float32)
        }


# Memory


def reserve(ranks: int, size: Size) -> Proof:
    """Measures what tensors cannot have of each GPU when all connections are there, and looks who else is on it. A
    process on several GPUs has a context on each, which takes memory for nothing.

    Args:
        ranks: How many processes to start.
        size: Of the model that runs a step.
    """
    if not torch.cuda.is_available():
        return Proof(None, "no GPU: nothing is reserved")
    result: dict[str, Any] = run_ranks(_reserve, ranks, size)
    after = [row["after a step"] for row in result["ranks"]]
    says = f"context, NCCL and other processes take {min(after) / GIB:.2f} to {max(after) / GIB:.2f} GiB of each GPU"
    processes = result["processes"]
    if processes is None:
        return Proof(None, f"{says}; nvidia-smi, which lists processes, is not here", result)
    shared = {pid: count for pid, count in processes.items() if count > 1}
    says += f"; {len(shared)} of {len(processes)} processes are on several GPUs"
    return Proof(not shared, says, result)


def _reserve(size: Size) -> dict[str, Any]:
    """Returns the bytes that tensors cannot have on each rank's GPU at three moments, and the GPUs of each process.

    context        after the first tensor: the CUDA context and whatever others have there
    connected      after Pipeline has made its NCCL communicators
    after a step   also their buffers, and code of kernels that were loaded on first use
    """
    device = local_device()
    torch.zeros(1, device=device)
    bytes_taken = {"context": reserved_memory(device)}
    pipe = Pipeline(_model(size, torch.bfloat16), _plan(size, rank_and_size()[1]))
    bytes_taken["connected"] = reserved_memory(device)
    pipe.step(_ids(size), next_token_labels(_ids(size))).item()
    bytes_taken["after a step"] = reserved_memory(device)
    rows = pipe.gather(bytes_taken)
    processes = _processes() if pipe.rank == 0 else None
    return {"ranks": rows, "processes": processes}


def _processes() -> dict[str, int] | None:
    """Returns on how many GPUs each process is, by process number; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    return gpus_of_processes(subprocess.run(command, capture_output=True, text=True).stdout)


def gpus_of_processes(listing: str) -> dict[str, int]:
    """Counts the GPUs of each process.

    Args:
        listing: what nvidia-smi prints: a line with GPU and process for each process on each GPU.
    """
    on: dict[str, set[str]] = {}
    for line in listing.splitlines():
        gpu, _, pid = (word.strip() for word in line.partition(","))
        if pid.isdecimal():
            on.setdefault(pid, set()).add(gpu)
    return {pid: len(gpus) for pid, gpus in on.items()}


def memory(ranks: int, size: Size) -> Proof:
    """Compares the peak of a step with what the planner counts. One of cuBLAS's workspaces may be missing: whether
    self-tests of kernels multiply anything depends on the kernels.

    Args:
        ranks: How many processes to start.
        size: Of the model that runs a step.
    """
    peaks: list[tuple[int, int]] = run_ranks(_memory, ranks, size)
    says = f"measured over predicted peaks: {', '.join(f'{a / b:.2f}' for a, b in peaks)}"
    spare = blas_workspace(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else 0
    holds = all(b - spare - CLOSE * b <= a <= b + CLOSE * b for a, b in peaks)
    return Proof(holds, says, {"bytes": peaks})


def _memory(size: Size) -> list[tuple[int, int]]:
    """Returns (measured, predicted) peak bytes of every rank, for a step after the first.

    On a GPU the allocator counts. On a CPU, where none does, ``MemoryCounter`` follows every tensor of the step. Both
    count weights, gradients and activations, so the prediction is without optimizer state.
    """
    device = local_device()
    ranks, dtype = rank_and_size()[1], dtype_on(device)
    plan, ids = _plan(size, ranks), _ids(size)
    pipe, labels = Pipeline(_model(size, dtype), plan), next_token_labels(ids)
    pipe.step(ids, labels).item()  # buffers that the first step makes stay
    pipe.zero_grad()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        pipe.step(ids, labels).item()
        measured = torch.cuda.max_memory_allocated(device)
    else:
        with MemoryCounter(device) as counter:
            counter.count(pipe)
            pipe.step(ids, labels)
        measured = counter.peak
    kernel = kernel_for(KernelRequest(device, dtype, size.model.head_size)).name
    blas = blas_workspaces(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 0
    name = str(dtype).removeprefix("torch.")
    predicted = api.predicted_peaks(size.model, plan, name, kernel, blas)[pipe.rank]
    return pipe.gather((measured, predicted))


# Seconds


def host_time(ranks: int, size: Size) -> Proof:
    """Measures what a layer takes of the host and of the device, and the shortest slice that keeps the device busy.

    Args:
        ranks: Not used: one process has the host to itself.
        size: Of the model, of which up to five layers are built.
    """
    if not torch.cuda.is_available():
        return Proof(None, "no GPU: the host computes")
    rows: dict[str, Any] = run_ranks(_host_time, 1, size)
    parts = [
        f"{name}: {1e3 * row['host']:.2f} ms for a layer's forward and backward, the device's time from "
        f"{row['busy from'] or f'over {size.seq_len}'} tokens on"
        for name, row in rows.items()
    ]
    return Proof(None, "; ".join(parts), rows)


def _host_time(size: Size) -> dict[str, Any]:
    """Returns the result of ``_sides`` for a GPT and, where transformers is installed, for a Llama of the same size.
    Its layers launch more kernels of their own, so they keep the host busy for longer."""
    layers, config = min(4, size.model.layers), size.model
    shape = GPTConfig(layers + 1, config.hidden, config.heads, vocab=config.vocab, max_seq_len=size.seq_len)
    models: dict[str, PipelineModel] = {"GPT": GPT(shape).to(torch.bfloat16)}
    with suppress(ImportError):
        models["Llama of transformers"] = _llama(shape, size.seq_len)
    return {name: _sides(model, shape, layers, size) for name, model in models.items()}


def _llama(shape: GPTConfig, seq_len: int) -> PipelineModel:
    """Builds a Llama with as many parameters in a layer as the GPT: three products of 2/3 the width for its two."""
    from terapipe.hf.decoder import Decoder

    model = small_llama(
        hidden_size=shape.hidden, intermediate_size=shape.ffn_hidden * 2 // 3, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, vocab_size=shape.vocab,
        max_position_embeddings=seq_len,
    )  # fmt: skip
    return Decoder(model.to(torch.bfloat16))


def _sides(model: PipelineModel, shape: GPTConfig, layers: int, size: Size) -> dict[str, Any]:
    """Returns the seconds of forward and backward of one layer: of the host, which launches kernels and needs as long
    for a short slice as for a long one, and of the device by slice length. "busy from" is the shortest slice for which
    the device takes longer; shorter ones leave it idle, and a planner that did not know would choose them.

        seconds
           |              device /
        host |---------------- x ------   host
           |              /    |
           +-------------------+------- tokens of a slice
                           busy from
    """
    profile = Profiler(model, layers=layers, seq_len=size.seq_len, shape=shape).run(size.profile_seconds / 2)
    device, host = FittedCost(profile).by_side()
    one = StageSpec(1)
    lengths = sorted({s.length for s in profile.samples if s.kind == "backward" and not s.context and not s.held_out})
    seconds = {n: float(device.forward(one, 1, n, 0) + device.backward(one, 1, n, 0)) for n in lengths}
    taken = host.of_forward(one) + host.of_backward(one)
    busy = [n for n in lengths if seconds[n] >= taken]
    return {"host": taken, "device": seconds, "busy from": busy[0] if busy else None}


def prediction(ranks: int, size: Size) -> Proof:
    """Profiles a model, plans with the profile, and compares the plan's real step with its prediction.

    Args:
        ranks: How many processes to start. The plan uses them all as pipeline ranks.
        size: Of the model, and how long to profile.
    """
    times: dict[str, float] = run_ranks(_prediction, ranks, size)
    ratio = times["measured"] / times["predicted"]
    says = f"a step took {times['measured']:.3f} s, {ratio:.2f} of the prediction"
    return Proof(None, says, times)


def _prediction(size: Size) -> dict[str, float]:
    """Profiles, plans and runs on every rank. The fastest of some steps counts: others are disturbed."""
    device = local_device()
    GROUPS.join(device)
    model = _model(size, dtype_on(device))
    profile = api.profile(model, seq_len=size.seq_len, seconds=size.profile_seconds)
    result = api.plan(model, profile, batch_size=1, seq_len=size.seq_len, pp=rank_and_size()[1], dp=1, tp=1)
    times = _step_times(Pipeline(model, result.plan), size)
    return {"measured": min(times), "predicted": result.simulate().makespan}


# The device


def waits(ranks: int, size: Size) -> Proof:
    """Counts the operations of a step that make the host wait for the device, as torch itself warns of them.

    Args:
        ranks: How many processes to start.
        size: Of the model that runs a step.
    """
    if not torch.cuda.is_available():
        return Proof(None, "no GPU: nothing to wait for")
    result: dict[str, Any] = run_ranks(_waits, ranks, size)
    says = f"{result['count']} in a step of {result['slices']} slices"
    return Proof(result["count"] <= ALLOWED_WAITS, says, result)


ALLOWED_WAITS = 3  # of a whole step: see docs/gpu.md


def _waits(size: Size) -> dict[str, Any]:
    """Returns how many operations of the second step waited, and where in the code. The first step also waits for
    self-tests of kernels and for buffers."""
    plan, ids = _plan(size, rank_and_size()[1]), _ids(size)
    pipe = Pipeline(_model(size, torch.bfloat16), plan)
    pipe.step(ids, next_token_labels(ids)).item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        pipe.step(ids, next_token_labels(ids))
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return {"count": len(lines), "slices": sum(map(len, plan.lengths)), "lines": sorted(set(lines))}


CTAS = (1, 2, 4)  # multiprocessors of a transfer (NCCL's max CTAs) that are tried


def multiprocessors(ranks: int, size: Size) -> Proof:
    """Times steps in which each transfer may hold one, two or four of the device's multiprocessors. A transfer that
    waits for its peer holds them, too: fewer leave more to computations, more send faster.

    Args:
        ranks: How many processes to start; with one there are no transfers.
        size: Of the model, and how many steps to time.
    """
    if not torch.cuda.is_available() or ranks == 1:
        return Proof(None, "no transfers between GPUs")
    times: dict[int, float] = {ctas: run_ranks(_with_ctas, ranks, size, ctas) for ctas in CTAS}
    says = ", ".join(f"{seconds:.4f} s with {ctas}" for ctas, seconds in times.items())
    return Proof(None, f"a step takes {says} multiprocessors for each", {"seconds": times})


def _with_ctas(size: Size, ctas: int) -> float:
    """Returns the seconds of the fastest step. The setting takes effect when NCCL's communicators are made, so every
    value needs new processes."""
    groups.MAX_CTAS = ctas
    pipe = Pipeline(_model(size, torch.bfloat16), _plan(size, rank_and_size()[1]))
    return min(_step_times(pipe, size))


def links_between(ranks: int, size: Size) -> Proof:
    """Measures the links from rank 0 to the others.

    Args:
        ranks: How many processes to start; with one there are no links.
        size: Not used.
    """
    if ranks == 1:
        return Proof(None, "one rank: no links")
    measured: Sequence[Link] = run_ranks(_links, ranks)
    rates = ", ".join(f"{link.rate / 1e9:.2f} GB/s after {1e6 * link.latency:.0f} us" for link in measured)
    return Proof(None, f"from rank 0: {rates}", {"links": [asdict(link) for link in measured]})


def _links() -> list[Link]:
    """Returns the links on rank 0. They are measured like the doctor's, over the connections that training makes."""
    device = local_device()
    GROUPS.join(device)
    rank, size = rank_and_size()
    measured = links(rank, size, device, 20.0)
    meet()
    dist.destroy_process_group()  # there is no pipeline to close it
    return measured


CHECKS: dict[str, Check] = {
    "attention": attention,
    "host waits": waits,
    "reserve": reserve,
    "memory": memory,
    "host time": host_time,
    "prediction": prediction,
    "transfers": multiprocessors,
    "links": links_between,
}
