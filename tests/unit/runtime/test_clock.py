"""The clock of a rank, which is compared with those of others."""

import time

import pytest
import torch

from terapipe.runtime.clock import Clock


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
