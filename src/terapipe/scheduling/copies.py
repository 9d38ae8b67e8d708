"""Adds the copies of offloaded slices to lists of actions: OUT to the host's memory, BACK to the device.

What a forward leaves for its backward may wait in the memory of the host. Each direction has a copy engine of its own,
which works beside the computations. Six slices on one stage, of which all forwards come first::

    list        F0 F1 F2 OUT0 F3 OUT1 F4 OUT2 F5 B5 BACK2 B4 BACK1 B3 BACK0 B2 B1 B0
    copy out       0----      1-----  2------                                              may take so long
    copy back                                       2-----------   1----------- and 0 until B0
    on device   0  01 012 12 123 23 234 34 345 345 34 342 32 321 21 210 10 0               3, 4, 5 never leave

A copy out begins as soon as its forward has ended. OUT is where the device waits for it, and has the memory back from
then on. A copy back begins at BACK, which takes the memory, and its backward waits for it. So what is on the device at
any point of a list follows from the list alone, as in a step without copies: times do not matter for memory.

Where to list them, then, decides how long the engines have. At most two slices are on their way out at a time, and two
on their way back: OUT comes one computation after the next slice that goes out has been computed, BACK one computation
before the slice that came back before it is used. A slice whose backward would follow too soon stays where it is.

Keys and values of a microbatch are needed by all of its slices, so they can be away only between its last forward and
its first backward: with several microbatches, or several stages on a rank, that is long. KV_OUT and KV_BACK are listed
by the same rule, as if they were one more thing that the last slice keeps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terapipe.scheduling.actions import COMPUTE, Op
from terapipe.scheduling.program import CODE, OPS, Ints, Numbering, ends_of_caches, offloaded_slices

SLACK = 1  # computations that an engine has beside those until the next slice takes it
AWAY = 2  # computations for which a slice is away, at least
_NEVER = 1 << 40

_IS_COMPUTE = np.array([op in COMPUTE for op in OPS])


def with_copies(lists: Sequence[Ints], numbering: Numbering) -> list[Ints]:
    """The lists of all ranks with the copies of what the plan offloads, where it is worth it.

    Args:
        lists: Numbers of each rank's actions, with or without transfers: copies are placed by computations only.
        numbering: Of the actions of the plan.
    """
    offloaded, ends = offloaded_slices(numbering.plan), ends_of_caches(numbering.plan)
    wanted = np.stack([offloaded, np.broadcast_to(ends, offloaded.shape)])  # slices; keys and values
    return [_insert(numbers, numbering, wanted) for numbers in lists]


_PAIRS = np.array([[CODE[Op.OUT], CODE[Op.KV_OUT]], [CODE[Op.BACK], CODE[Op.KV_BACK]]])


def _insert(numbers: Ints, numbering: Numbering, wanted: NDArray[np.bool_]) -> Ints:
    """One rank's list with copies. ``wanted`` says of which slices, and of which keys and values: (2, stages, slices).

    Both use the same engines, so both are placed together."""
    stages, ops, slices = numbering.indices(numbers)
    at = np.flatnonzero(_IS_COMPUTE[ops])  # of the computations in the list
    stages, ops, slices = stages[at], ops[at], slices[at]
    forward, backward = (np.full(wanted.shape[1:], -1) for _ in range(2))  # places among the computations
    is_forward, is_backward = ops == CODE[Op.F], (ops == CODE[Op.B]) | (ops == CODE[Op.I])
    for place, those in ((forward, is_forward), (backward, is_backward)):
        place[stages[those], slices[those]] = np.flatnonzero(those)
    # Rough: a slice that passes may still be too late for its neighbors, and is sorted out below.
    kind, k, s = np.nonzero(wanted & (forward >= 0) & (backward - forward >= 2 * (1 + SLACK) + AWAY))
    out, back = _places(forward[k, s], backward[k, s])
    worth = back - out >= AWAY
    kind, k, s, out, back = (each[worth] for each in (kind, k, s, out, back))
    move, bring = (numbering.number(codes[kind], k, s) for codes in _PAIRS)
    # Both directly before a computation: what the one before it sends does not wait for a copy.
    first, second = np.argsort(out, kind="stable"), np.argsort(back, kind="stable")
    places = at[np.concatenate((out[first], back[second]))]
    return np.insert(numbers, places, np.concatenate((move[first], bring[second])))


def _places(forward: Ints, backward: Ints) -> tuple[Ints, Ints]:
    """The computations before which each slice goes out, and before which it begins to come back.

    A slice that is alone with its engine for long goes out after a third of its time, and comes back a third before.

    Args:
        forward: The places of their forwards among the computations of a rank.
        backward: The places of their backwards.
    """
    third = (backward - forward) // 3
    out, back = np.empty_like(forward), np.empty_like(backward)
    order = np.argsort(forward)
    out[order] = np.append(forward[order][1:], _NEVER) + 1 + SLACK  # behind the forward of the next that goes out
    order = np.argsort(backward)
    back[order] = np.insert(backward[order][:-1], 0, -_NEVER) - SLACK  # before the backward of the one before
    least = 1 + SLACK  # computations that an engine has
    return (
        np.clip(out, forward + 1 + least, forward + 1 + np.maximum(third - 1, least)),
        np.clip(back, backward - np.maximum(third, least), backward - least),
    )
