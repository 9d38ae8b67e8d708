"""Bytes of tensors: each storage once, and what kernels need inside."""

import pytest
import torch

import terapipe
from terapipe import GPTConfig
from terapipe.planning.cost import StageSpec
from terapipe.planning.memory import ShapeMemory
from terapipe.runtime import MemoryCounter


def test_storages_are_counted_once_and_while_they_live() -> None:
    with MemoryCounter(torch.device("cpu")) as counter:
        x = torch.zeros(100)
        view = x[:10]
        y = x + 1
        assert counter.current == 800
        del x
        assert counter.current == 800, "a view keeps all of it"
        del view, y
    assert counter.current == 0
    assert counter.peak == 800


def test_what_attention_kernels_need_inside_counts() -> None:
    """Functions for fake tensors allocate the results only."""
    grad, q = (torch.empty(1, 128, 8, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k, lse = q.new_empty(1, 1024, 2, 64), grad.new_empty(1, 8, 128, dtype=torch.float32)
    state = torch.empty(2, dtype=torch.uint64, device="meta")
    returned, expanded, sums = (128 * 8 + 2 * 1024 * 2) * 64 * 2, 2 * 1024 * 8 * 64 * 2, 128 * 8 * 64 * 4
    with MemoryCounter(torch.device("meta")) as counter:
        torch.ops.aten._flash_attention_backward(
            grad, q, k, k, q, lse, None, None, 128, 1024, 0.0, True, state, state[0], window_size_right=0
        )
    assert counter.peak == returned + expanded + sums + state.nbytes


def test_the_cpus_kernel_stands_for_the_gpus() -> None:
    """Where torch has no CUDA, a plan for GPUs is run on fake tensors of the CPU."""
    config = GPTConfig(layers=2, hidden=512, heads=8, kv_heads=1, vocab=64, max_seq_len=8192)
    result = terapipe.plan(config, "dgx-h100:1", batch_size=1, seq_len=8192, pp=1, dp=1, tp=1, num_slices=16)
    found = terapipe.dry_run(config, result)
    assert found.predicted is not None
    assert found.peak == pytest.approx(found.predicted, rel=0.06)
    memory = result.memory
    assert isinstance(memory, ShapeMemory)
    inside = float(memory.workspace(StageSpec(2), 1, 512, 7680)[1]) + memory.blas
    assert inside > 0.15 * found.peak, "which was missing"
