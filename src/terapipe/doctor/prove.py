"""``terapipe doctor --prove``: runs what cannot be known without the hardware, and writes it to one file.

Each proof starts its own ranks, so that one that fails, hangs or crashes leaves the others alone. On CPUs the same list
runs, which proves the kit.
"""

import json
import logging
import os
import platform
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe import api
from terapipe.doctor.examine import first_line, links, share_cores
from terapipe.launch.processes import launch
from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernel_check import CASES, error_of, tolerance
from terapipe.modeling.kernels import Kernel, Need, changed_signature, table
from terapipe.modeling.stage import next_token_labels
from terapipe.planning.layout import split_layers
from terapipe.planning.order import ORDERS
from terapipe.planning.slices import Plan
from terapipe.presets import GPTConfig
from terapipe.runtime.dry_run import MemoryCounter
from terapipe.runtime.environment import ensure_process_group, local_device, rank_and_size
from terapipe.runtime.failures import PipelineError
from terapipe.runtime.pipeline import Pipeline

FORMAT = 1
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
HEADS = (16, 64, 80, 128, 256)
QUICK_HEADS = (16, 64)
EXACT = 1e-4  # largest relative error of float32 gradients against one process
CLOSE = 0.1  # of the predicted bytes, how far off the measured ones may be
TIMEOUT = 20.0  # seconds that ranks wait for a killed one


@dataclass(frozen=True)
class Proof:
    """One line of the table: what was tried, whether it holds (None: it is a figure, not a claim), and the figures."""

    name: str
    holds: bool | None
    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Size:
    """Of the models that are run. A small one is for machines without GPUs, and for tests."""

    model: GPTConfig
    seq_len: int
    heads: tuple[int, ...]
    profile_seconds: float
    steps: int


SMALL = Size(GPTConfig(layers=4, hidden=64, heads=4, vocab=128, max_seq_len=256), 256, QUICK_HEADS, 3.0, 3)
LARGE = Size(GPTConfig(layers=16, hidden=2048, heads=16, vocab=32000, max_seq_len=4096), 4096, HEADS, 30.0, 5)

Check = Callable[[int, Size], Proof]


def prove(ranks: int, size: Size, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All proofs, one after the other, as one JSON object. ``tell`` is called with what is being tried."""
    proofs = []
    for name, check in CHECKS.items():
        tell(name)
        began = time.monotonic()
        try:
            with _quiet():
                proof = check(ranks, size)
        except Exception as error:
            proof = Proof(name, False, f"could not be run: {_reason(error)}")
        proofs.append({**asdict(proof), "name": name, "seconds": round(time.monotonic() - began, 2)})
    holds = all(proof["holds"] is not False for proof in proofs)
    return {"format": FORMAT, "machine": machine(), "ranks": ranks, "holds": holds, "proofs": proofs}


def _reason(error: Exception) -> str:
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        data: Any = failure.error_file_data.get("message")
        said = data.get("message") if isinstance(data, dict) else data
        return f"rank {rank} ended with {said or failure.exitcode}"
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback of its own when a rank dies."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        found["capability"] = [list(torch.cuda.get_device_capability(i)) for i in range(count)]
        found["memory"] = [torch.cuda.mem_get_info(i)[1] for i in range(count)]
        found["peer_access"] = [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
        ]
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
    return found


# Kernels


def kernels(ranks: int, size: Size) -> Proof:
    found: list[dict[str, Any]] = launch(_kernels, 1, size)
    wrong = [row for row in found if row["fault"]]
    used = sorted({row["kernel"] for row in found if not row["fault"]})
    says = f"{len(found) - len(wrong)} of {len(found)} combinations are right ({', '.join(used)})"
    if wrong:
        says += f"; first fault: {wrong[0]['kernel']}, {wrong[0]['dtype']}, {wrong[0]['case']}: {wrong[0]['fault']}"
    return Proof("kernels", not wrong and bool(found), says, {"combinations": found})


def _kernels(size: Size) -> list[dict[str, Any]]:
    device = local_device()
    rows = []
    for kernel in table(device.type):
        for dtype in DTYPES[device.type]:
            for head in size.heads:
                rows += list(_cases(kernel, device, dtype, head))
    return rows


def _cases(kernel: Kernel, device: torch.device, dtype: torch.dtype, head: int) -> Iterator[dict[str, Any]]:
    for case in CASES:
        if kernel.refusal(Need(device, dtype, head, case.softcap is not None, case.sinks)) is not None:
            continue
        error, fault = None, changed_signature(kernel)
        if fault is None:
            try:
                error = error_of(kernel, device, dtype, head, case)
                fault = None if error <= tolerance(device, dtype) else f"off by {error:.1e}"
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
                fault = first_line(failure)
        dtype_name = str(dtype).removeprefix("torch.")
        yield {"kernel": kernel.name, "dtype": dtype_name, "head": head, "case": case.name, "error": error,
               "fault": fault}  # fmt: skip


# Steps


def orders(ranks: int, size: Size) -> Proof:
    """A step of every order against the plain model, on a small model in float32, with delays thrown in."""
    errors: dict[str, float] = launch(_orders, ranks)
    worst = max(errors.values())
    says = f"{len(errors)} orders on {ranks} ranks, largest relative error of a gradient {worst:.1e}"
    return Proof("orders", worst <= EXACT, says, {"errors": errors})


def _orders() -> dict[str, float]:
    share_cores()
    config = GPTConfig(layers=16, hidden=32, heads=4, kv_heads=2, vocab=61, max_seq_len=96)
    ids = torch.randint(config.vocab, (3, 96), generator=torch.Generator().manual_seed(0))
    wanted = _plain(config, ids)
    found = {}
    for name, order in ORDERS.items():
        chunks = order.chunks or order.tried_chunks[-1]
        stages = rank_and_size()[1] * chunks
        if stages > config.layers:
            continue
        lengths = (40, 8, 33, 15) if order.sliced else (96,)
        plan = Plan((1, 2), (lengths, lengths), split_layers(config, stages, 96), name, chunks)
        pipe = Pipeline(_wide(GPT(config)), plan)
        _add_delays(pipe)
        for _ in range(2):  # the second time over what the first left
            pipe.zero_grad()
            pipe.step(ids, next_token_labels(ids))
        mine = {n: p.grad.cpu() for n, p in pipe.named_parameters() if p.grad is not None}
        found[name] = max(pipe.gather(_error(mine, wanted)))
    _leave()
    return found


def _wide(model: GPT) -> GPT:
    """Weights larger than an initialization's, so that attention is far from uniform."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.mul_(8.0)
    return model


def _plain(config: GPTConfig, ids: Tensor) -> dict[str, Tensor]:
    """Gradients of the whole model in one piece, on the CPU."""
    model, labels = _wide(GPT(config)), next_token_labels(ids)
    (model.loss(model(ids), labels) / (labels >= 0).sum()).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    largest = max(g.abs().max().item() for g in wanted.values())
    same = {"head.weight": "embedding.weight"} if "head.weight" not in wanted else {}
    return max((g - wanted[same.get(name, name)]).abs().max().item() for name, g in found.items()) / largest


def _add_delays(pipe: Pipeline) -> None:
    """The device falls behind the host at random, as it would with other kernels: what is in order by luck breaks."""
    if pipe.device.type != "cuda":
        return
    generator = torch.Generator().manual_seed(pipe.rank)

    def delay(*_: object) -> None:
        torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=generator)))  # type: ignore[no-untyped-call]

    def hook(module: object, inputs: object, out: Tensor) -> None:
        delay()
        if out.requires_grad:
            out.register_hook(delay)  # type: ignore[no-untyped-call]

    for stage in pipe.stages.values():
        stage.register_forward_hook(hook)


def _leave() -> None:
    if dist.is_initialized():
        dist.barrier()


# Checkpoints


def checkpoints(ranks: int, size: Size) -> Proof:
    """Saved by one layout, loaded by another with other stages."""
    with tempfile.TemporaryDirectory() as folder:
        error: float = launch(_checkpoints, ranks, folder)
    says = f"saved on {ranks} ranks in the background, loaded with other stages: largest difference {error:g}"
    return Proof("checkpoints", error == 0, says, {"difference": error})


def _checkpoints(folder: str) -> float:
    share_cores()
    config = GPTConfig(layers=16, hidden=32, heads=4, vocab=61, max_seq_len=64)
    ids, size = torch.arange(64)[None] % config.vocab, rank_and_size()[1]
    even, uneven = split_layers(config, size, 64), (*range(size), config.layers)
    pipe = Pipeline(GPT(config), Plan((1,), ((40, 24),), even))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    pipe.step(ids, next_token_labels(ids))
    optimizer.step()
    pipe.save_in_background(Path(folder) / "saved", optimizer).result()
    parts = pipe.gather({name: p.detach().cpu() for name, p in pipe.named_parameters()})
    whole = {name: x for part in parts for name, x in part.items()}
    other = Pipeline(GPT(config, seed=1), Plan((1,), ((64,),), uneven))
    other.load(Path(folder) / "saved", torch.optim.AdamW(other.parameters()))
    mine = max((p.detach().cpu() - whole[name]).abs().max().item() for name, p in other.named_parameters())
    worst = max(other.gather(mine))
    _leave()
    return worst


# Failing


def killed(ranks: int, size: Size) -> Proof:
    """One rank is killed in the middle of a step: how long the others take to say so, and what they say."""
    if ranks == 1:
        return Proof("killed rank", None, "one rank: nobody to notice", {})
    with tempfile.TemporaryDirectory() as folder:
        with suppress(ChildFailedError):  # as it must
            launch(_killed, ranks, folder)
        told = {path.name: json.loads(path.read_text()) for path in Path(folder).glob("rank*")}
    says = f"{len(told)} of {ranks - 1} survivors ended with a message"
    if told:
        slowest = max(each["seconds"] for each in told.values())
        says += f", the last after {slowest:.1f} s: {next(iter(told.values()))['message'][:120]}"
    named = [each for each in told.values() if "rank 1 " in each["message"]]
    return Proof("killed rank", len(named) == ranks - 1, says, {"told": told})


def _killed(folder: str) -> None:
    share_cores()
    rank, size = rank_and_size()
    config = GPTConfig(layers=16, hidden=32, heads=4, vocab=61, max_seq_len=64)
    pipe = Pipeline(GPT(config), Plan((1,), ((16,) * 4,), split_layers(config, size, 64)), timeout=TIMEOUT)
    ids = torch.arange(64)[None] % config.vocab
    pipe.step(ids, next_token_labels(ids)).item()
    if rank == 1:
        calls = iter(range(100))
        stage = next(iter(pipe.stages.values()))
        stage.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 2 else None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all ranks when it sees that one is dead
    began = time.monotonic()
    try:
        pipe.step(ids, next_token_labels(ids)).item()
    except PipelineError as error:
        said = {"seconds": time.monotonic() - began, "message": str(error)}
        (Path(folder) / f"rank{rank}").write_text(json.dumps(said))
        os._exit(1)


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
    predicted = api.predicted_peaks(size.model, plan, str(dtype).removeprefix("torch."))[pipe.rank]
    found = pipe.gather((measured, predicted))
    _leave()
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
    _leave()
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
    _leave()
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
    _leave()
    return found


CHECKS: dict[str, Check] = {
    "kernels": kernels,
    "orders": orders,
    "checkpoints": checkpoints,
    "killed rank": killed,
    "host waits": waits,
    "memory": memory,
    "prediction": prediction,
    "links": links_between,
}


def sizes(name: str | None) -> Size:
    """By name, or by whether there is a GPU."""
    known = {"small": SMALL, "large": LARGE}
    return known[name] if name else (LARGE if torch.cuda.is_available() else SMALL)


def ranks_here() -> int:
    """As many as there are GPUs, at most 8; else two."""
    return min(8, torch.cuda.device_count()) or 2
