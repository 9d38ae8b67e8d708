"""Values for every stage and slice have one form, the shortest."""

import pytest

from terapipe.planning import by_slice


def number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"got {value!r}")
    return value


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (3, 3),
        ([3, 3], 3),
        ([[3, 3, 3], 3], 3),
        ([3, [1, 2, 3]], (3, (1, 2, 3))),
        ([[1, 1, 1], 2], (1, 2)),
    ],
)
def test_the_shortest_form(value: object, parsed: object) -> None:
    assert by_slice.parse(value, 2, 3, number, "numbers") == parsed


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "numbers, or a list with one entry for each of the 2 stages, got"),
        ([1, [1, 2]], "one for each of the 3 slices, got"),
        (["a", 1], "got 'a'"),
        ([[1, 2, "b"], 1], "got 'b'"),
    ],
)
def test_what_is_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        by_slice.parse(value, 2, 3, number, "numbers")


def test_asking() -> None:
    values = (3, (1, 2, 3))
    assert by_slice.of_stage(values, 0, 3) == (3, 3, 3)
    assert by_slice.of_stage(values, 1, 3) == (1, 2, 3)
    assert by_slice.of_stage(5, 1, 2) == (5, 5)
    assert by_slice.all_values(values) == {1, 2, 3}
    assert by_slice.all_values(5) == {5}
    assert by_slice.for_any_slices(values, max) == (3, 3)
    assert by_slice.for_any_slices(5, max) == 5
