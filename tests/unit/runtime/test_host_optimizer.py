"""What an optimizer with its state on the host refuses. tests/gpu/test_host_optimizer.py has what it computes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from terapipe import Layout
from terapipe.runtime.host_optimizer import HostOptimizer, is_torchao_class
from tests.support.models import mesh_of
from tests.support.ranks import Ranks


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs parameters on a GPU, got some on cpu, .*take AdamW itself"):
        HostOptimizer(nn.Linear(2, 2).parameters(), lr=0.1)


def of_shards() -> str:
    mesh = mesh_of(Layout(1, 1, 2))["tp"]
    shard = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    assert isinstance(shard, DTensor)
    with pytest.raises(ValueError, match=r"needs whole parameters, got shards; take tp=1 and shard=False") as error:
        HostOptimizer([{"params": [shard]}], lr=0.1)
    return str(error.value)


def test_shards_are_refused(ranks: Callable[[int], Ranks]) -> None:
    assert all(ranks(2)(of_shards))


def test_torchaos_class_is_told_by_its_name() -> None:
    optim = pytest.importorskip("torchao.optim")
    assert is_torchao_class(optim.CPUOffloadOptimizer)
    assert is_torchao_class(optim.CPUOffloadOptimizer, itself=True)
    mine = type("Mine", (optim.CPUOffloadOptimizer,), {"__module__": __name__})
    assert is_torchao_class(mine)
    assert not is_torchao_class(mine, itself=True)
    assert not is_torchao_class(torch.optim.AdamW)
    assert not is_torchao_class(HostOptimizer)
    assert not is_torchao_class(None)
