"""Costs from first principles: against published timings, and in the limits."""

from dataclasses import replace

import numpy as np
import pytest

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import StageSpec
from terapipe.planning.device import CUDNN, EFFICIENT, FLASH, FLASH3, UNFUSED
from terapipe.planning.hardware import EAGER_ACTION, EAGER_BACKWARD, EAGER_FORWARD, HOSTS, Cluster, with_attention
from terapipe.planning.layout import Layout
from terapipe.planning.presets import PRESETS, gpt_config

LAYER = StageSpec(1)


def cost(name: str = "gpt3-1b", layout: Layout = Layout(), where: str = "p3.16xlarge:48", **more: bool) -> AnalyticCost:  # noqa: B008
    return AnalyticCost(PRESETS[name], Cluster(where), layout, **more)


def test_one_layer_on_a_v100_as_published() -> None:
    """Figure 3 of the TeraPipe paper, read off to about 0.05 ms."""
    tokens = np.array([8, 128, 256, 512, 768, 1024])
    published = np.array([1.458, 1.492, 1.482, 1.726, 1.960, 2.542]) * 1e-3
    assert cost().forward(LAYER, 1, tokens, 0) == pytest.approx(published, rel=0.17)


@pytest.mark.parametrize("name", sorted(HOSTS))
def test_costs_rise_with_everything(name: str) -> None:
    for tensor in (1, 8):
        c, _ = cost(layout=Layout(1, 6, tensor), where=f"{name}:6").by_side()
        for method in (c.forward, c.backward):
            base = method(LAYER, 2, 2048, 1024)
            assert base > 0
            assert method(LAYER, 4, 2048, 1024) > base
            assert method(LAYER, 2, 4096, 1024) > base
            assert method(LAYER, 2, 2048, 8192) > base
            assert method(StageSpec(3), 2, 2048, 1024) == pytest.approx(3 * base)
        assert 0 < c.weights(LAYER, 2, 2048) < c.backward(LAYER, 2, 2048, 1024)


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-b200", "p4d.24xlarge"])
def test_a_short_slice_takes_as_long_as_its_host(name: str) -> None:
    """An eager layer was taken for 0.15 ms, less than half of what its host takes to issue it."""
    c, stage = cost("gpt-small", where=f"{name}:1"), StageSpec(4)
    for length in (1, 64):
        assert c.forward(stage, 1, length, 0) == pytest.approx(4 * EAGER_FORWARD + EAGER_ACTION)
        assert c.backward(stage, 1, length, 0) == pytest.approx(4 * EAGER_BACKWARD + EAGER_ACTION)
        full = c.with_recompute("full").backward(stage, 1, length, 0)
        assert full == pytest.approx(4 * (EAGER_FORWARD + EAGER_BACKWARD) + EAGER_ACTION)
    device, host = c.by_side()
    assert device.forward(stage, 1, 64, 0) < host.of_forward(stage)
    assert c.forward(stage, 64, 16384, 0) == device.forward(stage, 64, 16384, 0) > host.of_forward(stage)


def test_the_hosts_time_of_the_v100_is_in_its_measurements() -> None:
    device, host = cost().by_side()
    assert not host
    assert device.forward(LAYER, 1, 8, 0) == cost().forward(LAYER, 1, 8, 0)


def test_sums_in_float32_are_read_and_written() -> None:
    """8 bytes for each weight and slice, while the product computes: they bound short slices. A product that cannot add
    to its sum is written and read as well, and nothing of that is hidden."""
    config, device = PRESETS["llama3-8b"], HOSTS["dgx-h100"].device
    c = cost("llama3-8b", where="dgx-h100:1").by_side()[0]
    traffic = 8 * config.layer_parameters / device.bandwidth
    assert c.weights(LAYER, 1, 1) == pytest.approx(traffic, rel=1e-3)
    flops = 2 * 65536 * config.layer_parameters
    assert c.weights(LAYER, 1, 65536) == pytest.approx(flops / device.rate, rel=0.03), "hidden behind the product"
    compiled = replace(c, fused=False)
    assert compiled.weights(LAYER, 1, 512) == 0, "cannot be deferred"
    added = compiled.backward(LAYER, 1, 65536, 0) - c.backward(LAYER, 1, 65536, 0)
    assert added == pytest.approx(1.5 * traffic, rel=1e-3)
    volta = cost("gpt3-1b").by_side()[0]
    alone = 8 * PRESETS["gpt3-1b"].layer_parameters / HOSTS["p3.16xlarge"].device.bandwidth
    assert volta.weights(LAYER, 1, 2048) > alone + 2 * 2048 * PRESETS["gpt3-1b"].layer_parameters / 125e12


def test_the_vocabulary_costs_something_with_every_slice() -> None:
    """However short it is: the head's weight is read for two products, and its gradient's sum read and written."""
    c, config = cost("llama3-8b", where="dgx-h100:1").by_side()[0], PRESETS["llama3-8b"]
    device, weights = HOSTS["dgx-h100"].device, config.vocab * config.hidden
    bare = c.forward(LAYER, 1, 1, 0)
    head = float(c.forward(StageSpec(1, last=True), 1, 1, 0) - bare)
    assert head == pytest.approx((2 * 2 + 8) * weights / device.bandwidth + 3 * device.layer_overhead, rel=0.01)
    first = StageSpec(1, first=True)
    rows = (c.forward(first, 1, 64, 0) - c.forward(LAYER, 1, 64, 0)) + (
        c.backward(first, 1, 64, 0) - c.backward(LAYER, 1, 64, 0)
    )
    assert rows == pytest.approx(64 * config.hidden * (3 * 2 + 8) / device.bandwidth, rel=0.01), "rows only"


def test_gradients_of_weights_run_at_the_measured_speed() -> None:
    """Zero Bubble Pipeline Parallelism, table 9: milliseconds of the weight halves of a stage on an A100, which are
    nothing but products. Narrow products were taken for a third slower than wide ones; they are not."""
    for layers, hidden, heads, tokens, published in (
        (3, 2304, 24, 6 * 1024, 9.33),
        (4, 4096, 32, 3 * 1024, 19.6),
        (3, 5120, 40, 1024, 8.11),
        (2, 6144, 48, 1024, 7.70),
    ):
        shape = gpt_config(f"layers=8,hidden={hidden},heads={heads}")
        c = AnalyticCost(shape, Cluster("dgx-a100"), Layout()).by_side()[0]
        assert c.weights(StageSpec(layers), 1, tokens) * 1e3 == pytest.approx(published, rel=0.07)


def test_forwards_run_at_the_measured_speed() -> None:
    """The same table: forwards take twice as long, with norms, dropouts and scores of unfused attention in memory."""
    host = HOSTS["dgx-a100"]
    megatron = Cluster("megatron", replace(host, device=with_attention(host.device, UNFUSED)))
    for layers, hidden, heads, size, published in (
        (3, 2304, 24, 6, 18.52),
        (4, 4096, 32, 3, 29.8),
        (3, 5120, 40, 1, 11.33),
        (2, 6144, 48, 1, 10.41),
    ):
        shape = gpt_config(f"layers=8,hidden={hidden},heads={heads}")
        c = AnalyticCost(shape, megatron, Layout()).by_side()[0]
        assert c.forward(StageSpec(layers), size, 1024, 0) * 1e3 == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize(("kernel", "forward", "backward"), [(FLASH, 335, 297), (CUDNN, 539, 495), (FLASH3, 616, 534)])
def test_attention_by_kernel(kernel: str, forward: float, backward: float) -> None:
    """TFLOP/s of a causal forward and backward over 16k tokens on an H100 (FlashAttention-3, figures 5 and 6)."""
    host, tokens = HOSTS["dgx-h100"], 16384
    cluster = Cluster("x", replace(host, device=with_attention(host.device, kernel)))
    c = AnalyticCost(PRESETS["llama3-8b"], cluster, Layout())
    flops = 2 * tokens**2 * 4096
    speeds = [
        flops / c.attention(1, tokens, 0) / 1e12,
        2.5 * flops / c.attention(1, tokens, 0, backward=True) / 1e12,
    ]
    assert speeds == pytest.approx([forward, backward], rel=0.03)
    # Over 512 tokens FlashAttention-2 reaches 191 instead of 335 TFLOP/s.
    assert c.attention(1, 512, 0) == pytest.approx(c.attention(1, tokens, 0) * (512 / tokens) ** 2 * 1.7, rel=0.1)


def test_unfused_attention_reads_and_writes_scores() -> None:
    host = HOSTS["dgx-h100"]
    cluster = Cluster("x", replace(host, device=with_attention(host.device, UNFUSED)))
    c = AnalyticCost(PRESETS["llama3-8b"], cluster, Layout())
    scores = 2 * 32 * 8192**2  # bytes, of whole rectangles
    assert c.attention(1, 8192, 0) > 5 * scores / host.device.bandwidth
    assert c.attention(1, 8192, 0) > 5 * cost("llama3-8b", where="dgx-h100").attention(1, 8192, 0)


def test_attention_may_be_wider_than_the_hidden_states() -> None:
    """Qwen3-0.6B has 16 heads of 128 and hidden states of 1,024: twice the scores that were counted."""
    wide, narrow = (
        AnalyticCost(gpt_config(f"layers=2,hidden=1024,heads={heads},head_dim=128"), Cluster("dgx-h100"), Layout())
        for heads in (16, 8)
    )
    assert wide.attention(1, 65536, 0) == pytest.approx(2 * narrow.attention(1, 65536, 0))
    assert wide.config.layer_parameters > narrow.config.layer_parameters


def test_attention_is_what_the_runtime_would_choose() -> None:
    kernels = {name: host.device.attention_kernel for name, host in HOSTS.items()}
    assert kernels["dgx-a100"] == kernels["g6e.48xlarge"] == FLASH
    assert kernels["dgx-h100"] == kernels["dgx-h200"] == kernels["dgx-b200"] == CUDNN
    assert kernels["p3.16xlarge"] == EFFICIENT
    with pytest.raises(ValueError, match="'cudnn' is not known on ampere devices; those of flash, memory-efficient"):
        with_attention(HOSTS["dgx-a100"].device, CUDNN)


def test_without_sequence_parallelism_norms_are_on_every_rank() -> None:
    """As in Megatron of 2021; and without ``scatter``, each tensor parallel rank sends all of a message."""
    ours, older = (cost("gpt3-13b", Layout(1, 2, 8), "dgx-a100:2", sequence_parallel=flag) for flag in (True, False))
    assert older.forward(LAYER, 8, 2048, 0) > 1.05 * ours.forward(LAYER, 8, 2048, 0)
    alone = [cost("gpt3-13b", where="dgx-a100:2", sequence_parallel=flag) for flag in (True, False)]
    assert alone[0].forward(LAYER, 8, 2048, 0) == alone[1].forward(LAYER, 8, 2048, 0)
    part, whole = (cost(layout=Layout(1, 2, 8), scatter=flag).transfer(0, 1, 1, 2048) for flag in (True, False))
    assert whole == pytest.approx(8 * part, rel=0.1)


def test_parts_of_a_message_are_gathered_where_norms_need_all_of_it() -> None:
    """2,048 tokens of 5,120 numbers of 2 bytes: seven eighths of them come from the other seven ranks."""
    layout, host = Layout(1, 2, 8), HOSTS["dgx-a100"]
    divided, older = (cost("gpt3-13b", layout, "dgx-a100:2", sequence_parallel=flag) for flag in (True, False))
    gathered = older.transfer(0, 1, 1, 2048) - divided.transfer(0, 1, 1, 2048)
    assert gathered == pytest.approx(host.intra_node.seconds(2048 * 5120 * 2 * 7 / 8))
    # A message that is sent in one kernel with one that is received takes twice as long.
    batched = cost("gpt3-13b", layout, "dgx-a100:2", batched=True).transfer(0, 1, 1, 2048)
    assert batched - divided.transfer(0, 1, 1, 2048) == pytest.approx(2048 * 5120 * 2 / host.inter_node.bandwidth)


def test_answers_are_element_wise() -> None:
    c = cost("gpt3-13b", Layout(2, 20, 8))
    sizes, lengths, contexts = np.array([1, 2]), np.array([[64], [128], [512]]), np.array([0, 256])
    for found in (c.forward(LAYER, sizes, lengths, contexts), c.backward(LAYER, sizes, lengths, contexts)):
        assert found.shape == (3, 2)
    one = c.forward(LAYER, 2, 512, 256)
    assert c.forward(LAYER, sizes, lengths, contexts)[2, 1] == one


def test_boundaries_between_hosts_are_slower() -> None:
    """With tensor 4 on hosts of 8 every second boundary lies between hosts, with tensor 8 every one."""
    four = cost(layout=Layout(1, 8, 4))
    inside, between = four.transfer(0, 1, 1, 2048), four.transfer(1, 2, 1, 2048)
    assert between > 10 * inside
    assert cost(layout=Layout(1, 8, 8)).transfer(0, 1, 1, 2048) == between


def test_replicas_pay_for_their_reduction_once() -> None:
    alone, eight = cost(layout=Layout(1, 24, 1)), cost(layout=Layout(8, 24, 1))
    assert alone.per_step([LAYER]) < 0.05
    layer_bytes = 4 * PRESETS["gpt3-1b"].layer_parameters
    assert eight.per_step([LAYER]) - alone.per_step([LAYER]) == pytest.approx(
        2 * 7 / 8 * layer_bytes * 8 / (0.62 * 3.125e9), rel=0.01
    )


@pytest.mark.parametrize(
    ("layout", "rings"), [(Layout(16, 1, 1), 1), (Layout(8, 1, 2), 2), (Layout(4, 2, 2), 4), (Layout(2, 1, 8), 8)]
)
def test_a_ring_over_replicas_leaves_a_host_once(layout: Layout, rings: int) -> None:
    """All devices of a host were charged for the card, though replicas that share a host share a ring: eight times too
    much for data parallelism alone, which planners then avoided."""
    host, layers = Cluster("p3.16xlarge").host, [StageSpec(8)]
    alone = cost(layout=replace(layout, dp=1)).per_step(layers)
    added = cost(layout=layout).per_step(layers) - alone
    layer_bytes = 4 * 8 * PRESETS["gpt3-1b"].layer_parameters / layout.tp
    sent = 2 * (layout.dp - 1) / layout.dp * layer_bytes
    assert added == pytest.approx(host.inter_node.seconds(sent * rings / host.rings))


def test_replicas_in_one_host_never_use_its_card() -> None:
    layers = [StageSpec(8)]
    added = cost(layout=Layout(8, 1, 1)).per_step(layers) - cost(layout=Layout(1, 1, 1)).per_step(layers)
    sent = 2 * 7 / 8 * 4 * 8 * PRESETS["gpt3-1b"].layer_parameters
    assert added == pytest.approx(Cluster("p3.16xlarge").host.intra_node.seconds(sent))


def test_shards_gather_weights_instead_of_half_the_sum() -> None:
    """FSDP2 scatters sums in float32, gathers weights in bfloat16, and each replica updates its part."""
    layers, device = [StageSpec(8)], HOSTS["dgx-a100"].device
    whole, sharded = (
        cost(layout=Layout(2, 1, 8, shard), where="dgx-a100:2").per_step(layers) for shard in (False, True)
    )
    count = 8 * PRESETS["gpt3-1b"].layer_parameters / 8
    optimizer = count / 2 * (2 * device.element + 2 * device.state) / device.bandwidth
    assert whole - sharded == pytest.approx(
        optimizer + 0.5 * 2 * count * 8 / (0.9 * HOSTS["dgx-a100"].inter_node.bandwidth)
    )


def test_recomputation_adds_a_forward() -> None:
    plain, again = cost(), cost(recompute="full")
    forward = plain.forward(LAYER, 1, 512, 512)
    assert again.backward(LAYER, 1, 512, 512) == pytest.approx(plain.backward(LAYER, 1, 512, 512) + forward)


def test_recomputation_that_stops_early_leaves_out_the_last_product_and_its_sum() -> None:
    full = cost(layout=Layout(1, 1, 8), recompute="full")
    early, link, c = replace(full, early_stop=True), full.cluster.host.intra_node, full.config
    product = full.flops_with_ends(2048, c.ffn_hidden // 8, c.hidden) / full.cluster.host.device.rate
    summed = link.latency + 2 * 7 / 8 * 2048 * c.hidden * 2 / link.bandwidth
    shorter = full.backward(LAYER, 1, 2048, 0) - early.backward(LAYER, 1, 2048, 0)
    assert shorter == pytest.approx(product + summed)
    assert early.forward(LAYER, 1, 2048, 0) == full.forward(LAYER, 1, 2048, 0)


def test_ends_can_be_left_out() -> None:
    last = StageSpec(1, last=True)
    assert cost(ends=False).forward(last, 1, 512, 0) == cost().forward(LAYER, 1, 512, 0)
    assert cost().forward(last, 1, 512, 0) > cost().forward(LAYER, 1, 512, 0)


def test_clusters_by_name() -> None:
    assert Cluster("p3.16xlarge:48").devices == 384
    assert Cluster("dgx-h100").hosts == 1


def test_this_cpu_is_calibrated() -> None:
    here = Cluster("cpu").host
    assert 1e8 < here.device.rate < 1e13
    assert 1e8 < here.device.bandwidth < 1e13
    assert here.devices >= 1


def test_models_by_name_or_shape() -> None:
    assert gpt_config("gpt3-175b") is PRESETS["gpt3-175b"]
    shape = gpt_config("layers=96, hidden=12288,heads=96,kv_heads=8,vocab=1000")
    assert (shape.layers, shape.num_kv_heads, shape.vocab) == (96, 8, 1000)
    for text, said in (
        ("gpt3-175", "did you mean 'gpt3-175b'"),
        ("nonsense", "the presets are"),
        ("layers=96,hidden=12288", "lacks heads"),
        ("layers=96,hidden=12288,heads=96,depth=3", "got 'depth=3'"),
        ("layers=two,hidden=12288,heads=96", "got 'layers=two'"),
        ("layers=96,hidden=100,heads=96", "multiple of heads, or head_dim be given"),
    ):
        with pytest.raises(ValueError, match=said):
            gpt_config(text)


def test_a_described_cluster_exchanges_a_tied_weight_too() -> None:
    """Measured costs had the exchange of a tied weight's gradient, described ones left it out."""
    tied = PRESETS["gpt3-1b"]
    host = Cluster("dgx-a100:2")
    layout = Layout(pp=2, tp=8)  # one stage on each host
    costs = [AnalyticCost(config, host, layout) for config in (tied, replace(tied, tied=False))]
    added = costs[0].per_step([StageSpec(12, first=True)]) - costs[1].per_step([StageSpec(12, first=True)])
    assert added == pytest.approx(host.host.inter_node.seconds(tied.vocab * tied.hidden * 2))
    assert costs[0].per_step([StageSpec(24)]) == costs[1].per_step([StageSpec(24)])
