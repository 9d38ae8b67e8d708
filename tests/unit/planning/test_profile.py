"""Costs fitted to measurements: a known truth is found again, noise and all."""

import json
from dataclasses import replace

import numpy as np
import pytest

from terapipe.planning.cost import StageSpec
from terapipe.planning.layout import Layout
from terapipe.planning.presets import PRESETS
from terapipe.planning.profile import FittedCost, Profile, Sample, Transfer, typical
from terapipe.scheduling.simulator import makespan
from terapipe.search.choose import choose
from terapipe.search.request import Request
from terapipe.search.source import ProfileSource


def truth(size: int, length: int, context: int, scale: float = 1.0) -> float:
    scores = length * (context + length / 2)
    return scale * (1e-3 + 2e-4 * (context > 0) + size * (4e-6 * length + 2e-9 * scores + 1e-7 * context))


def made(noise: float = 0.0, sizes: tuple[int, ...] = (1, 2, 4)) -> Profile:
    random = np.random.default_rng(0)

    def taken(seconds: float) -> tuple[float, ...]:
        return tuple(seconds * (1 + noise * random.standard_normal(9)))

    samples = []
    for kind, scale in (("forward", 1.0), ("backward", 2.0)):
        for size in sizes:
            for length in (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048):
                samples.append(Sample(kind, size, length, 0, taken(truth(size, length, 0, scale))))
            for length in (64, 128, 512):
                for context in (256, 1024, 1536):
                    samples.append(Sample(kind, size, length, context, taken(truth(size, length, context, scale))))
        samples.append(Sample(kind, 1, 300, 900, taken(truth(1, 300, 900, scale)), True))
    samples.append(Sample("head", 1, 64, 0, (64e-6,)))
    samples.append(Sample("head", 1, 1024, 0, (1024e-6,)))
    samples.append(Sample("weights", 1, 64, 0, (64e-6,)))
    transfers = (Transfer(1 << 12, (1e-4,)), Transfer(1 << 20, (1e-3,)))
    return Profile(PRESETS["gpt-small"], 3, 2048, 2, tuple(samples), transfers, (1e-9,), {"memory": 2**33}, {})


@pytest.mark.parametrize(("noise", "allowed"), [(0.0, 0.01), (0.02, 0.04)])
def test_a_known_truth_is_found_again(noise: float, allowed: float) -> None:
    cost = FittedCost(made(noise))
    for size, length, context in ((1, 48, 0), (1, 200, 700), (3, 640, 300), (2, 1200, 800), (4, 100, 1900)):
        wanted = truth(size, length, context)
        assert cost.forward(StageSpec(3), size, length, context) == pytest.approx(wanted, rel=allowed)
        assert cost.backward(StageSpec(3), size, length, context) == pytest.approx(2 * wanted, rel=allowed)
    assert max(map(abs, cost.errors())) < allowed


def test_the_context_adds_nothing_where_there_is_none() -> None:
    cost = FittedCost(made(0.05))
    without = cost.forward(StageSpec(3), 1, np.array([64.0, 512.0]), 0)
    measured = {s.length: s for s in cost.profile.samples if s.kind == "forward" and s.size == 1 and not s.context}
    assert without == pytest.approx([typical(measured[n].seconds) for n in (64, 512)])
    assert cost.forward(StageSpec(3), 1, 64, 8) >= without[0]


def test_parts_scale_and_ends_are_added() -> None:
    cost = FittedCost(made())
    layer = cost.forward(StageSpec(1), 1, 256, 0)
    assert cost.forward(StageSpec(6), 1, 256, 0) == pytest.approx(6 * layer)
    assert cost.forward(StageSpec(1, last=True), 1, 256, 0) == pytest.approx(layer + 256e-6)
    assert cost.weights(StageSpec(3), 1, 64) == pytest.approx(64e-6)
    again = FittedCost(made(), recompute="full")
    assert again.backward(StageSpec(1), 1, 256, 9) == cost.backward(StageSpec(1), 1, 256, 9) + cost.forward(
        StageSpec(1), 1, 256, 9
    )


def test_transfers_are_interpolated_and_the_optimizer_counted() -> None:
    cost = FittedCost(made())
    assert cost.transfer(0, 1, 1, 4) == pytest.approx(1e-4)  # 4 tokens of 256 floats
    assert cost.transfer(0, 1, 2, 512) == pytest.approx(1e-3)
    assert cost.per_step([StageSpec(3)]) == pytest.approx(3 * PRESETS["gpt-small"].layer_parameters * 1e-9)
    assert FittedCost(made(), layout=Layout(dp=2)).per_step([StageSpec(3)]) > cost.per_step([StageSpec(3)])


def two_hosts(*kinds: bool, device: str = "cpu") -> Profile:
    """Two ranks on each; inside a host 1 ms and 1 GB/s, between them 20 ms and 10 MB/s, of the kinds that are asked."""
    seconds = {False: lambda n: 1e-3 + n / 1e9, True: lambda n: 20e-3 + n / 1e7}
    transfers = tuple(Transfer(n, (seconds[apart](n),), apart) for apart in kinds for n in (1 << 12, 1 << 16, 1 << 20))
    hosts = ("here", "here", "there", "there")
    return replace(made(), ranks=4, hosts=hosts, transfers=transfers, machine={"device": device, "memory": 2**33})


INSIDE, BETWEEN = 1e-3 + 2**20 / 1e9, 20e-3 + 2**20 / 1e7


def megabyte(cost: FittedCost, source: int, target: int) -> float:
    return float(cost.transfer(source, target, 1, 1024))  # 1024 tokens of 256 floats


def test_a_transfer_takes_the_link_that_its_ranks_have() -> None:
    cost = FittedCost(two_hosts(False, True))
    assert [megabyte(cost, *pair) for pair in ((0, 1), (1, 2), (2, 3))] == pytest.approx([INSIDE, BETWEEN, INSIDE])
    assert megabyte(cost, 3, 0) == pytest.approx(BETWEEN)  # round the corner, from chunk to chunk
    assert megabyte(cost, 4, 5) == pytest.approx(INSIDE)  # a third host would be filled like the measured ones
    wide = FittedCost(two_hosts(False, True), layout=Layout(pp=2, tp=2))
    assert megabyte(wide, 0, 1) == pytest.approx(BETWEEN)


@pytest.mark.parametrize(("kind", "seconds"), [(False, INSIDE), (True, BETWEEN)])
def test_where_one_kind_of_link_was_measured_it_stands_for_both(kind: bool, seconds: float) -> None:
    cost = FittedCost(two_hosts(kind))
    assert [megabyte(cost, *pair) for pair in ((0, 1), (1, 2))] == pytest.approx([seconds] * 2)
    assert cost.link_behavior(0, 1) == cost.link_behavior(1, 2)
    assert cost.link_behavior(0, 1).overlapped is kind


def test_a_rank_on_a_cpu_computes_while_another_hosts_wire_is_busy() -> None:
    cost = FittedCost(two_hosts(False, True))
    assert [cost.link_behavior(*pair).overlapped for pair in ((0, 1), (1, 2))] == [False, True]
    assert [cost.link_behavior(*pair).latency for pair in ((0, 1), (1, 2))] == pytest.approx([1e-3, 20e-3])
    assert FittedCost(two_hosts(False, device="a GPU")).link_behavior(0, 1).overlapped
    free = FittedCost(replace(made(), transfers=()))
    assert megabyte(free, 0, 1) == free.link_behavior(0, 1).latency == 0.0


def test_what_comes_once_takes_the_link_between_hosts_where_replicas_lie_apart() -> None:
    part, config = [StageSpec(3)], PRESETS["gpt-small"]
    count = 3 * config.layer_parameters

    def added(layout: Layout, profile: Profile) -> float:
        return FittedCost(profile, layout=layout).per_step(part) - count * 1e-9

    both = two_hosts(False, True)
    assert added(Layout(dp=1, pp=4), both) == 0.0
    assert added(Layout(dp=2, pp=1), both) == pytest.approx(1e-3 + 4 * count / 1e9)
    assert added(Layout(dp=4, pp=1), both) == pytest.approx(20e-3 + 6 * count / 1e7)  # one leaves each host
    assert added(Layout(dp=2, pp=2), both) == pytest.approx(20e-3 + 2 * 4 * count / 1e7)  # two share the link


def test_a_tied_weight_is_exchanged_over_the_link_between_first_and_last_rank() -> None:
    tied = replace(two_hosts(False, True), config=replace(PRESETS["gpt-small"], tied=True))
    first = [StageSpec(3, first=True)]
    near, far = (FittedCost(tied, layout=Layout(pp=pipe)).per_step(first) for pipe in (2, 4))
    nbytes = 4 * tied.config.vocab * tied.config.hidden
    assert far - near == pytest.approx(19e-3 + nbytes / 1e7 - nbytes / 1e9)


def test_ranks_of_one_host_share_its_memory() -> None:
    assert ProfileSource(two_hosts(False, True), 4).budget == 2**32


def test_one_interruption_spoils_nothing() -> None:
    assert typical([99.0] + [1.0] * 7) == 1.0
    assert typical([1.0, 2.0, 3.0, 4.0]) == 1.5
    assert typical([5.0]) == 5.0


def test_a_profile_survives_its_file() -> None:
    for profile in (made(0.01), two_hosts(False, True), hosted(1e-3)):
        assert Profile.from_json(profile.to_json()) == profile


def test_a_file_from_before_hosts_were_known_is_of_one() -> None:
    data = json.loads(two_hosts(False).to_json())
    del data["hosts"]
    for row in data["transfers"]:
        del row["between_hosts"]
    read = Profile.from_json(json.dumps(data))
    assert read.hosts == ("",) * 4
    assert read.ranks_per_host == 4
    assert not any(t.between_hosts for t in read.transfers)


def hosted(seconds: float) -> Profile:
    """Of a GPU whose host takes so long to issue three layers forward, twice that backward. Long slices show the
    device's time, because the queue was full."""
    profile = made()
    samples = [
        s._replace(host=(max(seconds * (2 if s.kind == "backward" else 1), s.seconds[0] if s.length > 500 else 0.0),))
        for s in profile.samples
        if s.kind in ("forward", "backward")
    ]
    transfers = tuple(t._replace(host=(2e-5,)) for t in profile.transfers)
    return replace(profile, samples=tuple(samples), transfers=transfers)


def test_a_computation_takes_as_long_as_its_host() -> None:
    """The profile hid the host's time: slices seemed to get ever faster."""
    cost, layers = FittedCost(hosted(4e-3)), StageSpec(3)
    device, host = cost.by_side()
    assert host.of_forward(layers) == pytest.approx(4e-3)
    assert host.of_backward(layers) == pytest.approx(8e-3)
    assert host.message == 2e-5
    assert cost.forward(layers, 1, 32, 0) == cost.forward(layers, 1, 256, 0) == pytest.approx(4e-3)
    assert cost.backward(StageSpec(6), 1, 32, 0) == pytest.approx(16e-3)
    assert cost.forward(layers, 1, 2048, 0) == pytest.approx(truth(1, 2048, 0), rel=0.01)
    assert device.forward(layers, 1, 32, 0) == pytest.approx(truth(1, 32, 0), rel=0.01)
    assert cost.with_recompute("full").by_side()[1].of_backward(layers) == pytest.approx(12e-3)


def test_plans_by_a_slow_host_have_fewer_slices() -> None:
    request = Request(1, 2048, dp=1, pp=2, tp=1, recompute="none", order="terapipe", chunks=1)
    fast, slow = (len(choose(ProfileSource(hosted(seconds), 2), request).plan.lengths[0]) for seconds in (1e-5, 2e-2))
    assert slow < fast


def test_a_profile_without_host_times_is_read() -> None:
    """Format 1."""
    data = json.loads(hosted(1e-3).to_json())
    assert data["format"] == 2
    data["format"] = 1
    for row in (*data["samples"], *data["transfers"]):
        del row["host"]
    read = Profile.from_json(json.dumps(data))
    assert not FittedCost(read).by_side()[1]
    assert FittedCost(read).forward(StageSpec(3), 1, 16, 0) == pytest.approx(truth(1, 16, 0), rel=0.01)


def test_what_cannot_be_deferred_takes_its_time_in_the_backward() -> None:
    cost = FittedCost(made())
    assert cost.weights(StageSpec(3), 1, 64) > 0
    compiled = ProfileSource(made(), 2, fused=False).cost(Layout())
    assert compiled.weights(StageSpec(3), 1, 64) == 0
    assert compiled.backward(StageSpec(3), 1, 64, 0) == cost.backward(StageSpec(3), 1, 64, 0)


def test_bad_profiles_are_refused() -> None:
    text = made().to_json()
    for damaged, said in (
        (text[: len(text) // 2], "cut off"),
        ("[]", "formats 1 and 2"),
        ('{"format": 1}', "lacks or misnames"),
        (text.replace('"forward"', '"upward"', 1), "a sample's kind"),
        (text.replace('"optimizer": [', '"optimizer": [-1, ', 1), "at least 0"),
        (text.replace('"optimizer": [', '"optimizer": [NaN, ', 1), "finite"),
        (text.replace('"ranks": 2', '"ranks": 3', 1), "the host of every rank, got 2 hosts and 3 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            Profile.from_json(damaged)


def test_another_models_profile_is_refused() -> None:
    profile = made()
    profile.check_model(replace(PRESETS["gpt-small"], max_seq_len=99))
    with pytest.raises(ValueError, match="another model: layers 6 and 4, hidden 256 and 64"):
        profile.check_model(PRESETS["gpt-tiny"])


def test_a_fit_needs_something_to_start_from() -> None:
    empty = replace(made(), samples=())
    with pytest.raises(ValueError, match="no forward without context"):
        FittedCost(empty)


def test_the_plan_heeds_a_slow_link() -> None:
    """100 megabits per second and 5 ms: another plan than where messages take no time."""
    profile = made()
    slow = replace(profile, transfers=tuple(Transfer(n, (5e-3 + 8 * n / 1e8,), True) for n in (1 << 12, 1 << 20)))
    request = Request(1, 2048, dp=1, pp=2, tp=1, recompute=False)
    with_link, as_if_free = (
        choose(ProfileSource(found, 2), request).estimate.plan for found in (slow, replace(profile, transfers=()))
    )
    assert with_link != as_if_free
    cost = FittedCost(slow)
    assert makespan(with_link, cost)[0] < makespan(as_if_free, cost)[0]


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
    assert bfloat16.kv_cache(StageSpec(3), 1, 512) == cached / 2
    summed = float32.kv_gradients(StageSpec(3), 1, 512)
    assert bfloat16.kv_gradients(StageSpec(3), 1, 512) == summed  # in float32
    # Weights of 2 bytes and 12 of state; 4 and 8. Gradients are sums in float32, and then rounded.
    assert bfloat16.model_state(StageSpec(3)) == float32.model_state(StageSpec(3)) * 14 / 12
    held, rounded = float32.gradients(StageSpec(3)), bfloat16.gradients(StageSpec(3))
    assert held.before == held.during == held.after == rounded.during
    assert (rounded.before, rounded.after) == (0, rounded.during / 2)
    with pytest.raises(ValueError, match="a profile is of one of"):
        replace(wide, machine={"dtype": "int3"})
