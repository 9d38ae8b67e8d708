"""What once went wrong in planning, scheduling and the command line: one short story each."""

import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import terapipe
from terapipe import PRESETS, Plan, schedule, validate
from terapipe.cli import main
from terapipe.cli.profile import _warn_if_unreliable
from terapipe.launch.job import Launch
from terapipe.launch.job import instructions as told_lines
from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import StageSpec
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.profile import KINDS, FittedCost
from terapipe.reporting.plans import reasons
from terapipe.scheduling import validation as proof
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.search.saved import SavedPlan
from terapipe.search.source import ClusterSource, ProfileSource
from terapipe.training.config import parse
from terapipe.training.run_plan import from_file, ranks_wanted
from tests.unit.planning.test_profile import made


def lines_per_action(plan: Plan) -> float:
    """How many lines of Python ``validate`` runs, over the number of actions: its work without a clock."""
    made, lines, before = schedule(plan), 0, sys.gettrace()

    def watch(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return watch

    sys.settrace(watch)
    try:
        validate(made)
    finally:
        sys.settrace(before)
    return lines / sum(map(len, made.ranks))


def test_validating_takes_as_long_per_action_however_large_the_plan() -> None:
    """Ranks that had stopped were woken many times over: 36, 94, 217 us per action with 8, 16, 32 microbatches."""
    cut = {"seq_len": 64, "num_slices": 8, "boundaries": range(9), "order": "terapipe-1f1b"}
    small, large = (lines_per_action(Plan.uniform(batch_size=batch, **cut)) for batch in (4, 32))
    assert large < 1.2 * small


@pytest.mark.parametrize(("order", "chunks"), [("terapipe-1f1b", 1), ("terapipe-v", 2), ("interleaved", 2)])
def test_plans_that_differ_in_lengths_only_are_proved_once(
    order: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new batch shape was validated again, on every rank."""
    proof._of_shape.cache_clear()
    validated = []
    check = proof.validate_numbers
    monkeypatch.setattr(proof, "validate_numbers", lambda *lists: validated.append(lists) or check(*lists))
    plan = Plan((1, 2), ((4, 3, 2), (5, 4)), tuple(range(2 * chunks + 1)), order, chunks)
    other = replace(plan, sizes=(3, 1), lengths=((1, 17, 2), (1, 19)))
    for each in (plan, other):
        assert proof.validated_actions(each, 1) == schedule(each).ranks[1]
    assert len(validated) == 1


def test_a_profile_in_bfloat16_is_planned_with_its_own_bytes() -> None:
    """Messages, sums over replicas, weights and activations of every profile were taken to be float32."""
    wide = made()
    half = replace(wide, machine={**wide.machine, "dtype": "bfloat16"})
    two = Layout(dp=2)
    costs = [FittedCost(profile, layout=two) for profile in (wide, half)]
    message = [cost.transfer(0, 1, 2, 512) for cost in costs]
    assert message[1] == pytest.approx(costs[0].transfer(0, 1, 1, 512))
    assert costs[1]._all_reduce_gradients(1000) == pytest.approx(costs[0]._all_reduce_gradients(1000))  # in float32
    float32, bfloat16 = (ProfileSource(profile, 2).memory(Layout()) for profile in (wide, half))
    cached = float32.kv_cache(StageSpec(3), 1, 512)
    assert bfloat16.kv_cache(StageSpec(3), 1, 512) == cached * 3 / 4  # gradients are summed in float32
    # Weights of 2 bytes and 12 of state; 4 and 8. Gradients are sums in float32, and then rounded.
    assert bfloat16.model_state(StageSpec(3)) == float32.model_state(StageSpec(3)) * 14 / 12
    held, rounded = float32.gradients(StageSpec(3)), bfloat16.gradients(StageSpec(3))
    assert held.before == held.during == held.after == rounded.during
    assert (rounded.before, rounded.after) == (0, rounded.during / 2)
    with pytest.raises(ValueError, match="a profile is of one of"):
        replace(wide, machine={"dtype": "int3"})


def test_a_pipeline_of_one_rank_sends_nothing() -> None:
    """The formula charged two transfers per slice however few ranks there were, so that search stopped too early."""
    source = ClusterSource(PRESETS["gpt3-1b"], Cluster("p3.16xlarge:2"))  # transfers there hold their sender up
    request = Request(batch_size=1, seq_len=2048)

    def sent(pipe: int) -> float:
        bench = PlanEvaluator(source, request, Layout(pp=pipe), "none")
        part, cost = bench.slowest_stage, bench.cost
        return float(bench.seconds(1, 512, 0) - cost.forward(part, 1, 512, 0) - cost.backward(part, 1, 512, 0))

    assert sent(1) == pytest.approx(0.0, abs=1e-12)
    assert sent(3) == pytest.approx(2 * sent(2))


def test_a_described_cluster_exchanges_a_tied_weight_too() -> None:
    """Measured costs had the exchange of a tied weight's gradient, described ones left it out."""
    tied = PRESETS["gpt3-1b"]
    host = Cluster("dgx-a100:2")
    layout = Layout(pp=2, tp=8)  # one stage on each host
    costs = [AnalyticCost(config, host, layout) for config in (tied, replace(tied, tied=False))]
    added = costs[0].per_step([StageSpec(12, first=True)]) - costs[1].per_step([StageSpec(12, first=True)])
    assert added == pytest.approx(host.host.inter_node.seconds(tied.vocab * tied.hidden * 2))
    assert costs[0].per_step([StageSpec(24)]) == costs[1].per_step([StageSpec(24)])


SHAPE = [
    "--model",
    "layers=8,hidden=1024,heads=16",
    "--cluster",
    "dgx-a100:1",
    "--batch-size",
    "4",
    "--seq-len",
    "2048",
]
EIGHT = ["--dp", "2", "--pp", "2", "--tp", "2"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2, arguments
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_simulating_a_saved_plan_repeats_what_plan_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved plan forgot its layout, so 906 ms became 3.3 s."""
    monkeypatch.chdir(tmp_path)
    fixed = ["--order", "terapipe", "--num-slices", "4", "--recompute", "none"]
    planned = answer(capsys, "plan", *SHAPE, *EIGHT, *fixed, "--shard", "--memory", "40GB", "--save", "plan.json")
    again = answer(capsys, "simulate", "plan.json")
    for key in ("step_time", "layout", "peak_bytes", "fits", "lengths"):
        assert again[key] == planned[key]
    assert Plan.from_json(Path("plan.json").read_text()) == SavedPlan.from_json(Path("plan.json").read_text()).plan
    assert "saved with the plan" in refused(capsys, "simulate", "plan.json", "--model", "gpt-tiny")
    assert "is for tp 2, got --tp 4" in refused(capsys, "simulate", "plan.json", "--tp", "4")
    assert not answer(capsys, "simulate", "plan.json", "--memory", "1MiB")["fits"]

    Path("profile.json").write_text(made().to_json())
    by_profile = ["--profile", "profile.json", "--batch-size", "1", "--seq-len", "2048"]
    planned = answer(capsys, "plan", *by_profile, *fixed, "--save", "other.json")
    assert answer(capsys, "simulate", "other.json")["step_time"] == planned["step_time"]
    Path("profile.json").write_text(replace(made(), optimizer=(1.0,)).to_json())
    assert "has changed since" in refused(capsys, "simulate", "other.json")
    Path("profile.json").unlink()
    assert "give the profile" in refused(capsys, "simulate", "other.json")


def test_a_bare_plan_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was simulated as one replica without tensor parallelism, and options about memory were dropped."""
    bare = tmp_path / "plan.json"
    bare.write_text(Plan.uniform(batch_size=2, seq_len=4, num_slices=2, boundaries=(0, 4, 8)).to_json())
    assert "without its layout; give --dp and --tp" in refused(capsys, "simulate", str(bare), *SHAPE[:4])
    layout = ["--dp", "2", "--tp", "2"]
    assert "the costs of this plan are not in the file" in refused(capsys, "simulate", str(bare), *layout)
    whole = answer(capsys, "simulate", str(bare), *SHAPE[:4], *layout)
    shared = answer(capsys, "simulate", str(bare), *SHAPE[:4], *layout, "--shard", "--memory", "1MiB")
    assert whole["fits"]
    assert not shared["fits"]
    assert shared["peak_bytes"] != whole["peak_bytes"]
    said = refused(capsys, "simulate", str(bare), *SHAPE[:4], *layout, "--tile", "2", "--chunks", "1")
    assert "--chunks and --tile would have no effect" in said


def test_train_takes_the_layout_of_a_saved_plan(tmp_path: Path) -> None:
    """It took the plan's ranks, and data and tensor from elsewhere."""
    file = tmp_path / "plan.json"
    plan = Plan.uniform(batch_size=1, seq_len=32, num_slices=2, boundaries=(0, 1, 2))
    file.write_text(SavedPlan(plan, Layout(2, 2, 2)).to_json())
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


def test_a_cost_table_refuses_what_it_would_ignore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--num-slices, --chunks, --memory had no effect, and a default tile refused sequences below 8 tokens."""
    table = tmp_path / "table.json"
    rows = [(n, c, 1.0 + 0.1 * n * n + 0.2 * c) for c in range(4) for n in range(1, 5 - c)]
    table.write_text(json.dumps([{"size": 1, "length": n, "context": c, "seconds": s} for n, c, s in rows]))
    common = ["plan", "--cost-table", str(table), "--batch-size", "2", "--seq-len", "4", "--pp", "2"]
    assert answer(capsys, *common)["step_time"] > 0
    assert answer(capsys, *common, "--num-slices", "4")["lengths"] == [[1, 1, 1, 1]] * 2
    assert answer(capsys, *common, "--slice-lengths", "1,2,1")["lengths"] == [[1, 2, 1]] * 2
    for option in ("--chunks=1", "--recompute=full", "--distinct=1", "--memory=1GiB", "--shard", "--tile=1",
                   "--sensitivity", "--layers-only", "--model=gpt-tiny"):  # fmt: skip
        assert "would have no effect" in refused(capsys, *common, option)


def test_options_of_plan_count_or_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json left --sensitivity out; --num-slices 2048 was 2,048 slices, --num-slices 1024,1024 two lengths."""
    plan = ["plan", *SHAPE, *EIGHT, "--order", "gpipe", "--microbatch-size", "1", "--recompute", "none"]
    assert len(answer(capsys, *plan, "--sensitivity")["sensitivity"]) == 30
    profile = tmp_path / "profile.json"
    profile.write_text(made().to_json())
    measured = ["plan", "--profile", str(profile), "--batch-size", "1", "--seq-len", "2048"]
    assert "would have no effect" in refused(capsys, *measured, "--sensitivity")
    assert "would have no effect" in refused(capsys, *measured, "--layers-only")
    sliced = ["plan", *SHAPE, *EIGHT, "--order", "terapipe"]
    assert "--slice-lengths" in refused(capsys, *sliced, "--num-slices", "1024,1024")
    assert "would have no effect" in refused(capsys, *sliced, "--num-slices", "2", "--slice-lengths", "1024,1024")
    assert "sum to 2048" not in refused(capsys, *sliced, "--slice-lengths", "2048,1")
    assert answer(capsys, *sliced, "--slice-lengths", "2048")["lengths"][0] == [2048]


@pytest.mark.parametrize("verb", ["compare", "simulate"])
def test_a_missing_extra_for_png_is_one_message_before_all_work(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, at the very end."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert "in a clone of terapipe, pip install '.[png]'" in refused(
        capsys, verb, *SHAPE, "--png", str(tmp_path / "x.png")
    )


def test_whole_sequences_are_not_called_a_negative_per_cent_faster() -> None:
    """A runner-up may be a little faster where slicing is not worth it: "-0.4% faster than the next best order"."""
    source = ClusterSource(replace(PRESETS["gpt3-1b"], layers=2), Cluster("dgx-a100:1"))
    bench = PlanEvaluator(source, Request(batch_size=1, seq_len=64, tile=8), Layout(pp=2), "none")
    whole = bench.evaluate(bench.plan("gpipe", 1, (64,)))
    sliced = replace(bench.evaluate(bench.plan("terapipe", 1, (32, 32))), step_time=0.996 * whole.step_time)
    said = " ".join(reasons(PlanResult(whole, (sliced,), bench.request)))
    assert "terapipe would be 0.4% faster" in said
    assert "-0.4%" not in said


def test_torchrun_can_start_terapipes_own_trainer() -> None:
    """--script "-m terapipe train run.toml" became the name of a file."""
    launch = Launch(1, 2, 2, script="-m terapipe train 'my run.toml'")
    assert launch.torchrun_lines()[0].endswith("--nproc-per-node 2 -m terapipe train 'my run.toml'")
    assert "plan.file" in told_lines(launch, Layout(pp=2), Path("plan.json"))[-1]
    with pytest.raises(ValueError, match="quoted as in a shell"):
        Launch(1, 2, 2, script="'open")


def test_a_profile_stops_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time was looked at after whole rounds only: a slow model was measured many times as long as asked."""
    import torch

    from terapipe.runtime import profiler
    from tests.support.models import TINY, make_model

    clock = count()  # every look at it is a second later
    monkeypatch.setattr(profiler.time, "monotonic", lambda: float(next(clock)))
    measured = []
    slices = profiler.Profiler._slices
    monkeypatch.setattr(profiler.Profiler, "_slices", lambda self, p: measured.append(p) or slices(self, p))
    made = profiler.Profiler(make_model(TINY, torch.float32), layers=2, seq_len=32)
    profile = made.run(seconds=5.0)
    assert len(measured) < 8 < len(made.points)
    lengths = [s.length for s in profile.samples if s.kind == "forward" and not s.context]
    assert (min(lengths), max(lengths)) == (4, 32)
    assert any(s.context for s in profile.samples)
    assert {s.kind for s in profile.samples} == set(KINDS)
    assert FittedCost(profile).forward(StageSpec(2), 1, 12, 8) > 0


def test_a_profile_that_is_far_off_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of 40 % on held-out points was printed like any other figure."""
    good = made()
    good = replace(good, machine={**good.machine, "points": 1})
    noisy = [s._replace(seconds=tuple(1.4 * t for t in s.seconds)) if s.held_out else s for s in good.samples]
    _warn_if_unreliable(good)
    assert capsys.readouterr().out == ""
    _warn_if_unreliable(replace(good, samples=tuple(noisy)))
    assert "Measure again on a quiet machine" in capsys.readouterr().out


def test_slices_do_not_outrun_the_host_that_issues_them() -> None:
    """An eager layer takes its host 0.35 ms forward and 0.4 ms backward for every slice; 0.15 and 0.3 were counted, so
    that plans had slices so short that the GPU would have run dry."""
    plan = Plan((1,), ((16,) * 128,), tuple(range(0, 25, 3)))
    found = terapipe.estimate(plan, "dgx-h100:1", model="gpt3-1b")
    assert found.step_time > 128 * 3 * (0.35e-3 + 0.40e-3)
    assert found.price_of_host > 1.2
    assert "longer than devices alone would take" in str(found)
    whole = terapipe.estimate(Plan((1,), ((2048,),), plan.boundaries), "dgx-h100:1", model="gpt3-1b")
    assert "devices alone" not in str(whole)
