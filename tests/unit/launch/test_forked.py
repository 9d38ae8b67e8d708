"""Ranks that are forked from a process with torch."""

import os
import signal
import time

import torch

from terapipe.launch.forked import ForkedRanks
from terapipe.runtime import Transport, rank_and_size


def misbehave(quiet: int) -> int:
    """Rank 0 raises, rank 1 dies, rank 2 answers; further ones say nothing."""
    rank, _ = rank_and_size()
    if rank == 0:
        raise ValueError("a rank's own words")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank >= quiet:
        time.sleep(600)
    return rank


def test_each_rank_answers_for_itself() -> None:
    with ForkedRanks(4, misbehave, 3) as ranks:
        while len(ranks.hear(60)) < 3:
            pass
        answers = ranks.answers(0.1)
    assert answers[0].error == "ValueError: a rank's own words"
    assert answers[1].error == "ended with exit code -9"
    assert (answers[2].value, answers[2].error) == (2, "")
    assert answers[3].error == "said nothing within 0.1 s"


def meet() -> list[int]:
    transport = Transport.join(torch.device("cpu"), timeout=60.0)
    return transport.gather(transport.rank)


def test_ranks_meet_as_under_torchrun() -> None:
    with ForkedRanks(3, meet) as ranks:
        assert [answer.value for answer in ranks.answers(120)] == [[0, 1, 2]] * 3
