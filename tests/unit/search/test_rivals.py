"""Ways to train without a pipeline: their limits."""

from dataclasses import replace

import pytest

from terapipe import PRESETS, GPTConfig
from terapipe.planning.cost import StageSpec, with_recompute
from terapipe.planning.device import Link
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.rivals import Way, estimate, rivals
from terapipe.search.source import ClusterSource
from tests.unit.search.test_sensitivity import SOURCE

LLAMA = ClusterSource(PRESETS["llama3-8b"], Cluster("dgx-h100:2"))


def slower_links(source: ClusterSource, inside: float, between: float) -> ClusterSource:
    """The same cluster, its links by so many times slower."""
    host = source.cluster.host
    intra = Link(host.intra_node.bandwidth / inside, host.intra_node.latency)
    inter = Link(host.inter_node.bandwidth / between, host.inter_node.latency)
    return replace(source, cluster=Cluster("slow", replace(host, intra_node=intra, inter_node=inter), 2))


def test_on_one_device_all_are_the_plain_model() -> None:
    """A plan of one device with whole sequences takes as long, and sends nothing."""
    request = Request(batch_size=4, seq_len=2048)
    for mode in ("none", "block"):
        bench = PlanEvaluator(SOURCE, request, Layout(), mode)
        plain = bench.evaluate(bench.plan("gpipe", 2, (2048,)))
        for exchange in ("ring", "Ulysses"):
            alone = estimate(SOURCE, request, Way(size=2, exchange=exchange, recompute=mode))
            assert alone.step_time == pytest.approx(plain.step_time, rel=1e-9)
            assert alone.traffic.inside == alone.traffic.between == 0
            assert alone.mfu == pytest.approx(plain.mfu)


def test_more_bandwidth_is_never_slower() -> None:
    request = Request(batch_size=4, seq_len=8192, memory="10000GiB")
    before: dict[str, float] = {}
    for slow in (64.0, 8.0, 1.0):
        times = {
            r.title: r.step_time for r in rivals(slower_links(LLAMA, slow, slow), request.fixed(memory="10000GiB"))
        }
        assert all(times[name] <= seconds for name, seconds in before.items())
        before = times
    assert set(before) == {"DDP", "TP + DDP", "FSDP2", "FSDP2 + TP", "FSDP2 + ring", "FSDP2 + Ulysses"}


def test_fsdp_holds_its_shard_and_what_is_gathered() -> None:
    """Twice the devices take off half of the state, and of nothing else. What is left are layers with whole weights."""
    request = Request(batch_size=64, seq_len=2048)
    memory, whole, layer = with_recompute(LLAMA.memory(Layout()), "full"), StageSpec(32, True, True), StageSpec(1)
    state = memory.model_state(whole) + memory.gradients(whole).during
    peaks = {n: estimate(LLAMA, request, Way(dp=n, shards=n, recompute="full")).peak_bytes for n in (4, 8, 16)}
    assert peaks[4] - peaks[8] == pytest.approx(state / 8, abs=2)
    assert peaks[8] - peaks[16] == pytest.approx(state / 16, abs=2)
    inputs = 32 * float(memory.activations(layer, 1, 2048)) / 2
    rest = peaks[16] - state / 16 - inputs - memory.per_rank()
    config = LLAMA.config
    head = config.vocab * config.hidden * (2 + 4) + 3 * 4 * 2048 * config.vocab  # gathered, gradients, logits
    gathered = 2 * config.layer_parameters * 2 + memory.gradients(layer).during
    assert rest == pytest.approx(max(head, gathered + float(memory.workspace(layer, 1, 2048, 0)[1])), abs=2)


def test_ddp_holds_the_whole_state_on_every_device() -> None:
    request = Request(batch_size=64, seq_len=2048)
    ddp, fsdp = (estimate(LLAMA, request, Way(dp=16, shards=n, recompute="full")) for n in (1, 16))
    memory, whole = LLAMA.memory(Layout()), StageSpec(32, True, True)
    assert ddp.peak_bytes > memory.model_state(whole) + memory.gradients(whole).during > fsdp.peak_bytes


def test_traffic_is_that_of_the_weights() -> None:
    """FSDP gathers layers twice in their dtype and scatters gradients in float32; DDP sums gradients, which is twice a
    pass of the ring. Of two hosts with eight devices, one pass in eight goes through a card."""
    request, config = Request(batch_size=16, seq_len=2048), LLAMA.config
    layers = config.layers * config.layer_parameters
    fsdp = estimate(LLAMA, request, Way(dp=16, shards=16)).traffic
    total = 15 / 16 * (2 * 2 * layers + 2 * (config.parameters - layers) + 4 * config.parameters)
    assert fsdp.inside + fsdp.between == pytest.approx(total)
    assert fsdp.between == pytest.approx(total / 8)
    ddp = estimate(LLAMA, request, Way(dp=16)).traffic
    assert ddp.inside + ddp.between == pytest.approx(2 * 15 / 16 * 4 * config.parameters)
    hybrid = estimate(LLAMA, request, Way(dp=16, shards=8)).traffic
    assert hybrid.between == pytest.approx(2 * 1 / 2 * 4 * config.parameters / 8)  # a shard of the sum


def test_slow_networks_favor_copies_on_each_host() -> None:
    """Hybrid sharding gathers within hosts, and only sums cross the network. It is chosen where that is slow."""
    request = Request(batch_size=16, seq_len=2048, memory="1000GiB")
    slow = slower_links(LLAMA, 1.0, 100.0)
    best = next(r for r in rivals(slow, request) if r.title == "FSDP2")
    assert best.way.shards == 8


def test_ring_hides_behind_long_sequences() -> None:
    """Attention grows with the square of the sequence, keys and values do not."""
    short, long = (estimate(LLAMA, Request(1, n), Way(cp=16, shards=16, recompute="full")) for n in (16384, 1048576))
    assert long.idle < 0.02 < short.idle


def test_fewer_sequences_than_devices_leave_devices_out() -> None:
    few = {r.title: r for r in rivals(LLAMA, Request(batch_size=4, seq_len=8192))}
    assert few["FSDP2"].way.devices == 4
    assert few["FSDP2"].devices == 16
    assert few["FSDP2"].idle > 0.75
    assert few["FSDP2 + ring"].way.devices == 16
    assert few["FSDP2"].cost("1B", 2.0) == pytest.approx(few["FSDP2"].days("1B") * 24 * 16 * 2.0)


def test_heads_bound_ulysses() -> None:
    """It gives every device heads of its own, so there is no such way with more devices than heads."""
    source = replace(LLAMA, config=GPTConfig(layers=8, hidden=1024, heads=8, max_seq_len=65536))
    assert "FSDP2 + Ulysses" not in {r.title for r in rivals(source, Request(1, 65536))}
    assert "FSDP2 + ring" in {r.title for r in rivals(source, Request(1, 65536))}


def test_offloading_takes_the_inputs_of_layers_off_the_device() -> None:
    request, way = Request(batch_size=1, seq_len=65536), Way(cp=8, shards=8, recompute="full")
    here, away = (estimate(SOURCE, request, way, offload=offload) for offload in (False, True))
    inputs = 8 * 8192 * 2048 * 2  # layers, tokens of a device, hidden size, bytes
    assert here.peak_bytes - away.peak_bytes == inputs
    assert here.step_time == away.step_time


def test_what_is_fixed_is_respected() -> None:
    request = Request(batch_size=16, seq_len=2048, recompute="full", microbatch_size=1, memory="20GiB")
    for rival in rivals(LLAMA, request):
        assert (rival.way.recompute, rival.way.size) == ("full", 1)
        assert rival.fits == (rival.peak_bytes <= 20 * 2**30)
    half = rivals(LLAMA, Request(batch_size=16, seq_len=2048, dp=1, pp=8, tp=1))
    assert {rival.devices for rival in half} == {8}
