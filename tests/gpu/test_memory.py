"""The memory of pretend GPUs: what is counted, and what happens when there is no more."""

import gc

import pytest
import torch

from tests.pretend import cuda

MIB = 1 << 20


def used(device: int = 0) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device)


def test_bytes_are_counted_for_each_device() -> None:
    before = [used(i) for i in range(2)]
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    assert [used(i) - b for i, b in enumerate(before)] == [0, MIB]
    y = x + x  # made by a kernel of the CPU
    assert used(1) - before[1] == 2 * MIB
    view = y[:10]
    del x, y
    assert used(1) - before[1] == MIB, "a view keeps all of it"
    del view
    assert used(1) == before[1]


def test_peaks() -> None:
    before = used()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    del x
    y = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_allocated() - before == 3 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - before == MIB
    assert torch.accelerator.memory_allocated() == used()
    del y


def test_a_full_device() -> None:
    free, total = torch.cuda.mem_get_info()
    assert total == 80 << 30
    assert free <= total
    with cuda.memory(used() + MIB):
        torch.empty(MIB // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has"):
            torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        big = torch.empty(3 * MIB // 4, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            big + big
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:1")
        torch.empty(2 * MIB, dtype=torch.uint8)
    torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
