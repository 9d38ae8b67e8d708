"""Compiled layers give the gradients of the plain model, and are not compiled anew for every slice."""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import own_model
from terapipe import Layout, Pipeline, Plan
from terapipe.modeling.compiling import compile_layers
from terapipe.planning.recompute import Recompute
from tests.support.models import TINY, gradients, make_batch, make_model, mesh_of, plain, variant, worst_error
from tests.support.ranks import Ranks

# Of torch's own, some of which its compiler would hide, did an error not come first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:torch"),
]

ODD = ((9, 1, 12, 7), (20, 9))
PLAN = Plan((1, 1), ODD, (0, 2, 4), "terapipe", 2)
TRACED = (
    "aot_eager"  # forwards and backwards are traced and cut as ever, but no C++ is made of them: that takes minutes
)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def stepped(model: Any, plan: Plan, backend: str, layout: Layout | None = None) -> tuple[float, dict[str, Tensor]]:
    """Twice, the second time with nothing left to compile."""
    mesh = None if layout is None else mesh_of(layout)
    pipe = Pipeline(model, plan, mesh=mesh, shard=layout is not None, timeout=300.0)
    for stage in pipe.stages.values():
        compile_layers(stage, backend=backend)
    ids, labels = make_batch(TINY, plan.batch_size * (1 if layout is None else layout.dp), plan.seq_len, ignored=True)
    rows = slice(pipe.dp_rank * plan.batch_size, (pipe.dp_rank + 1) * plan.batch_size)
    pipe.step(ids[rows], labels[rows])
    pipe.zero_grad()
    before = graphs()
    loss = pipe.step(ids[rows], labels[rows])
    assert before == graphs() > 0
    return loss.item(), gradients(pipe)


def truth(rows: int = 2) -> tuple[float, dict[str, Tensor]]:
    return plain(TINY, *make_batch(TINY, rows, 29, ignored=True), torch.float64)


@pytest.mark.exhaustive_ids("^terapipe-deferred")
@pytest.mark.parametrize(
    ("order", "recompute"),
    [
        ("terapipe-deferred", False),
        pytest.param("terapipe", False, marks=pytest.mark.exhaustive),
        pytest.param("interleaved", True, marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_are_the_plain_models(order: str, recompute: bool) -> None:
    plan = Plan((1, 1), ODD, (0, 2, 4), order, 2, recompute)
    assert worst_error(truth(), [stepped(make_model(TINY), plan, TRACED)], TINY) < 1e-12


def test_layers_computed_again() -> None:
    plan = replace(PLAN, recompute="block")
    assert worst_error(truth(), [stepped(make_model(TINY), plan, TRACED)], TINY) < 1e-12


def sharded(layout: Layout, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    return stepped(make_model(TINY), plan, TRACED, layout)


@pytest.mark.exhaustive
def test_replicas_that_share_their_state(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(2)(sharded, Layout(2, 1, 1), Plan((1, 1), ODD, (0, 4)))
    assert worst_error(truth(4), found, TINY) < 1e-12


@pytest.mark.exhaustive
def test_as_many_graphs_for_many_lengths_and_layers() -> None:
    """A layer is cut at attention and at its linear layers; one token is a case of its own, and so are no gradients."""
    config = variant(layers=9)
    stage = make_model(config).stage(0, 9, torch.device("cpu"))
    compile_layers(stage, backend=TRACED)
    torch._dynamo.reset()
    before = graphs()
    for grad in (True, False):
        cache, start = stage.make_cache(1, 60), 0
        for length in (5, 1, 17, 2, 3, 8, 4, 11, 9):
            cache.begin(start, length)
            with torch.set_grad_enabled(grad):
                stage(torch.zeros(1, length, dtype=torch.int64), cache)
            start += length
    assert graphs() - before <= 5 * 2 * 2


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")
def test_made_into_machine_code() -> None:
    found = stepped(make_model(variant(layers=2)), Plan((1, 1), ODD, (0, 1, 2), "terapipe", 2), "inductor")
    wanted = plain(variant(layers=2), *make_batch(TINY, 2, 29, ignored=True), torch.float64)
    assert worst_error(wanted, [found], TINY) < 1e-10


# Other models


@pytest.mark.exhaustive
def test_a_model_of_ones_own() -> None:
    """Its recurrence runs token by token, and is compiled for each length."""
    plan = Plan((1, 1), ((9, 9, 11), (20, 9)), (0, 2, 4), "terapipe", 2)
    ids, labels = make_batch(TINY, 2, 29, ignored=False)
    pipe = Pipeline(own_model.Decoder().double(), plan)
    wanted = pipe.step(ids, labels).item(), gradients(pipe)
    found = Pipeline(own_model.Decoder().double(), plan)
    for stage in found.stages.values():
        compile_layers(stage, backend=TRACED)
    loss = found.step(ids, labels).item()
    assert worst_error(wanted, [(loss, gradients(found))], variant(tied=False)) < 1e-12


def decoder(name: str) -> Any:
    from terapipe.hf import Decoder
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Decoder(small_model(small_config(name)))


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param("llama", "none", marks=pytest.mark.exhaustive),
        pytest.param("llama", "block", marks=pytest.mark.exhaustive),
        pytest.param("llama4_text", "none", marks=pytest.mark.exhaustive),  # asks the cache for the context
        pytest.param("gpt2", "none", marks=pytest.mark.exhaustive),
    ],
)
def test_a_hugging_face_decoder(name: str, recompute: Recompute) -> None:
    made = decoder(name)
    ids, labels = make_batch(TINY, 2, 29, ignored=True)
    plan = Plan((1, 1), ODD, (0, 1, made.num_layers), "terapipe", 2)
    pipe = Pipeline(made, plan)
    wanted = pipe.step(ids, labels).item(), gradients(pipe)
    found = stepped(decoder(name), replace(plan, recompute=recompute), TRACED)
    assert found[1].keys() == wanted[1].keys()
    largest = max(g.abs().max().item() for g in wanted[1].values())
    for parameter, gradient in wanted[1].items():
        scale = max(gradient.abs().max().item(), 1e-3 * largest)
        assert (found[1][parameter] - gradient).abs().max() < 1e-10 * scale


def test_a_model_cut_through_its_own_cache_is_refused() -> None:
    from terapipe.hf import UnsupportedModelError

    stage = decoder("bloom").stage(1, 4, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="layers of BloomForCausalLM cannot be compiled"):
        compile_layers(stage, backend=TRACED)


def split(layout: Layout) -> str:
    pipe = Pipeline(make_model(TINY), Plan((1,), ((29,),), (0, 4)), mesh=mesh_of(layout))
    with pytest.raises(ValueError, match="cannot be compiled; take tp 1"):
        compile_layers(pipe.stages[0])
    return "refused"


def test_split_operators_are_refused(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(split, Layout(1, 1, 2)) == ["refused"] * 2


def test_the_compiler_is_not_loaded_before_it_is_asked_for() -> None:
    code = (
        "import sys, terapipe.modeling.compiling, terapipe.runtime.pipeline; sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_stage_says_that_compiled_layers_put_nothing_off() -> None:
    """Those of a GPT's attention, which stay outside, still do."""
    from terapipe.modeling.linear import plain_class
    from terapipe.modeling.stage import SlicedStage

    stage = make_model(TINY).stage(0, 4, torch.device("cpu"))
    sliced = SlicedStage(stage)
    assert sliced.defers_weight_grads
    assert not SlicedStage(stage, fused=False).defers_weight_grads
    compile_layers(stage, backend=TRACED)
    assert not sliced.defers_weight_grads
    assert not SlicedStage(stage).defers_weight_grads, "classes stay as they were compiled"
    block: Any = stage.blocks[0]
    linears = (block.attention.qkv, block.attention.out, block.up, block.down, stage.head)
    assert [type(module) is plain_class(module) for module in linears] == [False, False, True, True, False]
