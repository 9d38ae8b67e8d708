"""The solver against enumeration: every way to cut, on thousands of small tables of every kind."""

from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
import pytest

from terapipe.planning.solver import Array, Cuts, solve, solve_table

STAGES = (1, 2, 3, 8, 100)


# Other ways to the same answer


@cache
def compositions(units: int) -> tuple[tuple[int, ...], ...]:
    """All ordered ways to write a number as a sum."""
    return ((),) if units == 0 else tuple((k, *rest) for k in range(1, units + 1) for rest in compositions(units - k))


@cache
def partitions(batch: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All ways to write the batch as a sum of sizes, in falling order."""
    if batch == 0:
        return ((),)
    return tuple(
        (size, *rest)
        for size in sizes
        if size <= batch
        for rest in partitions(batch - size, tuple(s for s in sizes if s <= size))
    )


def slices(table: Array, lengths: tuple[int, ...]) -> list[float]:
    """Seconds of the slices of one microbatch; ``table[k, j]`` for its size."""
    return [float(table[k - 1, j]) for k, j in zip(lengths, accumulate(lengths, initial=0), strict=False)]


def formula(costs: list[float], stages: int) -> float:
    return sum(costs) + (stages - 1) * max(costs) if np.isfinite(max(costs)) else np.inf


def enumerated(table: Array, stages: int, batch: int, sizes: tuple[int, ...]) -> float:
    """The least time over all partitions of the batch and all cuts of each of its microbatches."""
    cuts = {
        size: [slices(rows, c) for c in compositions(table.shape[2])] for size, rows in zip(sizes, table, strict=True)
    }
    every = (choice for parts in partitions(batch, sizes) for choice in product(*(cuts[size] for size in parts)))
    return min(formula([t for part in choice for t in part], stages) for choice in every)


@cache
def padded(units: int) -> tuple[Any, Any]:
    """The same compositions as indices into a table: lengths and contexts, filled up with the entry (units, 0)."""
    rows = [
        [(k - 1, j) for k, j in zip(c, accumulate(c, initial=0), strict=False)] + [(units, 0)] * (units - len(c))
        for c in compositions(units)
    ]
    array = np.array(rows)
    return array[..., 0], array[..., 1]


def by_limits(table: Array, stages: int, batch: int, sizes: tuple[int, ...]) -> float:
    """The same, faster: for every limit on the longest slice the least sum of each size, over all its cuts."""
    units = table.shape[2]
    costs = np.concatenate([table, np.zeros((len(table), 1, units))], axis=1)[:, *padded(units)]
    sums, longest = costs.sum(axis=2), costs.max(axis=2)
    best = np.inf
    for limit in np.unique(longest[np.isfinite(longest)]):
        least = dict(zip(sizes, np.where(longest <= limit, sums, np.inf).min(axis=1), strict=True))
        total = min(sum(least[size] for size in parts) for parts in partitions(batch, sizes))
        best = min(best, float(total + (stages - 1) * limit))
    return best


def every_limit(table: Array, stages: int) -> float:
    """One sequence of many units: the plain dynamic program, once for every limit that there is."""
    limits = np.unique(table[np.isfinite(table)])
    return float((least_sums(table, limits) + (stages - 1) * limits).min())


def least_sums(table: Array, limits: Array) -> Array:
    units = len(table)
    least = np.full((units + 1, len(limits)), np.inf)
    least[0] = 0.0
    for end in range(1, units + 1):
        start = np.arange(end)
        cost = table[end - start - 1, start][:, None]
        least[end] = (least[:end] + np.where(cost <= limits, cost, np.inf)).min(axis=0)
    last: Array = least[-1]
    return last


def time_of(cuts: Cuts, table: Array, stages: int, sizes: tuple[int, ...], unit: int = 1) -> float:
    costs: list[float] = []
    for size, lengths in zip(cuts.sizes, cuts.lengths, strict=True):
        assert sum(lengths) == table.shape[2] * unit
        costs += slices(table[sizes.index(size)], tuple(n // unit for n in lengths))
    return formula(costs, stages)


# Tables


def tables(count: int, seed: int, units: int, sizes: int) -> Iterator[Array]:
    """Of all kinds in turn: noise, few values and so many ties, slices not allowed, models with and without noise."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        n = int(rng.integers(1, units + 1))
        k, c, b = np.arange(1, n + 1)[:, None], np.arange(n), np.arange(1, sizes + 1)[:, None, None]
        noise = rng.random((sizes, n, n))
        model = rng.random() * 3 + b * k * (1 + rng.random() * (c + k))
        kinds = (
            noise,
            np.floor(noise * 4),
            np.where(rng.random(noise.shape) < 0.4, np.inf, noise),
            np.broadcast_to(model, noise.shape).copy(),
            model * (0.9 + 0.2 * noise),
            np.where(noise < 0.3, np.inf, np.floor(model)),
        )
        table = kinds[i % len(kinds)]
        table[:, k + c > n] = np.nan  # past the end: never to be read
        yield table


def feasible(table: Array, batch: int, sizes: tuple[int, ...]) -> bool:
    return bool(np.isfinite(by_limits(np.nan_to_num(table, nan=0.0, posinf=np.inf), 1, batch, sizes)))


def gpt(size: Any, length: Any, context: Any) -> Array:
    """One layer with 5120 hidden units on a V100, forward and backward, and its transfers."""
    flops = 2.0 * size * length * 12 * 5120**2 + 4.0 * size * length * (context + length) * 5120
    return np.asarray(3 * np.maximum(1.46e-3, 1e-3 + flops / 72e12) + size * length * 5120 * 4 / 3.125e9)


# Exactness


@pytest.mark.parametrize("seed", range(4))
def test_one_sequence_is_cut_as_well_as_by_trying_everything(seed: int) -> None:
    for i, table in enumerate(tables(480, seed, units=8, sizes=1)):
        check(table, STAGES[i % len(STAGES)], 1, (1,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (1, 3), (2, 3), (2,), (1, 4)])
def test_a_batch_is_cut_as_well_as_by_trying_everything(sizes: tuple[int, ...], seed: int) -> None:
    for i, table in enumerate(tables(90, seed, units=7, sizes=len(sizes))):
        check(table, STAGES[i % len(STAGES)], 4, sizes)


def check(table: Array, stages: int, batch: int, sizes: tuple[int, ...]) -> None:
    if not feasible(table, batch, sizes):
        with pytest.raises(ValueError, match="no allowed slices add up"):
            solve_table(table, stages=stages, batch_size=batch, sizes=sizes)
        return
    cuts = solve_table(table, stages=stages, batch_size=batch, sizes=sizes)
    assert sum(cuts.sizes) == batch
    assert cuts.time == pytest.approx(time_of(cuts, table, stages, sizes), rel=1e-12)
    assert cuts.time == pytest.approx(by_limits(table, stages, batch, sizes), rel=1e-12)


def test_whole_batches_are_enumerated_too() -> None:
    """Without the thought that one limit fits all microbatches: every choice of cuts for every microbatch."""
    for i, table in enumerate(tables(150, 7, units=4, sizes=3)):
        stages = STAGES[i % len(STAGES)]
        best = enumerated(table, stages, 3, (1, 2, 3))
        if np.isfinite(best):
            assert solve_table(table, stages=stages, batch_size=3).time == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("units", [64, 70, 96])
def test_coarse_grids_do_not_hide_better_cuts(units: int, stages: int) -> None:
    rng = np.random.default_rng(units)
    k, c = np.arange(1, units + 1)[:, None], np.arange(units)
    noise = rng.random((units, units))
    for table in (noise, noise * k, 2 + k * (1 + 0.01 * (c + k)) * (0.95 + 0.1 * noise), np.ceil(9 * noise + k / 4)):
        found = solve_table(np.where(noise < 0.1, np.inf, table)[None], stages=stages)
        rounded = np.where((noise < 0.1) | (k + c > units), np.inf, table)
        assert found.time == pytest.approx(every_limit(rounded, stages), rel=1e-12)


def test_the_better_value_is_never_skipped_for_being_close() -> None:
    """Two limits closer than any eps, of which only the larger allows a cheap cut."""
    table = np.full((1, 2, 2), np.inf)
    table[0, 0] = 1.0, 1.0 + 1e-9
    table[0, 1, 0] = 3.0
    cuts = solve_table(table, stages=10**6)
    assert cuts.lengths == ((1, 1),)


# Cost functions


@pytest.mark.parametrize(("batch", "stages"), [(1, 40), (6, 8)])
def test_a_function_and_its_table_give_the_same(batch: int, stages: int) -> None:
    n, step = 32, 64
    k, c, b = np.arange(1, n + 1)[:, None] * step, np.arange(n) * step, np.arange(1, batch + 1)[:, None, None]
    table = gpt(b, k, c)
    cuts = solve(gpt, seq_len=n * step, stages=stages, step=step, batch_size=batch)
    assert cuts == solve_table(table, stages=stages, batch_size=batch, unit=step)
    assert cuts.time == pytest.approx(time_of(cuts, table, stages, tuple(range(1, batch + 1)), step), rel=1e-12)


@pytest.mark.parametrize("stages", STAGES)
def test_never_worse_than_equal_slices_and_microbatches(stages: int) -> None:
    best = solve(gpt, seq_len=512, stages=stages, batch_size=4).time
    for size, count in product((1, 2, 4), (1, 2, 4, 8, 16, 32, 64)):
        length = 512 // count
        each = gpt(size, length, np.arange(count) * length)
        assert best <= 4 // size * each.sum() + (stages - 1) * each.max() + 1e-12


def test_slices_get_shorter_as_the_context_grows() -> None:
    lengths = solve(gpt, seq_len=16384, stages=40, step=64).lengths[0]
    assert lengths[0] > lengths[-1]


def test_the_bubble_is_paid_once_for_the_batch() -> None:
    """Many microbatches fill the pipeline, so that longer slices pay than for one."""
    one, many = (
        solve(gpt, seq_len=2048, stages=24, step=64),
        solve(gpt, seq_len=2048, stages=24, step=64, batch_size=32),
    )
    assert many.time < 32 * one.time / 2
    assert max(map(max, many.lengths)) * max(many.sizes) > max(one.lengths[0])


def test_the_last_slice_takes_the_tokens_that_are_no_multiple_of_the_step() -> None:
    cuts = solve(gpt, seq_len=2043, stages=40)
    assert sum(cuts.lengths[0]) == 2043
    assert all(n % 8 == 0 for n in cuts.lengths[0][:-1])
    assert solve(gpt, seq_len=5, stages=3).lengths == ((5,),)


def test_only_the_lengths_and_sizes_that_are_allowed() -> None:
    cuts = solve(gpt, seq_len=1000, stages=40, lengths=[300, 200, 50, 4000], batch_size=6, sizes=[2, 4, 9])
    assert set(cuts.sizes) <= {2, 4}
    assert all(set(row) <= {300, 200, 50} for row in cuts.lengths)
    every = solve(gpt, seq_len=1000, stages=40, step=50, batch_size=6, sizes=[2, 4])
    assert every.time <= cuts.time


# What a user can get wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len must be a whole number of at least 1, got 0"),
        ({"stages": 1.5}, r"stages must be a whole number of at least 1, got 1\.5"),
        ({"step": -8}, "step must be"),
        ({"batch_size": True}, "batch_size must be"),
        ({"sizes": [0]}, r"sizes\[0\] must be a whole number of at least 1"),
        (
            {"batch_size": 3, "sizes": [2, 4]},
            r"sizes must add up to the batch, got sizes \[2, 4\] for a batch of 3; allow 1",
        ),
        ({"sizes": []}, "sizes must add up to the batch"),
        ({"lengths": [16, -1]}, r"lengths\[1\] must be"),
        ({"lengths": [24, 40]}, r"no slices of \[24, 40\] tokens add up to 100; allow 100 too"),
        ({"lengths": [200]}, "allow 100 too"),
        ({"lengths": []}, "allow 100 too"),
        ({"lengths": [6, 10], "seq_len": 14}, "no allowed slices add up to 14 tokens and a batch of 1, with 2 lengths"),
        ({"seq_len": 10**6}, "no more than 4096 steps, got 1000000 tokens in steps of 8; try step=248"),
    ],
)
def test_a_bad_question_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(gpt, **{"seq_len": 100, "stages": 2, **change})


@pytest.mark.parametrize("wrong", [np.nan, -1.0])
def test_a_cost_that_is_no_time_is_refused(wrong: float) -> None:
    def cost(size: Any, length: Any, context: Any) -> Array:
        return np.where((length == 16) & (context == 8), wrong, 1.0)

    with pytest.raises(ValueError, match=r"at least 0, .* got (nan|-1.0) for size 1, length 16 and context 8; correct"):
        solve(cost, seq_len=64, stages=2)


def test_no_allowed_slice_is_an_error() -> None:
    with pytest.raises(ValueError, match="no allowed slices"):
        solve(lambda size, length, context: np.full_like(length, np.inf), seq_len=64, stages=2)


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 5, 4), (4, 4), (1, 0, 0)])
def test_a_table_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the table must have the shape"):
        solve_table(np.ones(shape), stages=2)


def test_a_wrong_table_says_where() -> None:
    table = np.ones((2, 3, 3))
    table[1, 1, 0] = -2.0
    with pytest.raises(ValueError, match=r"got -2\.0 for size 2, length 20 and context 0"):
        solve_table(table, stages=2, batch_size=2, unit=10)


def test_helpers_of_this_file() -> None:
    assert compositions(3) == ((1, 1, 1), (1, 2), (2, 1), (3,))
    assert partitions(4, (1, 2, 4)) == ((1, 1, 1, 1), (2, 1, 1), (2, 2), (4,))
    assert all(a >= b for parts in partitions(9, (1, 2, 3)) for a, b in pairwise(parts))
