import json

import pytest
from hypothesis import given

from terapipe import Plan
from tests.support.plans import plans


def test_grid_covers_every_token_of_every_sequence_once() -> None:
    plan = Plan((2, 1), ((3, 1, 4), (8,)), (0, 1))
    seen = [
        (row, token) for s in plan.slices for row in range(s.row, s.row + s.size) for token in range(s.context, s.end)
    ]
    assert sorted(seen) == [(row, token) for row in range(3) for token in range(8)]
    assert plan.batch_size == 3
    assert plan.seq_len == 8


@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_uniform_takes_batches_and_lengths_that_do_not_divide() -> None:
    plan = Plan.uniform(batch_size=5, seq_len=10, num_slices=4, microbatch_size=2, boundaries=(0, 1))
    assert plan.sizes == (2, 2, 1)
    assert plan.lengths == ((3, 3, 2, 2),) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (1, 1)}, "one list of slice lengths for each, got 2 sizes and 1"),
        ({"sizes": ()}, "sizes must be whole numbers of at least 1"),
        ({"sizes": (1, 1), "lengths": ((4,), (5,))}, r"same number of tokens, got \[4, 5\]"),
        ({"lengths": ((4, 0),)}, r"lengths\[0\] must be whole numbers of at least 1, got \[4, 0\]"),
        ({"lengths": ((4.0,),)}, "must be whole numbers"),
        ({"lengths": 4}, "lengths must be a list, got 4"),
        ({"boundaries": (0,)}, "must start at 0 and rise"),
        ({"boundaries": (1, 2)}, "must start at 0 and rise"),
        ({"boundaries": (0, 2, 2, 3)}, "every stage but the first and the last has a layer"),
        ({"boundaries": (0, 0, 0)}, "every stage but the first and the last has a layer"),
        ({"boundaries": (0, 3, 2)}, "every stage but the first and the last has a layer"),
        (
            {"chunks": 2, "boundaries": (0, 1, 2, 3)},
            r"divide the number of stages, got 2 chunks and 3 stages; try one of",
        ),
        ({"chunks": 0}, "chunks per rank"),
    ],
)
def test_a_bad_plan_says_what_is_wrong(change: dict[str, object], message: str) -> None:
    good = {"sizes": (1,), "lengths": ((4,),), "boundaries": (0, 2)}
    with pytest.raises(ValueError, match=message):
        Plan(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "exactly the keys"),
        ('{"order": "gpipe"}', "exactly the keys"),
    ],
)
def test_bad_json_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def test_a_plan_of_another_format_is_refused() -> None:
    data = Plan((1,), ((4,),), (0, 1)).to_dict()
    with pytest.raises(ValueError, match="format 1, got 2"):
        Plan.from_json(json.dumps({**data, "format": 2}))


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"seq_len": 0}, {"num_slices": 9}, {"microbatch_size": -1}])
def test_uniform_refuses_what_cannot_be_cut(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Plan.uniform(**{"batch_size": 1, "seq_len": 8, "boundaries": (0, 1), **wrong})  # type: ignore[arg-type]
