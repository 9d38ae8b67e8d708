"""The learning rate at the places that matter."""

import math
from itertools import pairwise

import pytest

from terapipe.training.config import LRConfig, OptimizerConfig
from terapipe.training.optimizer import learning_rate

PEAK = 0.5


def rates(steps: int = 20, **changes: object) -> list[float]:
    config = LRConfig(**{"warmup": 5, "min_lr_ratio": 0.1, **changes})  # type: ignore[arg-type]
    return [learning_rate(step, config, OptimizerConfig(lr=PEAK, steps=steps)) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_it_rises_to_the_peak_in_equal_steps(kind: str) -> None:
    assert rates(kind=kind)[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 19])
def test_it_ends_at_the_floor_and_stays_there(kind: str, warmup: int) -> None:
    config = LRConfig(warmup=warmup, min_lr_ratio=0.1, kind=kind)  # type: ignore[arg-type]
    assert learning_rate(19, config, OptimizerConfig(lr=PEAK, steps=20)) == pytest.approx(0.05)
    assert learning_rate(100, config, OptimizerConfig(lr=PEAK, steps=20)) == pytest.approx(0.05)
    assert learning_rate(max(0, warmup - 1), config, OptimizerConfig(lr=PEAK, steps=20)) == PEAK


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_it_falls_all_the_way(kind: str) -> None:
    fall = rates(kind=kind, decay=0.75)[4:]
    assert all(a > b for a, b in pairwise(fall))


def test_a_cosine_is_half_way_in_the_middle() -> None:
    found = rates(kind="cosine", steps=25, min_lr_ratio=0.0)
    assert found[14] == pytest.approx(PEAK / 2)
    assert found[9] == pytest.approx(PEAK / 2 * (1 + math.cos(math.pi / 4)))


def test_a_line_is_straight() -> None:
    found = rates(kind="linear")
    assert [a - b for a, b in pairwise(found[4:])] == pytest.approx([0.45 / 15] * 15)


def test_stable_then_falling_in_the_last_share() -> None:
    found = rates(kind="wsd", decay=0.2)
    assert found[4:16] == [PEAK] * 12
    assert found[16:] == pytest.approx([PEAK * (1 - 0.9 * i / 4) for i in range(1, 5)])
    assert rates(kind="wsd", decay=0.0)[4:] == [PEAK] * 16
    assert rates(kind="wsd", decay=1.0)[5] < PEAK, "never before the warm-up is over"


def test_constant_has_no_floor() -> None:
    assert rates(kind="constant")[4:] == [PEAK] * 16


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_short_runs(kind: str) -> None:
    assert rates(kind=kind, steps=1, warmup=0) == [PEAK]
    assert rates(kind=kind, steps=2, warmup=100) == pytest.approx([PEAK / 100, PEAK / 50])


def test_steps_are_counted_from_zero() -> None:
    with pytest.raises(ValueError, match="counted from 0, got -1"):
        learning_rate(-1, LRConfig(), OptimizerConfig())
