"""Threads beside a rank's main one: they use the rank's own device, and the process may end without them."""

import threading
from collections.abc import Callable

import torch


def start_thread(function: Callable[[], object], device: torch.device, name: str) -> threading.Thread:
    """Runs the function in a thread whose current device is this rank's.

    A new thread's is the first GPU. Whatever asks CUDA for something there, even an event of another device, makes a
    context on it: half a gigabyte of each rank on the GPU of rank 0.
    """

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        function()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
