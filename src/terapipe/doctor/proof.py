"""``terapipe doctor --prove``: runs what cannot be known without the hardware, and writes it to one file.

A ``Check`` starts ranks, has each call a function, and sums up what rank 0 returned in a ``Proof``::

    prove(CHECKS, 2, SMALL)
      |  for each name, check
      +--> check(2, SMALL)                               this process: no GPU context, nothing to clean up
             |
             +--> run_ranks(_orders, 2)                  two new processes: begin_rank(), _orders(), meet()
             |                                           -> what rank 0 returned
             +--> Proof("orders", holds, "9 orders on 2 ranks, ...", figures)

Each check starts its own ranks, so that one that fails, hangs or crashes leaves the others alone. Checks that say
whether numbers are right are in ``exactness``, those that measure bytes, seconds and waits in ``measurements``. On CPUs
the same list runs with small models, which proves the kit itself before somebody runs it on a GPU.
"""

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe.doctor.examination import first_line, share_cores
from terapipe.launch.processes import launch
from terapipe.planning.presets import GPTConfig
from terapipe.runtime.comm.environment import local_device, settings_of

FORMAT = 2  # of the file; it changes when a field is renamed or removed
SETTINGS = ("TORCH_", "PYTORCH_", "NCCL_", "CUDA_", "CUBLAS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Proof:
    """What one check tells: one line of the table, one object of the file.

    Args:
        holds: whether what it claims is true; None if it is a figure, not a claim.
        says: the result in one sentence.
        figures: all numbers behind it, for the file.
    """

    holds: bool | None
    says: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """The size of the models that checks run. The small one is for machines without GPUs and for tests. Both have a
    layer for each of 8 ranks.

    Args:
        model: the shape of the GPT.
        seq_len: tokens of its sequences.
        heads: sizes of attention heads whose kernels are tried.
        profile_seconds: how long a profile may take.
        steps: how many steps are timed.
    """

    model: GPTConfig
    seq_len: int
    heads: tuple[int, ...]
    profile_seconds: float
    steps: int


SMALL = Size(GPTConfig(layers=8, hidden=64, heads=4, vocab=128, max_seq_len=256), 256, (16, 64), 3.0, 3)
LARGE = Size(
    GPTConfig(layers=16, hidden=2048, heads=16, vocab=32000, max_seq_len=4096), 4096, (16, 64, 80, 128, 256), 30.0, 5
)
FAST = 1e13  # FLOP/s of products in bfloat16, from which on the large models take minutes, not hours

Check = Callable[[int, Size], Proof]  # of the number of ranks and the size of the models


def sizes(name: str | None) -> Size:
    """Returns a size. Without a name it measures whether the GPU is fast enough for large models.

    Args:
        name: "small" or "large", or None.
    """
    by_name = {"small": SMALL, "large": LARGE}
    if name is not None:
        return by_name[name]
    return LARGE if torch.cuda.is_available() and _speed() >= FAST else SMALL


def _speed() -> float:
    """Measures the FLOP/s of a product in bfloat16 on the first GPU."""
    x = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
    x @ x  # loads the kernel
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        x @ x
    torch.cuda.synchronize()
    return 4 * 2 * 1024**3 / (time.perf_counter() - began)


def prove(
    checks: Mapping[str, Check], ranks: int, size: Size, tell: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Runs checks one after the other. A check that raises has failed, and the next one runs all the same.

    Args:
        checks: by name, such as ``exactness.CHECKS``.
        ranks: how many processes each check starts; some need only one.
        size: of the models that are run.
        tell: is called with the name of each check before it starts.

    Returns:
        A JSON object with the machine, each proof and its seconds, and whether all hold.
    """
    proofs = []
    for name, check in checks.items():
        tell(name)
        began = time.monotonic()
        try:
            with _quiet():
                proof = check(ranks, size)
        except Exception as error:
            proof = Proof(False, f"could not be run: {_reason(error)}")
        proofs.append({"name": name, **asdict(proof), "seconds": round(time.monotonic() - began, 2)})
    holds = all(proof["holds"] is not False for proof in proofs)
    return {"format": FORMAT, "machine": machine(), "ranks": ranks, "holds": holds, "proofs": proofs}


def _reason(error: Exception) -> str:
    """Returns in one line why a proof could not be run; of a dead rank, its own last words rather than torch's."""
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        data: Any = failure.error_file_data.get("message")
        said = data.get("message") if isinstance(data, dict) else data
        return f"rank {rank} ended with {said or failure.exitcode}"
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences logging inside: torch logs a traceback of its own when a rank dies, and the proof reports it anyway."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Calls a function on ranks of this machine, each set up as training does it, and waits for all at the end.

    Args:
        function: one that pickle can name. What it returns must be the same for every rank, or matter on rank 0 only.
        ranks: how many processes.
        *args: of the function.

    Returns:
        What the function returned on rank 0.
    """
    return launch(run_rank, ranks, function, *args)


def run_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Runs one rank of a check. Apart from ``run_ranks`` only tests call it, in their own process.

    Args:
        function: of the check.
        *args: of the function.
    """
    begin_rank()
    result = function(*args)
    meet()
    return result


def begin_rank() -> None:
    """Sets up a rank: pins it to its cores, as training does, and has float32 products computed in float32. NVIDIA's
    images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, with which they are TF32, and no gradient is exact."""
    share_cores()
    torch.set_float32_matmul_precision("highest")
    if local_device().type == "cuda":
        torch.cuda.set_device(local_device())


def dtype_on(device: torch.device) -> torch.dtype:
    """Returns the dtype in which models are trained here: bfloat16 on GPUs, float32 on CPUs, which emulate bfloat16.

    Args:
        device: of this rank.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def meet() -> None:
    """Waits for all ranks at the end of a check, because the first to leave would cut off the others."""
    if dist.is_initialized():
        dist.barrier()


def machine() -> dict[str, Any]:
    """Describes this machine for the report: versions, GPUs and the settings that change what they do."""
    about: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [],
        "environment": settings_of(*SETTINGS),
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        about["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        about["capability"] = [list(torch.cuda.get_device_capability(i)) for i in range(count)]
        about["memory"] = [torch.cuda.mem_get_info(i)[1] for i in range(count)]
        about["peer_access"] = [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
        ]
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        about["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
    return about


def ranks_here() -> int:
    """Returns how many ranks prove something here: one for each GPU, at most 8; two without GPUs."""
    return min(8, torch.cuda.device_count()) or 2
