"""Which slices a profile measures: enough for a fit whatever the model takes, and the needed ones first."""

import pytest

from terapipe.runtime.profile_grid import Point, ProfileGrid


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64, 1000, 8192])
@pytest.mark.parametrize("sizes", [(1,), (4, 1)])
def test_points_lie_inside_the_sequence(seq_len: int, sizes: tuple[int, ...]) -> None:
    grid = ProfileGrid(seq_len, sizes)
    assert all(p.length >= 1 and p.length + p.context <= seq_len for p in grid.points)
    assert len(set(grid.points)) == len(grid.points)
    assert {p.size for p in grid.points if p.held_out} <= {sizes[0]}


@pytest.mark.parametrize("sizes", [(1,), (4, 1)])
def test_required_points_come_first(sizes: tuple[int, ...]) -> None:
    grid = ProfileGrid(2048, sizes)
    required, order = grid.required(), grid.measurement_order()
    assert set(order[: len(required)]) == required
    assert sorted(order) == sorted(grid.points)
    for size in sizes:
        mine = [p for p in required if p.size == size]
        assert {p.length for p in mine} >= {16, 64, 2048}
        assert any(p.context for p in mine)
    assert not any(p.held_out for p in required)


def test_a_model_may_refuse_short_slices() -> None:
    grid = ProfileGrid(2048, (1,), lambda point: point.length >= 128)
    assert min(p.length for p in grid.points) == 128
    assert Point(1, 128, 0) in grid.required()
