"""What the formula takes as the time of a slice."""

import pytest

from terapipe.planning.cost import StageSpec, slice_time
from tests.support.costs import SimpleCost


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (SimpleCost(sent=0.25, overlapped=False), 12 + 24 + 2 * 3),  # each transfer holds its sender up
        (SimpleCost(sent=0.25), 12 + 24),  # on the way while the rank computes
        (SimpleCost(sent=1.5, latency=5.0), 18 + 24),  # one way the link is slower than the rank
    ],
)
def test_a_slices_round_trip(cost: SimpleCost, seconds: float) -> None:
    assert slice_time(cost, StageSpec(1), 1, 3, 1, 12, 0) == pytest.approx(seconds)
