"""Seconds of actions on a CPU, one for each and in their order. (On GPUs: tests/gpu/test_measuring.py.)"""

import itertools
import time

import pytest
import torch

from terapipe.runtime.stopwatch import Stopwatch


@pytest.mark.parametrize("queueing", [False, True])
def test_each_action_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch, queueing: bool) -> None:
    clock = itertools.accumulate([0.0, 1.0, 10.0, 2.0])  # one second, a pause of ten, two seconds
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch, done = Stopwatch(torch.device("cpu")), list[str]()
    actions = (lambda: done.append("first"), lambda: done.append("second"))
    assert (watch.queueing if queueing else watch)(*actions) == [1.0, 2.0]
    assert done == ["first", "second"]
