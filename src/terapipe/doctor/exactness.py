"""Proofs that numbers are right on this hardware, and that a killed rank is noticed."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe.doctor.examine import first_line, share_cores
from terapipe.doctor.proof import Proof, Size, meet
from terapipe.launch.processes import launch
from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernel_check import CASES, error_of, tolerance
from terapipe.modeling.kernels import Kernel, changed_signature, table
from terapipe.modeling.stage import next_token_labels
from terapipe.planning.layout import split_layers
from terapipe.planning.order import ORDERS
from terapipe.planning.slices import Plan
from terapipe.presets import GPTConfig
from terapipe.runtime.environment import local_device, rank_and_size
from terapipe.runtime.failures import PipelineError
from terapipe.runtime.pipeline import Pipeline

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
EXACT = 1e-4  # largest relative error of float32 gradients against one process
TIMEOUT = 20.0  # seconds that ranks wait for a killed one

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
        if kernel.refusal(case.need(device, dtype, head)) is not None:
            continue
        error, fault = None, changed_signature(kernel)
        if fault is None:
            try:
                error = error_of(kernel, device, dtype, head, case)
                fault = None if error <= tolerance(device, dtype) else f"off by {error:.1e}"
            except Exception as failure:  # kernels refuse in many ways
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
    meet()
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
    meet()
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
