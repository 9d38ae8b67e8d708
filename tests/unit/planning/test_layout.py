from itertools import accumulate, combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe import PRESETS, Plan, balance, split_layers
from terapipe.planning.layout import balance_ranks


def every_split(layers: int, stages: int, bare_ends: bool) -> list[tuple[int, ...]]:
    """All boundaries, by brute force."""
    least = 0 if bare_ends and stages > 1 else 1
    splits = [(0, *cuts, layers) for cuts in combinations_with_replacement(range(layers + 1), stages - 1)]
    return [
        cuts
        for cuts in splits
        if all(b - a >= (least if k in (0, stages - 1) else 1) for k, (a, b) in enumerate(pairwise(cuts)))
    ]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 30),
    st.integers(0, 30),
    st.booleans(),
)
def test_balance_is_the_best_of_all_splits(costs: list[int], stages: int, first: int, last: int, bare: bool) -> None:
    stages = min(stages, len(costs) + 2 * bare * (stages > 1))

    def slowest_stage(cuts: tuple[int, ...]) -> int:
        parts = [sum(costs[a:b]) for a, b in pairwise(cuts)]
        parts[0] += first
        parts[-1] += last
        return max(parts)

    best = balance(costs, stages, first=first, last=last, bare_ends=bare)
    every = every_split(len(costs), stages, bare)
    assert best in every
    assert slowest_stage(best) == min(map(slowest_stage, every))
    assert Plan((1,), ((4,),), best).num_stages == stages


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    more=st.integers(0, 4),
    ends=st.tuples(st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.3, 1.0, 3.5])),
    folded=st.booleans(),
    bare=st.booleans(),
)
def test_balanced_ranks_are_the_best_of_all_splits(
    ranks: int, chunks: int, more: int, ends: tuple[float, float], folded: bool, bare: bool
) -> None:
    """The slowest rank first, then the sum of squared stages, over all splits of a few layers."""
    chunks = min(chunks, 2) if ranks > 2 else chunks
    places = [ranks - 1 - k % ranks if folded and k // ranks % 2 else k % ranks for k in range(ranks * chunks)]
    bare = bare and len(places) > 2
    layers = len(places) + more - 2 * bare

    def badness(cuts: tuple[int, ...]) -> tuple[float, float]:
        stages = [2.0 * (b - a) for a, b in pairwise(cuts)]
        stages[0] += ends[0]
        stages[-1] += ends[1]
        sums = [sum(stage for stage, place in zip(stages, places, strict=True) if place == r) for r in range(ranks)]
        return round(max(sums), 9), round(sum(stage**2 for stage in stages), 9)

    best = balance_ranks(layers, places, 2.0, first=ends[0], last=ends[1], bare_ends=bare)
    every = every_split(layers, len(places), bare)
    assert best in every
    assert badness(best) == min(map(badness, every))


def test_a_fold_lightens_the_rank_with_both_ends() -> None:
    """Rank 0 has the stages 0 and 5, and a head of three layers. With equal stages the ranks have 6, 5 and 4 layers."""
    assert balance([1.0] * 12, 6, last=3.0) == (0, 2, 4, 6, 8, 11, 12)
    assert balance_ranks(12, [0, 1, 2, 2, 1, 0], 1.0, last=3.0) == (0, 1, 3, 5, 8, 11, 12)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="every stage needs at least one layer, got 3 layers for 4 stages"):
        balance_ranks(3, [0, 1, 1, 0], 1.0)
    with pytest.raises(ValueError, match="every stage but the first and the last needs at least one layer, got 3"):
        balance([1.0] * 3, 6, bare_ends=True)


def test_a_head_that_costs_more_than_layers_is_alone() -> None:
    assert balance([1.0] * 4, 3, last=5.0) == (0, 1, 3, 4)
    assert balance([1.0] * 4, 3, last=5.0, bare_ends=True) == (0, 2, 4, 4)
    assert balance([1.0] * 22, 24, bare_ends=True) == (0, *range(23), 22)


@given(
    st.lists(st.sampled_from([0.1, 0.3, 1.0]), min_size=1, max_size=9), st.integers(1, 5), st.sampled_from([0.0, 0.7])
)
def test_ties_go_to_even_stages_and_then_to_the_earliest_cuts(costs: list[float], stages: int, last: float) -> None:
    """The same cuts as one split at a time in plain Python gives, to the last bit of every comparison."""
    stages, count = min(stages, len(costs)), len(costs)
    sums = list(accumulate(costs, initial=0.0))
    best = {0: (0.0, 0.0, (0,))}
    for _ in range(stages):
        longer = {}
        for a, (slowest, squares, cuts) in best.items():
            for b in range(a + 1, count + 1):
                cost = sums[b] - sums[a] + (last if b == count else 0.0)
                split = (max(slowest, cost), squares + cost * cost, (*cuts, b))
                longer[b] = min(longer.get(b, split), split)
        best = longer
    assert balance(costs, stages, last=last) == best[count][2]


def test_equal_layers_are_spread_evenly() -> None:
    widths = [b - a for a, b in pairwise(balance([1.0] * 96, 5))]
    assert max(widths) - min(widths) == 1
    assert sum(widths) == 96


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    cuts = split_layers(PRESETS["gpt3-1b"], 4, 2048)
    widths = [b - a for a, b in pairwise(cuts)]
    assert widths[-1] < widths[0]


@pytest.mark.parametrize(("costs", "stages"), [([1.0], 2), ([1.0], 0), ([-1.0, 1.0], 1), ([float("nan")], 1)])
def test_balance_refuses_the_impossible(costs: list[float], stages: int) -> None:
    with pytest.raises(ValueError, match="layer"):
        balance(costs, stages)
