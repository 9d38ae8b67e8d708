"""Checks that numbers are right on this hardware, and that a killed rank is noticed.

Every public function but ``small_llama`` is a ``Check`` of ``proof``: it takes the number of ranks and the size of the
models, starts its ranks, and returns a ``Proof``. The function of the same name with an underscore runs on each rank.

The test suite asks the same questions of more cases (``tests/exactness``), but on CPUs and pretend GPUs. These are the
few that a real GPU, driver or NCCL can answer in another way: kernels, products that add to float32, streams that
overlap, background copies, a process that dies while NCCL waits for it. They compare gradients, not losses: a loss can
be right to the last digit while a gradient is missing.
"""

import copy
import json
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe.doctor.examination import first_line
from terapipe.doctor.proof import Check, Proof, Size, begin_rank, run_ranks
from terapipe.launch.processes import launch
from terapipe.modeling.gpt import GPT
from terapipe.modeling.kernel_choice import CASES, Case, error_of, kernel_for, tolerance
from terapipe.modeling.stage import next_token_labels
from terapipe.modeling.weight_grads import add_product, can_add_in_float32, main_grad
from terapipe.planning.layout import split_layers
from terapipe.planning.order import ORDERS
from terapipe.planning.presets import GPTConfig
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.environment import local_device, rank_and_size
from terapipe.runtime.comm.errors import PipelineError
from terapipe.runtime.pipeline import Pipeline

EXACT = 1e-4  # largest relative error of float32 gradients against one process
TIMEOUT = 20.0  # seconds that ranks wait for a killed one
TOLD = 180.0  # seconds within which survivors of a killed rank must have said so

# Kernels


def kernels(ranks: int, size: Size) -> Proof:
    """Compares the attention kernel that is chosen for each kind of call with float64. It does not run the others: some
    compile for minutes.

    Args:
        ranks: Not used: one process tries them all.
        size: Has the sizes of heads to try.
    """
    results: dict[str, Any] = run_ranks(_kernels, 1, size)
    rows = results["combinations"]
    wrong = [row for row in rows if row["fault"]]
    used = sorted({row["kernel"] for row in rows if not row["fault"]})
    says = f"{len(rows) - len(wrong)} of {len(rows)} combinations are right ({', '.join(used)})"
    if wrong:
        says += f"; first fault: {wrong[0]['kernel']}, {wrong[0]['dtype']}, {wrong[0]['case']}: {wrong[0]['fault']}"
    if results["not used"]:
        says += f"; {results['not used'][0]}"
    return Proof(not wrong and bool(rows), says, results)


def _kernels(size: Size) -> dict[str, Any]:
    """Returns a row for each dtype, head size and kind of call (window, softcap, packed documents, ...), and why
    kernels that were tried first are not used, as their warnings say."""
    device = local_device()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = [
            _row(case, device, dtype, head)
            for dtype in (torch.float32, torch.bfloat16)
            for head in size.heads
            for case in CASES
            if _is_trained(case, dtype, head, size)
        ]
    told = dict.fromkeys(str(each.message) for each in said if each.category is RuntimeWarning)
    return {"combinations": rows, "not used": list(told)}


def _is_trained(case: Case, dtype: torch.dtype, head: int, size: Size) -> bool:
    """Tells whether models use such a call. Softcaps belong to models with large heads, in half precision, and may
    need a kernel that compiles."""
    return case.softcap is None or (dtype is torch.bfloat16 and head == size.heads[-1])


def _row(case: Case, device: torch.device, dtype: torch.dtype, head: int) -> dict[str, Any]:
    """Tries one kernel. It reports a kernel that raises as one with a fault, so that the others are tried, too."""
    name, error, fault = "", None, None
    try:
        kernel = kernel_for(case.need(device, dtype, head))
        name, error = kernel.name, error_of(kernel, device, dtype, head, case)
        fault = None if error <= tolerance(device, dtype) else f"off by {error:.1e}"
    except Exception as failure:  # kernels refuse in many ways
        fault = f"{type(failure).__name__}: {first_line(failure)}"
    dtype_name = str(dtype).removeprefix("torch.")
    return {"kernel": name, "dtype": dtype_name, "head": head, "case": case.name, "error": error, "fault": fault}


# Products


def products(ranks: int, size: Size) -> Proof:
    """Compares a weight's gradient, summed over slices in float32, with float64. The product adds to the sum itself, if
    torch can do that; else every product is rounded to bfloat16 first, and more error is allowed.

    Args:
        ranks: Not used: one process.
        size: Has the shapes of a layer's products.
    """
    result: dict[str, Any] = run_ranks(_products, 1, size)
    how = "one operation" if result["fused"] else "two operations: this torch has none for it here"
    says = f"bfloat16 products, added to a sum in float32 by {how}, largest relative error {result['error']:.1e}"
    return Proof(result["error"] <= (EXACT if result["fused"] else ROUNDED), says, result)


ROUNDED = 1e-2  # largest relative error where every product is rounded to bfloat16


def _products(size: Size) -> dict[str, Any]:
    """Returns the error of each shape. Three slices are added to one sum, as a step does::

        sum (float32, outputs x inputs) += left (bfloat16, tokens x outputs)^T @ right (bfloat16, tokens x inputs)

    The odd shape finds kernels that want multiples of 8. Both orders of factors, because cuBLAS sees a transposed
    matrix in one of them and may take another kernel.
    """
    device = local_device()
    width, errors = size.model.hidden, {}
    cases = (size.seq_len, 4 * width, width), (size.seq_len // 8, width, 4 * width), (77, 96, 40)
    for tokens, outputs, inputs in cases:
        generator = torch.Generator().manual_seed(tokens)
        shapes = (tokens, outputs), (tokens, inputs)
        left, right = (torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes)
        for name, a, b in (("", left, right), (", inputs first", right, left)):
            weight = nn.Parameter(torch.zeros(a.shape[1], b.shape[1], dtype=torch.bfloat16, device=device))
            for _ in range(3):
                add_product(weight, a, b)
            total, wanted = main_grad(weight), 3 * (a.double().t() @ b.double())
            assert total is not None
            error = (total.double() - wanted).abs().max() / wanted.abs().max()
            errors[f"{tokens} x {outputs} x {inputs}{name}"] = error.item()
    return {
        "fused": device.type == "cuda" and can_add_in_float32(torch.bfloat16),
        "error": max(errors.values()),
        "errors": errors,
    }


# Steps


def orders(ranks: int, size: Size) -> Proof:
    """Compares the gradients of a step in every order with the plain model's, on a small model in float32. Random
    delays break what is in order by luck.

    Args:
        ranks: How many processes to start.
        size: Not used: the model is always small, so that float32 tells errors from rounding.
    """
    errors: dict[str, float] = run_ranks(_orders, ranks)
    worst = max(errors.values())
    says = f"{len(errors)} orders on {ranks} ranks, largest relative error of a gradient {worst:.1e}"
    return Proof(worst <= EXACT, says, {"errors": errors})


def _orders() -> dict[str, float]:
    """Returns the largest error of each order, over all ranks.

    Two microbatches of 1 and 2 sequences and four uneven slices, so that no two messages have the same shape and one
    that is taken for another cannot go unnoticed. As many chunks per rank as the order allows and the layers suffice
    for, because only then do ranks send to themselves and back.
    """
    config = GPTConfig(layers=16, hidden=32, heads=4, kv_heads=2, vocab=61, max_seq_len=96)
    ids = torch.randint(config.vocab, (3, 96), generator=torch.Generator().manual_seed(0))
    wanted = _plain(_wide(GPT(config)), ids)
    errors = {}
    for name, order in ORDERS.items():
        ranks = rank_and_size()[1]
        chunks = max(n for n in (order.chunks or 1, *order.tried_chunks) if n * ranks <= config.layers)
        stages = ranks * chunks
        lengths = (40, 8, 33, 15) if order.sliced else (96,)
        plan = Plan((1, 2), (lengths, lengths), split_layers(config, stages, 96), name, chunks)
        pipe = Pipeline(_wide(GPT(config)), plan)
        _add_delays(pipe)
        errors[name] = max(pipe.gather(_error(_two_steps(pipe, ids), wanted)))
    return errors


def _two_steps(pipe: Pipeline, ids: Tensor, around: AbstractContextManager[object] | None = None) -> dict[str, Tensor]:
    """Runs two steps and returns the gradients of the second, which also sees what the first left behind."""
    for _ in range(2):
        pipe.zero_grad()
        with around or nullcontext():
            pipe.step(ids, next_token_labels(ids))
    return {name: p.grad.float().cpu() for name, p in pipe.named_parameters() if p.grad is not None}


def _wide(model: GPT) -> GPT:
    """Makes weights larger than an initialization's, so that attention is far from uniform and errors show."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.mul_(8.0)
    return model


def _plain(model: GPT, ids: Tensor, around: AbstractContextManager[object] | None = None) -> dict[str, Tensor]:
    """Returns the gradients of the whole model in one piece."""
    labels = next_token_labels(ids)
    with around or nullcontext():
        loss = model.loss(model(ids), labels) / (labels >= 0).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def _error(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Returns the largest difference of gradients, relative to the largest of all. A tied head has the embedding's."""
    largest = max(g.abs().max().item() for g in wanted.values())
    same = {"head.weight": "embedding.weight"} if "head.weight" not in wanted else {}
    return max((g - wanted[same.get(name, name)]).abs().max().item() for name, g in gradients.items()) / largest


def _add_delays(pipe: Pipeline) -> None:
    """Lets the device fall behind the host at random, as it would with other kernels: what is in order by luck
    breaks."""
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


def hugging_face(ranks: int, size: Size) -> Proof:
    """Compares the gradients of a Hugging Face model, with grouped heads, with those of transformers itself.

    Args:
        ranks: How many processes to start.
        size: Not used: the model is always small.
    """
    try:
        import transformers
    except ImportError:
        return Proof(None, "transformers is not installed")
    error: float = run_ranks(_hugging_face, ranks)
    says = f"a Llama on {ranks} ranks, largest relative error of a gradient {error:.1e}"
    return Proof(error <= EXACT, says, {"error": error, "transformers": transformers.__version__})


def _hugging_face() -> float:
    """Returns the largest error over all ranks of a step whose batch and slices are uneven, like those of ``_orders``.
    The reference is transformers' own forward with its own loss, so also the shift of labels is compared."""
    from terapipe.hf.decoder import Decoder

    model, ids = small_llama(), torch.randint(61, (2, 96), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model)
    plain(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    ranks, layers = rank_and_size()[1], model.config.num_hidden_layers
    boundaries = tuple(layers * k // ranks for k in range(ranks + 1))
    pipe = Pipeline(Decoder(model), Plan((1, 1), ((40, 8, 33, 15),) * 2, boundaries))
    return max(pipe.gather(_error(_two_steps(pipe, ids), wanted)))


def small_llama(**changes: int) -> Any:
    """Builds a Llama with random weights, the same on every rank.

    Args:
        **changes: fields of its configuration that differ from the small model's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 96, "pad_token_id": 0}
    config = AutoConfig.for_model("llama", **{**shape, **more, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def autocast(ranks: int, size: Size) -> Proof:
    """Compares a step under torch.autocast, as `bf16=True` of Hugging Face trainers has it, with float32. It must be
    about as close as one process under autocast: at most twice as far off.

    Args:
        ranks: How many processes to start.
        size: Not used: the model is always small.
    """
    errors: dict[str, float] = run_ranks(_autocast, ranks)
    says = (
        f"gradients on {ranks} ranks are off by {errors['pipeline']:.1e} of float32's, by {errors['plain']:.1e} in one "
        "process"
    )
    return Proof(errors["pipeline"] <= 2 * errors["plain"], says, dict(errors))


def _autocast() -> dict[str, float]:
    """Returns the error of one process and of the pipeline, both under autocast on this device, against float32 in one
    process on the CPU. The first is the yardstick: how much bfloat16 costs depends on the device's kernels."""
    device = local_device()
    config = GPTConfig(layers=8, hidden=32, heads=4, kv_heads=2, vocab=61, max_seq_len=96)
    ids = torch.randint(config.vocab, (2, 96), generator=torch.Generator().manual_seed(0))
    wanted = _plain(GPT(config), ids)

    def around() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16)

    one = _error(_plain(GPT(config).to(device), ids.to(device), around()), wanted)
    plan = Plan((1, 1), ((40, 8, 33, 15),) * 2, split_layers(config, rank_and_size()[1], 96))
    pipe = Pipeline(GPT(config), plan)
    return {"plain": one, "pipeline": max(pipe.gather(_error(_two_steps(pipe, ids, around()), wanted)))}


# Checkpoints


def checkpoints(ranks: int, size: Size) -> Proof:
    """Saves a checkpoint, loads it into a pipeline with other stages, and compares every weight, bit by bit.

    Args:
        ranks: How many processes to start.
        size: Not used: the model is always small.
    """
    with tempfile.TemporaryDirectory() as folder:
        error: float = run_ranks(_checkpoints, ranks, folder)
    says = f"saved on {ranks} ranks in the background, loaded with other stages: largest difference {error:g}"
    return Proof(error == 0, says, {"difference": error})


def _checkpoints(folder: str) -> float:
    """Returns the largest difference of a weight after a way through a file, over all ranks. The step before gives the
    optimizer a state to save; the second pipeline begins with other weights, so that one that is not loaded shows."""
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
    return max(other.gather(mine))


# Failing


def kill_rank(ranks: int, size: Size) -> Proof:
    """Kills one rank in the middle of a step, and sees how long the others take to say so, and what they say. All
    survivors must name rank 1: a message that blames another one sends its reader to the wrong host.

    Args:
        ranks: How many processes to start; with one there is nobody to notice.
        size: Not used: the model is always small.
    """
    if ranks == 1:
        return Proof(None, "one rank: nobody to notice")
    with tempfile.TemporaryDirectory() as folder:
        with suppress(ChildFailedError):  # as all of them do
            launch(_run_and_kill, ranks, folder)
        told = {path.name: json.loads(path.read_text()) for path in Path(folder).glob("rank*")}
    says = f"{len(told)} of {ranks - 1} survivors ended with a message"
    if told:
        slowest = max(each["seconds"] for each in told.values())
        says += f", the last after {slowest:.1f} s: {next(iter(told.values()))['message'][:120]}"
    named = [each for each in told.values() if "rank 1 " in each["message"]]
    return Proof(len(named) == ranks - 1, says, {"told": told})


def _run_and_kill(folder: str) -> None:
    """Runs a step on each rank, of which rank 1 dies. Rank 1 is a process of its own below the one that was launched,
    and no launched process ends before all survivors have spoken, or TOLD seconds have passed: torch's launcher would
    ask the others to end at once, and kill them 30 seconds later.

        launched processes   0          1               2
        ranks                0 (itself) 1 (its child)   2 (itself)     only the child is killed
    """
    rank, size = rank_and_size()
    if rank == 1:
        victim = multiprocessing.get_context("spawn").Process(target=_run_until_killed, args=(folder,))
        victim.start()
        victim.join()
    else:
        _run_until_killed(folder)
    deadline = time.monotonic() + TOLD
    while len(list(Path(folder).glob("rank*"))) < size - 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    os._exit(1)


def _run_until_killed(folder: str) -> None:
    """Runs steps until rank 1 kills itself in one. A survivor writes what it was told to a file in the folder."""
    begin_rank()
    rank, size = rank_and_size()
    config = GPTConfig(layers=16, hidden=32, heads=4, vocab=61, max_seq_len=64)
    pipe = Pipeline(GPT(config), Plan((1,), ((16,) * 4,), split_layers(config, size, 64)), timeout=TIMEOUT)
    ids = torch.arange(64)[None] % config.vocab
    pipe.step(ids, next_token_labels(ids)).item()
    if rank == 1:
        calls = iter(range(100))
        stage = next(iter(pipe.stages.values()))
        stage.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 2 else None)
    asked: list[int] = []  # to end, by the launcher
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    began = time.monotonic()
    try:
        pipe.step(ids, next_token_labels(ids)).item()
    except PipelineError as error:
        said = {"seconds": time.monotonic() - began, "message": str(error), "asked_to_end": bool(asked)}
        (Path(folder) / f"rank{rank}").write_text(json.dumps(said))


CHECKS: dict[str, Check] = {
    "kernels": kernels,
    "products": products,
    "orders": orders,
    "Hugging Face": hugging_face,
    "autocast": autocast,
    "checkpoints": checkpoints,
    "killed rank": kill_rank,
}
