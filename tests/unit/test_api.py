"""The planner from Python: profile, plan, compare, estimate, simulate."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import terapipe
import terapipe as tp
from terapipe import Plan
from tests.support.models import TINY, gradients, make_batch, make_model, plain, worst_error
from tests.support.ranks import Ranks
from tests.unit.planning.test_profile import made

CLUSTER = tp.Cluster("p3.16xlarge:1")


def test_a_cluster_is_planned_for() -> None:
    result = tp.plan("gpt3-1b", "p3.16xlarge:1", batch_size=8, seq_len=2048, pp=4, tp=2, dp=1)
    assert result.layout == tp.Layout(1, 4, 2)
    assert result.plan.batch_size == 8
    assert result.simulate().makespan < result.step_time
    other = tp.simulate(result.plan, CLUSTER, model="gpt3-1b", layout=result.layout)
    assert tp.simulate(result).makespan == other.makespan
    again = tp.estimate(result.plan, CLUSTER, model=tp.PRESETS["gpt3-1b"], layout=result.layout)
    assert again.step_time == pytest.approx(result.step_time, rel=1e-12)
    said = str(result)
    assert "per step" in said
    assert "Runners-up" in said


def test_a_saved_plan_brings_its_costs(tmp_path: Path) -> None:
    result = tp.plan("gpt3-1b", CLUSTER, batch_size=4, seq_len=2048, pp=8, tp=1, dp=1)
    result.save(tmp_path / "plan.json")
    assert tp.Plan.from_json((tmp_path / "plan.json").read_text()) == result.plan
    profile = tmp_path / "profile.json"
    measured = made()
    measured.save(profile)
    assert tp.Profile.load(profile) == measured


def test_a_model_brings_its_limits() -> None:
    """No slice shorter than the model takes, the last one included; no recomputation where it has none."""
    spec = tp.ModelSpec(tp.PRESETS["gpt-small"], min_slice=24, recompute_modes=("none",))
    result = tp.plan(spec, CLUSTER, batch_size=1, seq_len=2048 + 16, dp=1, pp=2, tp=1, order="terapipe")
    assert min(result.plan.lengths[0]) >= 24
    with pytest.raises(ValueError, match="the model supports recomputation none, got full"):
        tp.plan(spec, CLUSTER, batch_size=1, seq_len=2048, recompute=True)
    with pytest.raises(ValueError, match="slices of at least 24 tokens"):
        tp.plan(spec, CLUSTER, batch_size=1, seq_len=2048, slice_lengths=[2040, 8])


def test_the_tile_is_the_devices() -> None:
    """An A100 works on tiles of 128 tokens, and sequence parallelism needs multiples of tp."""
    long = tp.plan("gpt3-1b", "dgx-a100:1", batch_size=1, seq_len=8192, dp=1, pp=8, tp=1, order="terapipe")
    assert all(n % 128 == 0 for n in long.plan.lengths[0])
    odd = tp.plan("gpt3-1b", CLUSTER, batch_size=1, seq_len=2048, dp=1, pp=4, tp=2, order="terapipe", tile=3)
    assert all(n % 6 == 0 for n in odd.plan.lengths[0][:-1])


def test_the_memory_budget_is_text_or_a_number() -> None:
    given = {"batch_size": 8, "seq_len": 2048, "dp": 1, "pp": 4, "tp": 2, "order": "terapipe"}
    free = tp.plan("gpt3-1b", CLUSTER, **given)  # type: ignore[arg-type]
    tight = tp.plan("gpt3-1b", CLUSTER, memory=free.peak_bytes - 1, **given)  # type: ignore[arg-type]
    assert tight.peak_bytes < free.peak_bytes
    with pytest.raises(ValueError, match="reads like 16GiB"):
        tp.plan("gpt3-1b", CLUSTER, memory="much", **given)  # type: ignore[arg-type]


def test_data_parallel_is_called_so() -> None:
    rows = list(tp.compare("gpt-small", CLUSTER, batch_size=8, seq_len=1024, dp=8, pp=1, tp=1))
    assert rows[0].title == "data parallel"
    result = tp.plan("gpt-small", CLUSTER, batch_size=8, seq_len=1024, dp=8, pp=1, tp=1, shard=False)
    assert str(result).startswith("data parallel on dp 8 x pp 1 x tp 1")


def test_a_profile_is_planned_with_its_own_ranks_and_dtype() -> None:
    profile = made()
    result = tp.plan(None, profile, batch_size=1, seq_len=2048)
    assert result.layout.devices == profile.ranks
    four = tp.plan(None, profile, batch_size=1, seq_len=2048, pp=2, tp=2)
    assert four.layout == tp.Layout(1, 2, 2)
    assert "tensor parallelism was not measured" in str(four)
    half = replace(profile, machine={**profile.machine, "dtype": "bfloat16"})
    assert tp.plan(None, half, batch_size=1, seq_len=2048).dtype == "bfloat16"
    with pytest.raises(ValueError, match="another model"):
        tp.plan("gpt3-1b", profile, batch_size=1, seq_len=2048)


def test_measured_costs_are_compared_in_the_layouts_of_their_ranks() -> None:
    """With two sequences on two ranks, replicas stand beside the pipelines."""
    profile = made()
    rows = {row.title: row for row in tp.compare(None, profile, batch_size=2, seq_len=2048)}
    assert rows["data parallel"].layout == tp.Layout(2, 1, 1)
    assert rows["1f1b"].layout == rows["terapipe-1f1b"].layout == tp.Layout(1, 2, 1)
    best = tp.plan(None, profile, batch_size=2, seq_len=2048)
    assert rows[best.estimate.title] == best.estimate


def test_what_costs_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="says nothing of the model"):
        tp.plan(None, CLUSTER, batch_size=1, seq_len=64)
    with pytest.raises(ValueError, match="costs are a Profile, a Cluster"):
        tp.plan("gpt-tiny", 3, batch_size=1, seq_len=64)  # type: ignore[arg-type]
    plan = tp.Plan.uniform(batch_size=1, seq_len=64, num_slices=2, boundaries=(0, 2, 4))
    with pytest.raises(ValueError, match="costs of this plan are not in the file"):
        tp.simulate(plan)


def measured() -> tuple[str, str]:
    """On every rank: a short profile, the plan made with it, and one step by that plan."""
    config = replace(TINY, max_seq_len=128)
    model = make_model(config, torch.float64)
    profile = tp.profile(model, seq_len=64, seconds=0.3)
    result = tp.plan(model, profile, batch_size=2, seq_len=64, dp=1, memory="1GiB")
    ids, labels = make_batch(config, 2, 64, ignored=True)
    pipe = tp.Pipeline(model, result.plan, timeout=300.0)
    loss = pipe.step(ids, labels).item()
    found = gradients(pipe)
    return result.plan.to_json(), (loss, found)  # type: ignore[return-value]


def test_from_profile_to_gradients_on_two_ranks(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(2)(measured)
    plans = {plan for plan, _ in answers}
    assert len(plans) == 1, "every rank must come to the same plan"
    config = replace(TINY, max_seq_len=128)
    wanted = plain(config, *make_batch(config, 2, 64, ignored=True), torch.float64)
    assert worst_error(wanted, [found for _, found in answers], config) < 1e-12


def profiled_layers(path: str) -> int:
    return tp.profile(path, seq_len=32, seconds=0.2).config.layers


def test_a_hugging_face_model_is_measured_as_it_is(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A profile of a folder was that of the small copy that slices are proved on."""
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = {"model_type": "llama", "num_hidden_layers": 7, "max_position_embeddings": 64, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ranks(1)(profiled_layers, str(tmp_path)) == [7]
    result = tp.plan(tmp_path, "p3.16xlarge:1", batch_size=1, seq_len=64, dp=1, pp=2, tp=1)
    assert result.plan.num_layers == 7


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


def test_long_sequences_have_no_more_parameters() -> None:
    """A million learned positions were counted for Llama: 77 GB on every device of the first stage, more than fits."""
    result = tp.plan("llama3-8b", "dgx-h100:8", batch_size=1, seq_len=1 << 20, dp=1, pp=8, tp=8, order="terapipe")
    assert result.model_config == tp.PRESETS["llama3-8b"]
    assert result.estimate.fits


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    options: dict[str, Any] = {"dp": 1, "pp": 2, "tp": 1, "num_slices": 16, "order": "terapipe", "offload": "none"}
    best = terapipe.longest("gpt3-1b", "dgx-a100:1", memory="12GiB", **options)
    tokens = best.plan.seq_len
    assert best.estimate.fits
    assert tokens % 1024 == 0
    with pytest.raises(ValueError, match="no plan fits"):
        terapipe.plan("gpt3-1b", "dgx-a100:1", batch_size=1, seq_len=tokens * 5 // 4, memory="12GiB", **options)
    more = terapipe.longest("gpt3-1b", "dgx-a100:1", memory="16GiB", **options)
    assert more.plan.seq_len > tokens


def test_a_model_for_which_nothing_is_short_enough() -> None:
    with pytest.raises(ValueError, match="no plan fits into"):
        terapipe.longest("gpt3-13b", "dgx-a100:1", memory="1GiB", pp=1, tp=1, dp=1)
