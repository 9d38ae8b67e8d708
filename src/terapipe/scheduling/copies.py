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
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import COMPUTE, Op
from terapipe.scheduling.program import CODE, OPS, Ints, Numbering

SLACK = 1  # computations that an engine has beside those until the next slice takes it
AWAY = 2  # computations for which a slice is away, at least
_NEVER = 1 << 40

_IS_COMPUTE = np.array([op in COMPUTE for op in OPS])


def offloaded_slices(plan: Plan) -> NDArray[np.bool_]:
    """Whether each slice of each stage is offloaded, by the plan: (stages, slices)."""
    return np.array([plan.offload_of(k) for k in range(plan.num_stages)])


def with_copies(lists: Sequence[Ints], numbering: Numbering, offloaded: NDArray[np.bool_]) -> list[Ints]:
    """The lists of all ranks with the copies of offloaded slices.

    Args:
        lists: Numbers of each rank's actions, with or without transfers: copies are placed by computations only.
        numbering: Of the actions.
        offloaded: Which slices of which stages are to be copied, if it is worth it: (stages, slices).
    """
    return [_insert(numbers, numbering, offloaded) for numbers in lists]


def _insert(numbers: Ints, numbering: Numbering, offloaded: NDArray[np.bool_]) -> Ints:
    stages, ops, slices = numbering.indices(numbers)
    at = np.flatnonzero(_IS_COMPUTE[ops])  # of the computations in the list
    stages, ops, slices = stages[at], ops[at], slices[at]
    key = stages * numbering.width + slices
    is_forward, is_backward = ops == CODE[Op.F], (ops == CODE[Op.B]) | (ops == CODE[Op.I])
    count = numbering.plan.num_stages * numbering.width
    forward, backward = np.full(count, -1), np.full(count, -1)  # place among computations, by stage and slice
    forward[key[is_forward]], backward[key[is_backward]] = np.flatnonzero(is_forward), np.flatnonzero(is_backward)
    # Rough: a slice that passes may still be too late for its neighbors, and is sorted out below.
    moved = np.flatnonzero(offloaded.ravel() & (forward >= 0) & (backward - forward >= 2 * (1 + SLACK) + AWAY))
    out, back = _places(forward[moved], backward[moved])
    worth = back - out >= AWAY
    moved, out, back = moved[worth], out[worth], back[worth]
    move = numbering.number(np.array(CODE[Op.OUT]), *np.divmod(moved, numbering.width))
    bring = numbering.number(np.array(CODE[Op.BACK]), *np.divmod(moved, numbering.width))
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
