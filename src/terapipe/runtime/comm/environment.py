"""This process among those that torchrun started. The only code that reads RANK and the like::

    host "a"                    host "b"                    four processes, two on each host
    RANK  0   1                 RANK  2   3                 rank_and_size()   (2, 4) on the third
    LOCAL_RANK  0   1           LOCAL_RANK  0   1           local_rank()      0 on the third: its GPU
    GROUP_RANK  0               GROUP_RANK  1               host_name()       "b (node 1)" on the third

Variables that are set here for processes to come (interfaces, allocator, NCCL) never replace what the user has set,
except those of NCCL's error handling: with other values a failure would end in a hang or a crash without a message.
"""

import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def local_rank() -> int:
    """This process among those that torchrun started on this host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank_and_size() -> tuple[int, int]:
    """This process among all that torchrun started, before they have met."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def host_name() -> str:
    """This host, told apart from others of the same name by the number that torchrun gave it."""
    number = os.environ.get("GROUP_RANK")
    return platform.node() if number is None else f"{platform.node()} (node {number})"


def restarts() -> int:
    """How often torchrun has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job() -> str:
    """What torchrun calls the run, the same on all hosts and after restarts; nothing where it was given no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def become_rank(rank: int, size: int, address: str, port: int) -> None:
    """Makes this process one of those that a launcher of one host started, as torchrun does by the same variables.

    Args:
        rank: of this process.
        size: how many there are, all on this host.
        address: where the launcher's store listens.
        port: likewise.
    """
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": address, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def under_torchrun() -> bool:
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def store_address() -> str:
    """Where the processes of the job meet."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def local_device() -> torch.device:
    """The device of this process: under torchrun, each takes the GPU of its local rank, if there are GPUs."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that was asked for. A GPU without a number is this process's own: ``torch.device("cuda")`` would be
    the first GPU of the host for all ranks.

    Args:
        device: as a user says it; None for the GPU of the local rank, or the CPU where there is no GPU.
    """
    asked = local_device() if device is None else torch.device(device)
    return local_device() if asked == torch.device("cuda") else asked


def stay_on_this_host() -> None:
    """If all ranks are on this host, gloo and NCCL listen on the loopback interface from now on. They would take the
    address of the host's name, where everybody in its network can reach them."""
    if under_torchrun() and local_ranks() == rank_and_size()[1]:
        os.environ.update(_loopback())


@contextmanager
def on_loopback() -> Iterator[None]:
    """Processes started inside are all on this host, and their connections stay on it."""
    with _environment(**_loopback()):
        yield


@contextmanager
def growing_segments() -> Iterator[None]:
    """On GPUs, processes started inside let torch's allocator grow its segments, unless the user has set something
    about it. Slices of many lengths would leave gaps between segments that nothing fits into."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    own = {} if any(name in os.environ for name in names) else {names[0]: "expandable_segments:True"}
    with _environment(**own):
        yield


def settings_of(*prefixes: str) -> dict[str, str]:
    """Variables of the environment, for reports of what a run was started with.

    Args:
        *prefixes: how their names begin, such as "NCCL_".
    """
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def _loopback() -> dict[str, str]:
    """The variables with which gloo and NCCL choose the loopback interface; not those that the user has set."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: name for name in names for variable in wanted if variable not in os.environ}


@contextmanager
def nccl_errors_raised_here() -> Iterator[None]:
    """NCCL groups made inside do not end the process by themselves when an operation fails or is aborted: every rank
    is to end with a message that names the cause, and may go on with something else.

    A process's first group would end it eight minutes after an operation of any group of the job has failed, and make
    it wait that long where it ends by itself. Dumps of torch's flight recorder stay as they are if the user has set
    something about them.
    """
    dumps = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    own = dumps if not any(name in os.environ for name in dumps) else {}
    with _environment(**_OURS, **own):
        yield


_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # Messages of a pair that is connected early are one after the other; that is what a pair is for.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


def refuse_blocking_waits() -> None:
    """Where waits block the host, torch does not look whether transfers end, and nobody would learn that one failed."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        value = os.environ.get(name, "0")
        if value.lower() not in ("", "0", "n", "no", "false"):
            raise ValueError(
                f"on GPUs the device waits for transfers, not the host, and torch must look whether they end, got "
                f"{name}={value}; unset it"
            )


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets these variables, and puts back what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_thread(function: Callable[[], object], device: torch.device, name: str) -> threading.Thread:
    """Runs the function in a thread whose current device is this rank's.

    A new thread's is the first GPU. Whatever asks CUDA for something there, even an event of another device, makes a
    context on it: half a gigabyte of each rank on the GPU of rank 0.

    Args:
        function: runs to its end or for ever; the thread is a daemon, and the process may end before it.
        device: of this rank.
        name: shown by debuggers.
    """

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        function()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
