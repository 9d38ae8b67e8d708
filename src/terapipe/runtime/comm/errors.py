"""The error that all ranks raise together, and what the errors of torch, gloo and NCCL mean."""

import re

import torch
import torch.distributed as dist


class PipelineError(RuntimeError):
    """A step failed, on this rank or on another. The pipeline cannot be used after it."""


def is_connection_error(error: BaseException) -> bool:
    """Tells whether an operation between ranks failed, rather than a computation on this one.

    gloo raises a plain RuntimeError, so its words are all there is to go by.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether a GPU or the host had no memory left. torch has no error class for the host's."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def is_timeout(error: BaseException) -> bool:
    """Tells whether this very operation took too long.

    gloo also names a time-out where another operation has closed the connection ("caused pair closure"), as ranks do
    on purpose to wake each other. That one does not count.
    """
    text = str(error)
    return bool(re.search(r"timed? ?out", text, re.IGNORECASE)) and "caused pair closure" not in text


# What NCCL says when a peer is gone, late, or has cut the connection.
_CONNECTION_GONE = re.compile(
    r"abort|timed? ?out|timeout|connection (was )?closed|remote process|shut ?down", re.IGNORECASE
)


def nccl_cause(error: BaseException) -> str:
    """Returns what an error between ranks says beyond that the connection is gone, or an empty string.

    NCCL names causes that a user can act on: a GPU that two ranks share, no network interface, no memory for buffers.
    """
    text = str(error).strip()
    if not isinstance(error, dist.DistBackendError) or _CONNECTION_GONE.search(text):
        return ""
    return text.splitlines()[0]


def nccl_message(first: dist.Work | None) -> str:
    """Returns what NCCL says of a communicator that has failed, or an empty string.

    Args:
        first: any operation of it. The first one is best: it holds no message in memory.
    """
    if first is None or not first.is_completed():  # which asks NCCL
        return ""
    error = first.exception()
    return str(error).strip().partition("\n")[0] if error is not None else ""


def describe_error(error: BaseException) -> str:
    """Returns an error's class and message; never an empty string."""
    text = str(error).strip()
    if is_out_of_memory(error):
        return f"out of memory{f': {text}' if text else ''}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
