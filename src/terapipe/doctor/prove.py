"""``terapipe doctor --prove``: runs what cannot be known without the hardware, and writes it to one file.

Each proof starts its own ranks, so that one that fails, hangs or crashes leaves the others alone. On CPUs the same list
runs, which proves the kit.
"""

import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from terapipe.doctor import exactness, measurements
from terapipe.doctor.examine import first_line
from terapipe.doctor.proof import Check, Proof, Size
from terapipe.runtime.comm.environment import settings_of

FORMAT = 2

CHECKS: dict[str, Check] = {
    "attention": measurements.attention,
    "kernels": exactness.kernels,
    "products": exactness.products,
    "orders": exactness.orders,
    "Hugging Face": exactness.hugging_face,
    "autocast": exactness.autocast,
    "checkpoints": exactness.checkpoints,
    "killed rank": exactness.kill_rank,
    "host waits": measurements.waits,
    "reserve": measurements.reserve,
    "memory": measurements.memory,
    "host time": measurements.host_time,
    "prediction": measurements.prediction,
    "transfers": measurements.multiprocessors,
    "links": measurements.links_between,
}
SETTINGS = ("TORCH_", "PYTORCH_", "NCCL_", "CUDA_", "CUBLAS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS")


def prove(ranks: int, size: Size, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Runs all proofs, one after the other. A proof that raises has failed, and the next one runs all the same.

    Args:
        ranks: how many processes each proof starts.
        size: of the models that are run.
        tell: is called with the name of each proof before it starts.

    Returns:
        A JSON object with the machine, each proof, and whether all hold.
    """
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
