"""One published number from its configuration: the parts that differ from the planner's own path."""

from dataclasses import replace

import numpy as np
import pytest

from terapipe.planning.device import COLLECTIVES, CONTEXT, GB
from terapipe.published.simulation import MEASURES, Setup, Simulation

TIMED = Setup.of({"times": [1.0, 1.0, 1.0, 0.0], "layout": [1, 4, 1], "batch_size": 8, "order": "1f1b", "seq_len": 8})
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 1000, "max_seq_len": 1}
PIPE = {"model": SMALL, "cluster": "dgx-a100:1", "layout": [1, 4, 2], "batch_size": 4, "seq_len": 4096}


def test_measured_times_give_the_bubble_of_1f1b() -> None:
    """(K - 1) / (N + K - 1) of the step is idle with K = 4 ranks and N = 8 microbatches."""
    simulation = Simulation(TIMED)
    assert simulation.compute_time == pytest.approx(11 * 3e-3)
    assert MEASURES["idle share"].of(simulation) == pytest.approx(3 / 11)
    assert simulation.bubble_rate == pytest.approx(3 / 11)


def test_a_bubble_rate_is_of_the_longest_span_of_one_rank() -> None:
    """Ranks that end one after the other are busy for longer spans than the step less its end."""
    simulation = Simulation(replace(TIMED, order="terapipe-zb2"))
    assert simulation.longest_span < simulation.compute_time
    assert 0 < simulation.bubble_rate < 3 / 11


def test_chunks_and_slices_share_the_times_of_a_stage() -> None:
    """Twice the stages of half the time, or slices of a quarter: the same work in all."""
    whole, *others = (
        Simulation(replace(TIMED, order="interleaved", chunks=chunks, slices=slices))
        for chunks, slices in ((1, 1), (2, 1), (1, 4))
    )
    for other in others:
        assert other.compute_time < whole.compute_time
        idle = MEASURES["idle share"].of(other)
        assert other.compute_time * (1 - idle) == pytest.approx(24e-3)


def test_the_optimizer_counts_if_the_model_is_stated() -> None:
    with_model = replace(TIMED, model=Setup.of(PIPE).model, cluster="dgx-a100:1")
    assert Simulation(with_model).compute_time == pytest.approx(Simulation(TIMED).compute_time)
    assert Simulation(with_model).step_time > Simulation(TIMED).step_time


def test_slices_of_equal_flops() -> None:
    simulation = Simulation(Setup.of({**PIPE, "slices": 4, "cut": "flops", "order": "terapipe-1f1b"}))
    lengths = simulation.plan.lengths[0]
    model = simulation.source.config
    flops = np.diff([model.layer_flops(end) for end in np.cumsum([0, *lengths]).tolist()])
    assert sum(lengths) == 4096
    assert list(lengths) == sorted(lengths, reverse=True)
    assert flops == pytest.approx(np.full(4, flops.mean()), rel=1e-3)


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    one = {**PIPE, "layout": [1, 1, 1], "batch_size": 1, "order": "terapipe", "slices": 1}
    longest = Simulation(Setup.of(one)).longest
    assert longest > 0
    assert Simulation(Setup.of({**one, "seq_len": int(longest)})).fits
    assert not Simulation(Setup.of({**one, "seq_len": int(longest) + 100})).fits


def test_a_setup_changes_what_it_says_about_the_cluster() -> None:
    simulation = Simulation(Setup.of({**PIPE, "card": 12.5 * GB, "overlapped": False}))
    assert simulation.cluster.host.inter_node.bandwidth == 12.5 * GB
    assert not simulation.cluster.host.overlapped
    assert simulation.cluster.devices == 8


def test_products_that_do_not_add_gradients_take_longer() -> None:
    """A gradient is written, then read and added: 8 bytes of each weight of a layer in half precision."""
    fused, apart = (Simulation(Setup.of({**PIPE, "fuses": each})) for each in (True, False))
    assert not apart.cluster.host.device.fuses
    assert apart.step_time > fused.step_time


def test_sums_over_replicas_pass_during_the_last_backward() -> None:
    replicas = {**PIPE, "layout": [8, 1, 1], "batch_size": 8, "cluster": "dgx-a100:1"}
    after, during = (Simulation(Setup.of({**replicas, "overlapped_sums": each})) for each in (False, True))
    alone = Simulation(Setup.of({**replicas, "layout": [1, 1, 1], "batch_size": 1}))
    assert during.step_time == pytest.approx(alone.step_time)  # a sum that is shorter than the backward
    assert after.step_time > during.step_time


def test_memory_that_the_driver_shows_has_the_context() -> None:
    counted, shown = (Simulation(Setup.of({**PIPE, "whole_device": each})).peak_bytes for each in (False, True))
    assert shown == counted + CONTEXT + COLLECTIVES


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="got \\['microbatches'\\]"):
        Setup.of({"microbatches": 3})
    with pytest.raises(ValueError, match="give model and cluster"):
        Simulation(TIMED).source  # noqa: B018


SHARDED = {"model": SMALL, "cluster": "dgx-h100:2", "sharding": "ring", "batch_size": 64, "microbatch": 2}
SHARDED["seq_len"] = 2048


def test_a_sharded_program_that_prefetches_late_waits_for_weights_and_sums() -> None:
    """Two microbatches of 8 layers on 16 devices of two hosts: each waits for 15 sixteenths of a layer, gathered in
    half precision and summed in float32, behind 15 steps of which one is between hosts."""
    early, late = (Simulation(Setup.of({**SHARDED, "prefetch": each})) for each in (True, False))
    count = early.source.config.layer_parameters * 15 / 16
    host = early.cluster.host
    moved = sum(host.inter_node.seconds(count * each / host.rings) for each in (2, 4))
    waits = 2 * 8 * (moved + 2 * (14 * 3.4e-6 + 9.6e-6))
    assert late.step_time - early.step_time == pytest.approx(waits)
    assert early.tokens_per_second == pytest.approx(64 * 2048 / early.step_time)
    assert MEASURES["tokens/s per GPU"].of(early) == pytest.approx(early.tokens_per_second / 16)


def test_checkpoints_that_stop_early_leave_out_the_last_product() -> None:
    full, early = (Simulation(Setup.of({**SHARDED, "recompute": "full", "early_stop": each})) for each in (False, True))
    tokens, device = 2 * 2 * 2048, full.cluster.host.device
    last = 8 * tokens * 2 * 4096 * 1024 / device.rate
    assert full.step_time - early.step_time == pytest.approx(last, rel=0.2)  # and the ends of its loops


def test_products_that_light_checkpoints_compute_again() -> None:
    light, again = (
        Simulation(Setup.of({**SHARDED, "recompute": "light", "products_again": each})) for each in (0.0, 0.5)
    )
    tokens, device = 2 * 2 * 2048, light.cluster.host.device
    half = 8 * tokens * 12 * 1024**2 / device.rate
    assert again.step_time - light.step_time == pytest.approx(half, rel=0.2)


def test_an_optimizer_on_the_host_takes_what_its_memory_and_copies_take() -> None:
    """Two hosts share its bytes, sixteen devices the copies."""
    here, there = (
        Simulation(Setup.of({**SHARDED, "host_optimizer": each, "host_bandwidth": 4e11})) for each in ([0, 0], [44, 8])
    )
    seconds = 44 / 2 / 4e11 + 8 / 16 / here.cluster.host.copies.bandwidth
    assert there.step_time - here.step_time == pytest.approx(here.source.config.parameters * seconds)


def test_bandwidth_and_bare_ends_are_those_of_the_setup() -> None:
    slow = Simulation(Setup.of({**PIPE, "bandwidth": 1e12}))
    assert slow.cluster.host.device.bandwidth == 1e12
    bare = Simulation(Setup.of({**PIPE, "layout": [1, 5, 1], "bare_ends": True, "order": "interleaved", "chunks": 2}))
    assert len(bare.plan.boundaries) == 11
    with pytest.raises(ValueError, match="every stage needs at least one layer"):
        _ = Simulation(replace(bare.setup, bare_ends=False)).plan


def test_flops_of_the_model_per_device() -> None:
    simulation = Simulation(Setup.of({**PIPE, "layout": [1, 4, 2]}))
    config = simulation.source.config
    flops = 3 * 4 * (8 * config.layer_flops(4096) + config.head_flops(4096))
    assert MEASURES["TFLOP/s per GPU"].of(simulation) == pytest.approx(flops / simulation.step_time / 8 / 1e12)
