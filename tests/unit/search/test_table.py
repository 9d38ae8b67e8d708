"""Plans from a bare cost table."""

import json
from itertools import pairwise, product

import numpy as np
import pytest

from terapipe.search.request import Request
from terapipe.search.table import CostTable, choose_by_table


def text(tokens: int, unit: int, sizes: tuple[int, ...] = (1,), seed: int = 0) -> str:
    random = np.random.default_rng(seed)
    rows = [
        {"size": b, "length": n, "context": c, "seconds": b * (1.0 + n * (1 + c / 64) / 16) * random.uniform(0.8, 1.2)}
        for b, n, c in product(sizes, range(unit, tokens + 1, unit), range(0, tokens, unit))
        if n + c <= tokens
    ]
    return json.dumps(rows)


def brute_force(table: CostTable, tokens: int, unit: int, stages: int) -> float:
    best = float("inf")
    count = tokens // unit
    for mask in range(2 ** (count - 1)):
        cuts = [0, *(i for i in range(1, count) if mask >> (i - 1) & 1), count]
        t = [table.seconds[1, (b - a) * unit, a * unit] for a, b in pairwise(cuts)]
        best = min(best, sum(t) + (stages - 1) * max(t))
    return best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stages", [1, 3, 12])
def test_the_step_time_is_the_formulas_best(seed: int, stages: int) -> None:
    table = CostTable.from_json(text(128, 16, seed=seed))
    found = choose_by_table(table, Request(batch_size=1, seq_len=128, pp=stages, order="terapipe")).estimate
    assert found.step_time == pytest.approx(brute_force(table, 128, 16, stages), rel=1e-12)
    t = [table.seconds[s.size, s.length, s.context] for s in found.plan.slices]
    assert found.step_time == pytest.approx(sum(t) + (stages - 1) * max(t), rel=1e-12)
    assert found.idle == pytest.approx(1 - sum(t) / found.step_time)


def test_the_batch_is_cut_too() -> None:
    table = CostTable.from_json(text(64, 16, sizes=(1, 2, 4)))
    found = choose_by_table(table, Request(batch_size=5, seq_len=64, pp=4)).estimate
    assert sum(found.plan.sizes) == 5
    assert set(found.plan.sizes) <= {1, 2, 4}
    fixed = choose_by_table(
        table, Request(batch_size=4, seq_len=64, pp=4, microbatch_size=2, slice_lengths=(32, 32))
    ).estimate
    assert fixed.plan.sizes == (2, 2)
    assert fixed.plan.lengths == ((32, 32), (32, 32))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("[", "damaged or cut off"),
        ("[]", "none found"),
        ('[{"size": 1, "length": 8}]', "row 0 of a cost table needs"),
        ('[{"size": 1, "length": 8, "context": 0, "seconds": NaN}]', "finite and at least 0, got nan"),
        ('[{"size": 1, "length": 8, "context": 0, "seconds": -2}]', "finite and at least 0, got -2"),
        ('[{"size": 1, "length": 0, "context": 0, "seconds": 2}]', "at least 1"),
    ],
)
def test_bad_tables_are_refused(rows: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CostTable.from_json(rows)


def test_bad_requests_are_refused() -> None:
    table = CostTable.from_json(text(64, 16))
    with pytest.raises(ValueError, match="give pp"):
        choose_by_table(table, Request(batch_size=1, seq_len=64))
    with pytest.raises(ValueError, match="multiple of the table's unit of 16 tokens"):
        choose_by_table(table, Request(batch_size=1, seq_len=72, pp=2))
    with pytest.raises(ValueError, match="order is one of"):
        choose_by_table(table, Request(batch_size=1, seq_len=64, pp=2, order="interleaved"))
    with pytest.raises(ValueError, match="no "):
        choose_by_table(table, Request(batch_size=1, seq_len=128, pp=2))  # the table ends before
