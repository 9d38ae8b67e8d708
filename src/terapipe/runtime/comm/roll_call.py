"""Waits until all ranks have come to the same point, and names those that have not.

Making process groups waits for every member, by timeouts of torch's own (half an hour), and its errors name nobody. So
ranks meet in the job's store first.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from terapipe.runtime.comm.errors import PipelineError

_rounds: Counter[tuple[str, tuple[int, ...]]] = Counter()  # how often these ranks have met for this, in this process


def roll_call(store: Store, rank: int, ranks: Sequence[int], timeout: float, what: str) -> None:
    """Returns when all of these ranks have called it as often, for the same purpose.

    Where some are missing in the end, all others raise the same words, and all may try again.

    Args:
        store: of the job.
        rank: of this process.
        ranks: that are to meet.
        timeout: seconds to wait.
        what: they meet for, such as "make a Pipeline".
    """
    if len(ranks) < 2:
        return
    key = what, tuple(ranks)
    group = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    meeting = PrefixStore(f"terapipe/roll call/{group}", store)
    try:
        while meeting.check([f"{_rounds[key]}/absent"]):  # others gave up; they will be in the next round
            _rounds[key] += 1
        room = PrefixStore(str(_rounds[key]), meeting)
        _rounds[key] += 1
        absent = _meet(room, rank, ranks, timeout, what)
    except DistError as error:
        cause = str(error).partition("\n")[0]
        raise PipelineError(
            f"rank {rank} waited for all {len(ranks)} ranks to {what}, and lost the job's store, which ends with the "
            f"process that hosts it: {cause}"
        ) from error
    if absent:
        raise PipelineError(absent)


def _meet(room: Store, rank: int, ranks: Sequence[int], timeout: float, what: str) -> str:
    """Empty when all are there, or what all who are there say of the others. Polls, because a wait that times out in
    the store writes to stderr."""
    room.set(f"rank{rank}", "")
    if room.add("arrived", 1) == len(ranks):  # one key to look for, however many ranks there are
        room.set("all", "")
    deadline, pause = time.monotonic() + timeout, 0.001
    while not room.check(["all"]):
        if room.check(["absent"]) or time.monotonic() > deadline:
            missing = [r for r in ranks if not room.check([f"rank{r}"])]
            return room.compare_set("absent", "", _absence(missing, ranks, timeout, what)).decode()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return ""


def _absence(missing: Sequence[int], ranks: Sequence[int], timeout: float, what: str) -> str:
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"all {len(ranks)} ranks must {what}, {'ranks' if len(missing) > 1 else 'rank'} {named} did not within "
        f"{timeout:g} s; look for what happened there, or raise timeout"
    )
