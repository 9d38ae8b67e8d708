"""What each rank does until another one is killed. By itself, so that forked ranks import little."""

import time
from pathlib import Path
from typing import NamedTuple

import torch

from terapipe.launch import emulated_pipeline, own_mebibytes
from terapipe.runtime import Emulation, PipelineError


class Told(NamedTuple):
    """What a rank tells in the end.

    Args:
        ready: seconds until all had their pipelines.
        mebibytes: of memory of its own.
        words: of the failure.
    """

    ready: float
    mebibytes: float
    words: str


def step_until_failure(emulation: Emulation, start: float, timeout: float, at_work: Path) -> Told:
    pipe = emulated_pipeline(emulation, timeout)
    pipe.transport.gather(None)
    ready, plan = time.monotonic() - start, emulation.plan
    ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    try:
        while True:
            pipe.step(ids, ids + 1)
            at_work.touch()
    except PipelineError as error:
        return Told(ready, own_mebibytes(), str(error))
