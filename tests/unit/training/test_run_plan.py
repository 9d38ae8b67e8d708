"""The plan of a run: from a file, from a profile, or of equal slices."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from examples import own_model
from terapipe import Plan, api
from terapipe.planning.layout import Layout
from terapipe.runtime.comm.environment import local_device
from terapipe.runtime.comm.transport import Transport
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.training import run_plan
from terapipe.training.config import RunConfig, parse
from terapipe.training.model import RunModel, make_model
from terapipe.training.run_plan import from_file, ranks_wanted
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run


def test_train_takes_the_layout_of_a_saved_plan(tmp_path: Path) -> None:
    """It took the plan's ranks, and data and tensor from elsewhere."""
    file = tmp_path / "plan.json"
    plan = Plan.uniform(batch_size=1, seq_len=32, num_slices=2, boundaries=(0, 1, 2))
    file.write_text(PlanResult.of_plan(plan, Layout(2, 2, 2)).to_json())
    text = f'[model]\npreset="gpt-tiny"\n[data]\ntrain="x"\nseq_len=32\nbatch_size=2\n[plan]\nfile="{file}"'
    config = parse(text)
    assert ranks_wanted(config.plan) == 8
    found = from_file(config, 8)
    assert found is not None
    assert found.layout == Layout(2, 2, 2)
    with pytest.raises(ValueError, match=r"is for tp 2, plan.tp says 4"):
        ranks_wanted(parse(text, ["plan.tp=4"]).plan)
    with pytest.raises(ValueError, match=r"plan.order would have no effect beside plan.file"):
        ranks_wanted(parse(text, ["plan.order=gpipe"]).plan)
    with pytest.raises(ValueError, match="8 processes; there are 4"):
        from_file(config, 4)


class AskedError(Exception):
    """What the search was asked for."""


def request_of(config: RunConfig, made: RunModel, monkeypatch: pytest.MonkeyPatch) -> Request:
    def choose(source: object, request: Request, progress: object) -> None:
        raise AskedError(request)

    monkeypatch.setattr(api, "choose", choose)
    monkeypatch.setattr(api, "source_of", lambda *_: None)
    with pytest.raises(AskedError) as found:
        run_plan.from_profile(config, made, None, 12)  # type: ignore[arg-type]
    request: Request = found.value.args[0]
    return request


def test_the_search_knows_what_the_model_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search chose recomputation and slices that the model then refused; and slices that six devices cannot share
    out, so that they did not."""
    config = short_run(tmp_path, PRESET, "data.seq_len=2041", "plan.tp=6", "data.batch_size=4")
    able = make_model(config.model, config.data, 257)
    picky = replace(able, min_slice=2, recompute_modes=("none",))
    assert request_of(config, able, monkeypatch).recompute is None
    assert request_of(config, able, monkeypatch).tile_for(tile=8, tp=6) == 24
    one = replace(config, plan=replace(config.plan, tp=1))
    assert request_of(one, able, monkeypatch).tile_for(tile=8, tp=1) == 8
    assert request_of(one, picky, monkeypatch).tile_for(tile=8, tp=1) == 16, "the last slice had one token"
    assert request_of(one, picky, monkeypatch).recompute_modes == ("none",)
    even = replace(one, plan=replace(one.plan, num_slices=255))
    assert min(run_plan.equal_slices(even, picky, 2).plan.lengths[0]) >= 2


def test_the_search_knows_what_compiled_layers_cannot_defer(tmp_path: Path) -> None:
    """Orders that defer weight gradients were chosen for layers whose compiled code gives them with the backward."""
    config = short_run(tmp_path, PRESET, "model.compile=true")
    own = make_model(config.model, config.data, 257)
    other = replace(own, model=own_model.Decoder())
    eager = replace(config, model=replace(config.model, compile=False))
    spec = [run_plan._spec(c, m) for c, m in ((config, own), (config, other), (eager, other))]
    assert [s is not None and s.fused_grads for s in spec] == [True, False, True]


def sizes_measured(config: RunConfig) -> set[int]:
    made, world = make_model(config.model, config.data, 257), Transport.join(local_device(), timeout=300.0)
    return {sample.size for sample in run_plan.measure(config, made, world).samples}


def test_merging_sequences_is_measured(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Microbatches of one sequence were measured only, so merging some never looked worth it."""
    config = short_run(tmp_path, PRESET, "data.seq_len=64", "data.batch_size=4", "plan.seconds=0.01")
    assert ranks(1)(sizes_measured, config) == [{1, 4}]


def test_a_number_of_slices_and_their_lengths_are_two_keys(tmp_path: Path) -> None:
    """``slices = [2048]`` was 2,048 slices, ``slices = [1024, 1024]`` two, and ``slices = 0`` a division by zero."""
    made = make_model(short_run(tmp_path, PRESET).model, short_run(tmp_path, PRESET).data, 257)
    for change, lengths in (("num_slices=2", (8, 8)), ("slice_lengths=[16]", (16,)), ("slice_lengths=[9,7]", (9, 7))):
        assert run_plan.equal_slices(short_run(tmp_path, PRESET, f"plan.{change}"), made, 1).plan.lengths[0] == lengths
    run_plan.equal_slices(short_run(tmp_path, PRESET, "plan.num_slices=0"), made, 1)  # as many as seem right
    with pytest.raises(ValueError, match=r"\[plan\] slice_lengths\[0\] must be a whole number of at least 1, got 0"):
        short_run(tmp_path, PRESET, "plan.slice_lengths=0")
    with pytest.raises(ValueError, match=r"\[plan\] num_slices is a number .* give one"):
        short_run(tmp_path, PRESET, "plan.num_slices=2", "plan.slice_lengths=[8,8]")
