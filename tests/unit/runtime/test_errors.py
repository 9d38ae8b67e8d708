"""What errors of torch, gloo and NCCL mean: who is to blame depends on it."""

import pytest
import torch
from torch import distributed as dist

from terapipe.runtime.comm.errors import (
    describe_error,
    is_connection_error,
    is_out_of_memory,
    is_timeout,
    nccl_cause,
    nccl_message,
)

CLOSED = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def test_errors_of_connections_and_of_computations() -> None:
    assert is_connection_error(CLOSED)
    assert is_connection_error(dist.DistNetworkError("reset"))
    assert not is_connection_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_connection_error(ValueError("gloo"))


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("[gloo] Timed out waiting 2000ms for recv operation to complete", True),
        ("[gloo] Read timeout", True),
        ("[gloo] Application timeout caused pair closure", False),  # ranks wake each other so
        ("[gloo] Connection closed by peer", False),
    ],
)
def test_only_this_very_operation_times_out(text: str, late: bool) -> None:
    assert is_timeout(RuntimeError(text)) == late


def test_memory_of_host_and_device() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert describe_error(MemoryError()) == "out of memory"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(ValueError("no")) == "ValueError: no"


def test_nccl_names_causes_that_a_user_can_act_on() -> None:
    assert (
        nccl_cause(dist.DistBackendError("Duplicate GPU detected : rank 1\nmore")) == "Duplicate GPU detected : rank 1"
    )
    assert not nccl_cause(dist.DistBackendError("NCCL communicator was aborted on rank 1"))
    assert not nccl_cause(CLOSED)
    assert not nccl_message(None)
