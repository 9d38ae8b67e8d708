"""Buffers that executors keep from step to step, and the clock of their timelines."""

import time

import pytest
import torch

from terapipe import Pipeline, Plan
from terapipe.runtime.executor import Clock
from tests.support.models import TINY, make_batch, make_model


def test_a_sequence_in_one_piece_makes_no_gradients_of_earlier_keys() -> None:
    """Two buffers as large as the keys and values of all layers were made and zeroed, and never read."""
    pipe = Pipeline(make_model(TINY), Plan((1,), ((29,),), (0, 4)))
    pipe.step(*make_batch(TINY, 1, 29, ignored=False))
    (cache,) = pipe._executors.pool
    assert all(store._pair is not None and store._gradients is None for store in cache._stores.values())


def test_batches_of_many_shapes_keep_the_buffers_of_two() -> None:
    """Each of eight kept its keys, values and gradients for good."""
    pipe = Pipeline(make_model(TINY), Plan((2,), ((9, 20),), (0, 4)), vary="replan")
    for tokens in (29, 20, 21, 22, 23):
        pipe.step(*make_batch(TINY, 2, tokens, ignored=False))
    assert pipe._executors.pool.shapes == {(2, 29), (2, 23)}


def test_a_pause_between_the_clocks_does_not_shift_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lost its core between looking at the two clocks was milliseconds off in timelines."""
    pauses = [0.004, 0.003, 0.0, *[0.002] * 100]
    now = [0.0]

    def perf_counter() -> float:
        return now[0]

    def epoch() -> float:
        time_of_day = 1000.0 + now[0]
        now[0] += pauses.pop(0)
        return time_of_day

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    monkeypatch.setattr(time, "time", epoch)
    (at,) = Clock(torch.device("cpu")).read([7.0])
    assert at == 1007.0
