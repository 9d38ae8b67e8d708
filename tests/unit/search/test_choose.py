"""The search: what it promises, what it respects, what it refuses."""

from dataclasses import replace
from itertools import pairwise

import pytest

from terapipe import ORDERS, PRESETS, GPTConfig, Plan, schedule, validate
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.slices import even_lengths
from terapipe.scheduling.simulator import makespan, simulate
from terapipe.search import choose as choose_module
from terapipe.search import evaluator as evaluator_module
from terapipe.search.candidates import candidates
from terapipe.search.choose import best_of, choose, compare, finish, rows_of
from terapipe.search.evaluator import Grid, PlanEvaluator, pareto_front, preference
from terapipe.search.refine import improve, ramp
from terapipe.search.request import Request, layouts
from terapipe.search.result import Comparison
from terapipe.search.source import ClusterSource
from tests.support.costs import SimpleCost, SimpleMemory, SimpleSource

SMALL = GPTConfig(layers=8, hidden=1024, heads=16, max_seq_len=4096)
SOURCE = ClusterSource(SMALL, Cluster("p3.16xlarge:1"))
CHUNKED = [("terapipe-v", 2), ("terapipe", 2), ("terapipe-deferred", 2), ("interleaved", 2), ("interleaved", 3)]
ONE = Request(batch_size=1, seq_len=2048, dp=1, pp=4, tp=2)


@pytest.mark.parametrize(
    "order", ["terapipe", "terapipe-1f1b", "terapipe-deferred", "terapipe-v", "terapipe-zb", "interleaved"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_never_worse_than_any_uniform_slicing(order: str, batch: int) -> None:
    request = ONE.fixed(
        order=order, batch_size=batch, microbatch_size=1, chunks=2 if order in ("interleaved", "terapipe-v") else 1
    )
    chosen = choose(SOURCE, request).estimate
    bench = PlanEvaluator(SOURCE, request, chosen.layout, False)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64):
        even = bench.evaluate(bench.plan(order, 1, even_lengths(2048, count, 8), chosen.plan.chunks))
        assert chosen.step_time <= even.step_time * (1 + 1e-9), count


def test_the_promised_time_is_that_of_the_schedule_that_will_run() -> None:
    decision = choose(SOURCE, Request(batch_size=4, seq_len=2048))
    assert decision.runners_up
    times = [choice.step_time for choice in decision.runners_up]
    assert times == sorted(times)
    assert len({choice.title for choice in (decision.estimate, *decision.runners_up)}) == len(times) + 1
    for choice in (decision.estimate, *decision.runners_up):
        made = schedule(choice.plan)
        validate(made)
        cost = SOURCE.cost(choice.layout)
        once = choice.step_time - makespan(choice.plan, cost)[0]
        assert simulate(made, cost).makespan + once == pytest.approx(choice.step_time, rel=1e-9)
        assert decision.estimate.step_time <= choice.step_time


def test_what_is_fixed_stays_fixed() -> None:
    request = Request(
        batch_size=8, seq_len=2048, dp=2, pp=2, tp=2, shard=False, order="terapipe-1f1b",
        slice_lengths=(1000, 600, 448), microbatch_size=2, recompute=True,
    )  # fmt: skip
    choice = choose(SOURCE, request).estimate
    assert choice.layout == Layout(2, 2, 2)
    assert choice.plan == Plan((2, 2), ((1000, 600, 448),) * 2, choice.plan.boundaries, "terapipe-1f1b", 1, True)
    assert choose(SOURCE, request.fixed(slice_lengths=None, num_slices=5, tile=8)).estimate.plan.lengths[0] == (
        410,
        410,
        410,
        409,
        409,
    )


def test_a_single_stage_is_not_sliced() -> None:
    decision = choose(SOURCE, Request(batch_size=1, seq_len=2048, dp=1, pp=1, tp=1))
    assert not decision.estimate.sliced
    assert decision.unsliced is decision.estimate


def test_many_sequences_on_few_stages_are_not_sliced() -> None:
    source = ClusterSource(SMALL, Cluster("dgx-a100:1"))
    assert not choose(source, Request(batch_size=64, seq_len=256, dp=1, pp=2, tp=1)).estimate.sliced


def test_the_budget_rules() -> None:
    free = choose(SOURCE, ONE.fixed(batch_size=16, order="terapipe"))
    tight = choose(SOURCE, ONE.fixed(batch_size=16, order="terapipe", memory=int(free.estimate.peak_bytes * 0.6)))
    assert tight.estimate.peak_bytes <= free.estimate.peak_bytes * 0.6
    assert tight.estimate.plan.recompute != "none"
    assert tight.estimate.step_time > free.estimate.step_time
    lean = choose(
        SOURCE, ONE.fixed(batch_size=16, recompute=False, memory=int(free.estimate.peak_bytes * 0.6))
    ).estimate
    assert lean.plan.order in ("terapipe-1f1b", "1f1b", "interleaved", "terapipe-zb", "terapipe-zb2")


@pytest.mark.exhaustive_ids("^536870912")
@pytest.mark.parametrize("budget", [2**29, 2**30])
def test_counting_memory_first_changes_no_choice(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that memory rules out are not simulated; all others are, and the same plans are found. Into the
    smaller budget nothing fits, and the plan with the smallest peak is found."""
    pool = candidates(SOURCE, ONE.fixed(batch_size=8, memory=budget))
    orders, simulated = ("gpipe", "terapipe-deferred", "terapipe-1f1b"), list[Plan]()
    monkeypatch.setattr(
        evaluator_module, "makespan", lambda plan, *rest: simulated.append(plan) or makespan(plan, *rest)
    )
    pools = [[candidate for candidate in pool if candidate.order == order] for order in orders]
    found = [best_of(own) for own in pools]
    assert any(best is not None and best.fits for best in found) == (budget == 2**30)
    few = len(simulated)
    monkeypatch.setattr(PlanEvaluator, "unless_beaten", lambda bench, plan, *_: bench.evaluate(plan))
    assert [best_of(own) for own in pools] == found
    assert few < (len(simulated) - few) / 2


def test_a_budget_too_small_for_any_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no plan fits into 0\.10 GiB per device: the smallest found needs .* GiB"):
        choose(SOURCE, ONE.fixed(memory=2**30 // 10))


def test_tiles_and_few_lengths() -> None:
    free = choose(SOURCE, ONE.fixed(order="terapipe", chunks=1))
    tiled = choose(SOURCE, ONE.fixed(order="terapipe", chunks=1, tile=128)).estimate
    assert all(length % 128 == 0 for row in tiled.plan.lengths for length in row)
    assert tiled.step_time >= free.estimate.step_time
    for distinct in (1, 2):
        limited = choose(SOURCE, ONE.fixed(order="terapipe", chunks=1, distinct=distinct))
        assert len({length for row in limited.estimate.plan.lengths for length in row}) <= distinct
        assert limited.price is not None
        assert limited.price >= 1 - 1e-9


def test_a_limit_on_lengths_does_not_break_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "with_few_lengths", lambda bench, choice, distinct: replace(choice, fits=False))
    with pytest.raises(ValueError, match=r"at most 1 different slice lengths .* raise distinct or the memory budget"):
        choose(SOURCE, ONE.fixed(order="terapipe", chunks=1, distinct=1))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"dp": 3, "batch_size": 4}, "a batch of 4 is not divisible by dp 3; try dp 2 or batch size 6"),
        ({"order": "zigzag"}, "unknown order 'zigzag'"),
        ({"slice_lengths": (1000, 1000)}, "sum to the 2048 tokens"),
        ({"num_slices": 0}, "num_slices must be a whole number of at least 1"),
        ({"order": "gpipe", "num_slices": 4}, "takes whole sequences"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"tile": 4096}, "use a smaller tile"),
    ],
)
def test_contradictions_are_refused_at_once(parts: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ONE.fixed(**parts)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"pp": 8}, "needs 16 devices, p3.16xlarge:1 has 8"),
        ({"tp": 3, "pp": None}, "tp must be one of"),
        ({"pp": 3, "tp": None, "dp": None}, "no layout dp x pp x tp uses all 8 devices"),
        ({"microbatch_size": 4}, "does not fit into a replica's batch of 1"),
        ({"order": "interleaved", "chunks": 3}, "every chunk needs a layer"),
    ],
)
def test_what_no_layout_satisfies_is_refused(parts: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(SOURCE, ONE.fixed(**parts))


def test_layouts_use_every_device() -> None:
    found = layouts(SOURCE, Request(batch_size=4, seq_len=2048))
    assert all(layout.devices == 8 for layout in found)
    assert Layout(4, 2, 1) in found
    assert Layout(8, 1, 1) not in found  # a batch of 4 has nothing for eight replicas


def test_compare_names_every_order_sliced_and_whole() -> None:
    rows = compare(SOURCE, ONE)
    names = [row.name for row in rows]
    assert names[:2] == ["gpipe", "1f1b"]
    whole = {f"{name}, whole sequences" for name, order in ORDERS.items() if order.sliced and not order.unsliced_twin}
    assert set(ORDERS) | {"terapipe, equal slices"} | whole == set(names)
    assert {row.layout for row in rows} == {Layout(1, 4, 2)}  # as the request says
    by_name = {row.name: row for row in rows}
    assert all(row.sliced != (name in {"gpipe", "1f1b"} | whole) for name, row in by_name.items())
    assert by_name["terapipe"].step_time <= by_name["terapipe, equal slices"].step_time * (1 + 1e-9)
    best = pareto_front(rows)
    assert best[0].step_time == min(row.step_time for row in rows)
    assert min(row.peak_bytes for row in rows) == best[-1].peak_bytes
    with pytest.raises(ValueError, match="leave out order"):
        compare(SOURCE, ONE.fixed(order="terapipe"))


def test_a_comparison_says_by_how_much_an_order_is_too_large() -> None:
    request = ONE.fixed(batch_size=16, recompute="none")
    tight = request.fixed(memory=choose(SOURCE, request.fixed(order="1f1b", microbatch_size=1)).peak_bytes)
    comparison = Comparison(tuple(compare(SOURCE, tight)), tight, SOURCE)
    sentence = next(sentence for sentence in comparison.too_large if sentence.startswith("gpipe "))
    over = next(row.peak_bytes for row in comparison if row.title == "gpipe") - tight.memory
    assert "fits in no layout: its smallest plan, dp 1 x pp 4 x tp 2 with microbatches of" in sentence
    assert f"recomputation none, is {over / 2**30:.2f} GiB over" in sentence
    assert sentence in str(comparison)
    assert not any(sentence.startswith("1f1b ") for sentence in comparison.too_large)


FREE = Request(batch_size=4, seq_len=2048)  # with any layout


def test_every_order_is_compared_in_its_own_best_layout() -> None:
    """All rows used to have the layout of the winner. So no order may be slower than its best plan in a layout that
    is fixed, and the same layout for all is another question."""
    rows = {row.title: row for row in compare(SOURCE, FREE)}
    assert len({row.layout for row in rows.values()}) > 1
    for order in ("gpipe", "1f1b", "terapipe-1f1b"):
        for layout in layouts(SOURCE, FREE):
            if layout.pp > 1:
                fixed = FREE.fixed(order=order, dp=layout.dp, pp=layout.pp, tp=layout.tp)
                assert rows[order].step_time <= 1.001 * choose(SOURCE, fixed).estimate.step_time, (order, layout)
    same = compare(SOURCE, FREE, same_layout=True)
    assert len({row.layout for row in same}) == 1
    for row in same:
        assert row.title not in rows or rows[row.title].step_time <= 1.001 * row.step_time, row.title


def test_the_plan_is_the_best_row_of_the_comparison() -> None:
    chosen, rows = choose(SOURCE, FREE), compare(SOURCE, FREE)
    assert min(rows, key=preference).step_time <= chosen.step_time <= 1.005 * min(rows, key=preference).step_time
    assert chosen.estimate in rows
    by_title = {row.title: row for row in rows}  # a comparison refines rows that are far behind, too
    assert all(by_title[other.title].step_time <= other.step_time * (1 + 1e-9) for other in chosen.runners_up)


def test_layers_are_spread_evenly_where_memory_is_short() -> None:
    """Balanced by time, the first rank has a layer more, and does not fit. The plan that was chosen instead took twice
    as long as the one that a person would write down."""
    source = ClusterSource(PRESETS["llama3-8b"], Cluster("p4d.24xlarge:1"))
    request = Request(batch_size=4, seq_len=8192, dp=2)
    bench = PlanEvaluator(source, request, Layout(2, 2, 2), "block")
    by_time = bench.plan("terapipe", 1, (4480, 3712), 8)
    fixed = request.fixed(memory=bench.evaluate(by_time).peak_bytes - 1)
    by_hand = PlanEvaluator(source, fixed, Layout(2, 2, 2), "block").evaluate(
        replace(by_time, boundaries=tuple(range(0, 33, 2)))
    )
    assert by_hand.fits
    assert choose(source, fixed).step_time <= by_hand.step_time


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_layers_can_be_spread_evenly_over_any_stages_that_there_are(chunks: int) -> None:
    """Also over two stages more than layers, which then have no layer at the ends of the model."""
    source, request = ClusterSource(replace(SMALL, layers=6), Cluster("p3.16xlarge:1")), FREE.fixed(bare_ends=True)
    bench = PlanEvaluator(source, request, Layout(1, 2, 4), "none")
    widths = [b - a for a, b in pairwise(bench.even_boundaries(chunks))]
    assert sum(widths) == 6
    assert widths == {1: [3, 3], 2: [1, 1, 2, 2], 4: [0, 1, 1, 1, 1, 1, 1, 0]}[chunks]


def test_seventy_billion_parameters_on_64_devices() -> None:
    """Whole sequences suit few stages and wide tensor parallelism, slices many stages. In the layout of the slices,
    1F1B took 25.5 s and interleaved 1F1B 24.1 s."""
    source = ClusterSource(replace(PRESETS["llama3-70b"], max_seq_len=32768), Cluster("dgx-h100:8"))
    request = Request(batch_size=8, seq_len=32768, memory=80 << 30)
    pool = candidates(source, request)
    rows = {row.name: row for row in rows_of(pool)}
    seconds = {}
    for name in ("1f1b", "interleaved, whole sequences"):
        start = best_of(rows[name].pool)
        assert start is not None
        seconds[name] = finish(start).step_time
    assert seconds["1f1b"] < 13.2
    assert seconds["interleaved, whole sequences"] < 9.2


def test_equal_time_slices_are_equal_in_time() -> None:
    bench = PlanEvaluator(SOURCE, ONE.fixed(tile=1), Layout(1, 4, 2), False)
    lengths = bench.grid(1).equal_time(6)
    assert sum(lengths) == 2048
    assert len(lengths) == 6
    contexts = [sum(lengths[:i]) for i in range(6)]
    times = [float(bench.seconds(1, n, c)) for n, c in zip(lengths, contexts, strict=True)]
    assert max(times) / sorted(times)[1] < 1.05  # the last one takes what is left over


def test_shaped_slices_take_times_in_these_proportions() -> None:
    grid = Grid.of(lambda length, context: length, 2048, 1)
    assert ramp(7, 2, 4) == (1, 2, 4, 4, 4, 2, 1)
    assert ramp(4, 1.5, 8) == (1, 1.5, 1.5, 1)
    assert grid.cut_by_shares((1, 2, 4, 1)) == (256, 512, 1024, 256)
    dearer = Grid.of(lambda length, context: length * (1 + context / 512), 2048, 1).cut_by_shares((1, 2, 2, 1))
    times = [n * (1 + sum(dearer[:i]) / 512) for i, n in enumerate(dearer)]
    assert times[1] / times[0] == pytest.approx(2, rel=0.05)
    assert times[2] / times[1] == pytest.approx(1, rel=0.05)


def test_folded_plans_have_short_slices_at_both_ends() -> None:
    request = Request(1, 2048, dp=1, pp=2, tp=1, chunks=2, recompute=False)
    source = SimpleSource(SimpleCost(fixed=20.0), SimpleMemory(), 8, 2)
    folded, looped = (choose(source, request.fixed(order=f"terapipe-{kind}")).estimate for kind in ("v", "deferred"))
    first, *between, last = folded.plan.lengths[0]
    assert max(first, last) < min(between)
    assert max(first, last) < max(between) / 3
    assert folded.step_time < 0.985 * looped.step_time
    assert choose(source, request).estimate.plan.order == "terapipe-v"


HEADS = [(order, chunks, head) for order, chunks in CHUNKED for head in (0.0, 1.0, 3.0, 6.0)]


@pytest.mark.parametrize(("order", "chunks", "head"), HEADS)
def test_ranks_are_balanced_with_all_of_their_stages(order: str, chunks: int, head: float) -> None:
    """An expensive head, in forwards of a layer. The slowest rank is never slower than with balanced stages, and the
    chosen plan never slower than the same slices with them. Stages of one rank are as equal as its sum permits."""
    source = SimpleSource(SimpleCost(fixed=8.0, head=head), SimpleMemory(), 24, 4)
    request = Request(4, 256, dp=1, pp=4, tp=1, order=order, chunks=chunks, num_slices=4, recompute=False)
    bench = PlanEvaluator(source, request, Layout(1, 4, 1), False)
    by_rank, by_stage = bench.rank_boundaries(order, chunks), bench.boundaries(chunks)
    assert by_rank == bench.rank_boundaries(order, chunks)
    assert (by_rank[0], by_rank[-1], len(by_rank)) == (0, 24, 4 * chunks + 1)
    plan = bench.plan(order, 1, (64,) * 4, chunks)
    assert plan.boundaries == by_rank
    assert slowest_rank(plan, head) <= slowest_rank(replace(plan, boundaries=by_stage), head)
    chosen = choose(source, request).estimate
    same = replace(chosen.plan, boundaries=by_stage)
    assert chosen.step_time <= bench.evaluate(same).step_time


def slowest_rank(plan: Plan, head: float) -> float:
    widths = [b - a for a, b in pairwise(plan.boundaries)]
    widths[-1] += head / 3  # a layer takes three forwards
    return max(sum(widths[k] for k in plan.stages_of(rank)) for rank in range(plan.num_ranks))


def test_a_balanced_fold_is_faster_than_balanced_stages() -> None:
    """Five layers to a rank, two of them in one of its stages, and a head that takes two thirds of a layer."""
    source = ClusterSource(PRESETS["gpt3-13b"], Cluster("dgx-a100:1"))
    request = Request(4, 2048, dp=1, pp=8, tp=1, order="terapipe-v", num_slices=4, microbatch_size=1, recompute=False)
    chosen = choose(source, request).estimate
    bench = PlanEvaluator(source, request, Layout(1, 8, 1), False)
    stages = replace(chosen.plan, boundaries=bench.boundaries(2))
    assert {b - a for a, b in pairwise(stages.boundaries)} == {b - a for a, b in pairwise(chosen.plan.boundaries)}
    assert [slowest_rank(plan, head=2.0) for plan in (chosen.plan, stages)] == [pytest.approx(5 + 2 / 3), 6]
    assert chosen.step_time < 0.95 * bench.evaluate(stages).step_time


def test_equal_time_reaches_the_end_when_slices_cannot_be_equal() -> None:
    grid = Grid.of(lambda length, context: 0 * length + 1.0, 100, 8)
    assert sum(grid.equal_time(4)) == 100


def test_uniform_slices_are_multiples_of_the_tile_but_for_the_last() -> None:
    assert even_lengths(2048, 3, 8) == (688, 680, 680)
    assert even_lengths(100, 3, 8) == (40, 32, 28)
    assert even_lengths(16, 9, 8) == (8, 8)


def test_improving_never_makes_it_worse() -> None:
    def skewed(lengths: tuple[int, ...]) -> float:
        return max(n * (i + 1) for i, n in enumerate(lengths))

    found = improve((32, 32, 32, 32), skewed, 8, 500)
    assert sum(found) == 128
    assert skewed(found) < skewed((32, 32, 32, 32))
    assert improve((128,), skewed, 8, 500) == (128,)


def test_long_sequences_are_planned_too() -> None:
    source = ClusterSource(replace(SMALL, max_seq_len=2**18), Cluster("dgx-h100:1"))
    chosen = choose(source, Request(batch_size=1, seq_len=2**18, dp=1, pp=8, tp=1, order="terapipe-1f1b")).estimate
    assert chosen.sliced
    assert chosen.plan.seq_len == 2**18


def test_shared_state_lets_replicas_fit() -> None:
    """Weights, gradients and state of a stage take 30 GiB; shared by four replicas 16."""
    source = ClusterSource(PRESETS["gpt3-13b"], Cluster("p4d.24xlarge:4"))
    request = Request(batch_size=8, seq_len=2048, dp=4, pp=8, tp=1, order="1f1b", recompute=True, memory=20 << 30)
    with pytest.raises(ValueError, match="shard the model state over replicas"):
        choose(source, request.fixed(shard=False))
    for shard in (True, None):
        shared = choose(source, request.fixed(shard=shard)).estimate
        assert shared.fits
        assert str(shared.layout) == "dp 4 (sharded) x pp 8 x tp 1"


def test_state_is_not_shared_where_memory_is_plenty() -> None:
    """FSDP2 is one thing more to go wrong, and gains next to nothing then."""
    source = ClusterSource(PRESETS["gpt3-1b"], Cluster("dgx-a100:1"))
    assert not choose(source, Request(batch_size=512, seq_len=2048, dp=8, pp=1, tp=1)).layout.shard
