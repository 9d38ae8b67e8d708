"""What replicas do together comes in the same order on all of them, however each cuts its batch."""

from collections.abc import Sequence
from itertools import product

import pytest

from terapipe import ORDERS, Action, Op, Plan
from terapipe.scheduling import computations


def met(actions: Sequence[Action]) -> str:
    """The stages in the order of their first forwards, when parameters are gathered, and of their last backwards or
    weight halves, when gradients are summed."""
    first = list(dict.fromkeys(a.stage for a in actions if a.op is Op.F))
    last = list(dict.fromkeys(a.stage for a in reversed(actions) if a.op in (Op.B, Op.W)))
    return f"{first} {last}"


@pytest.mark.parametrize("name", [name for name, order in ORDERS.items() if order.sliced])
def test_replicas_meet_whatever_their_numbers_of_slices(name: str) -> None:
    for ranks, chunks in product((2, 3), (1, 2, 3) if ORDERS[name].chunks is None else (ORDERS[name].chunks,)):
        edges = tuple(range(ranks * chunks + 1))
        rows = [(1,) * (n - 1) + (9 - n,) for n in (1, 3, 8)]
        cuts = [*product(rows), *product(rows, rows)]
        plans = [Plan((1,) * len(lengths), lengths, edges, name, chunks) for lengths in cuts]
        for lists in zip(*map(computations, plans), strict=True):  # of one rank, in every plan
            assert len(set(map(met, lists))) == 1, (ranks, chunks)
