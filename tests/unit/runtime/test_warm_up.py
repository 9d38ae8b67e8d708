"""A warm-up runs what a step runs, and leaves no trace."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import Layout, Pipeline, Plan
from terapipe.modeling.compiling import compile_layers
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of
from tests.support.ranks import Ranks

PLAN = Plan((1,), ((9, 1, 6),), (0, 2, 4))
IDS, LABELS = make_batch(TINY, 1, 16, ignored=False)


def traces(dtype: torch.dtype, shard: bool) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor], bool]:
    """Names of parameters whose hooks were called, gradients after a step and after a warm-up, and whether the random
    generator is as it was. Stages draw."""
    mesh = mesh_of(Layout(2, 2, 1)) if shard else None
    pipe = Pipeline(make_model(TINY, dtype), PLAN, mesh=mesh, shard=shard)
    for stage in pipe.stages.values():
        stage.register_forward_hook(lambda *_: torch.rand(1) and None)
    called: list[str] = []
    for name, p in pipe.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    pipe.step(IDS, LABELS)
    called.clear()
    before, state = gradients(pipe), torch.get_rng_state()
    pipe.warm_up()
    return called, before, gradients(pipe), torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("dtype", "shard"), [(torch.float64, False), (torch.bfloat16, False), (torch.float64, True)])
def test_nothing_is_left_of_it(ranks: Callable[[int], Ranks], dtype: torch.dtype, shard: bool) -> None:
    for called, before, after, same in ranks(4 if shard else 2)(traces, dtype, shard):
        assert called == []
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert same


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compiled() -> tuple[int, int]:
    pipe = Pipeline(make_model(TINY), PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        for stage in pipe.stages.values():
            compile_layers(stage, backend="aot_eager")
        before: Any = graphs()
        pipe.warm_up()
        warm = graphs()
        pipe.step(IDS, LABELS)
    return warm - before, graphs() - warm


@pytest.mark.gpu_seldom
@pytest.mark.exhaustive
def test_all_ranks_compile_at_the_same_time(ranks: Callable[[int], Ranks]) -> None:
    """In a step, each would begin when the one before is done, and the last wait for all others to compile."""
    for in_warm_up, in_step in ranks(2)(compiled):
        assert in_warm_up > 0
        assert in_step == 0
