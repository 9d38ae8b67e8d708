"""Actions, Schedules, and the one statement of what an action waits for."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from terapipe.planning.slices import Plan, Slice


class Op(StrEnum):
    """What an action does."""

    __hash__ = str.__hash__  # Enum's own is slow, and actions are keys in every hot loop

    F = "F"  # forward
    B = "B"  # backward, whole
    I = "I"  # its input half: the gradient that the stage before waits for
    W = "W"  # its weight half, which nobody waits for
    SEND_F = "SEND_F"  # the output, to the next stage
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # the gradient of the input, to the stage before
    RECV_B = "RECV_B"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
FORWARD = frozenset({Op.F, Op.SEND_F, Op.RECV_F})


class Action(NamedTuple):
    """One thing that one rank does for one slice on one stage. A tuple, because it is a key in every hot loop."""

    op: Op
    stage: int
    slice: Slice

    def __str__(self) -> str:
        return f"{self.op}(stage {self.stage}, microbatch {self.slice.microbatch}, slice {self.slice.number})"

    def to_text(self) -> str:
        return f"{self.op} {self.stage} {self.slice}"

    @classmethod
    def from_text(cls, text: str, plan: Plan) -> Self:
        try:
            op, stage, place = text.split()
            m, i = map(int, place.split("."))
            if min(int(stage), m, i) < 0 or int(stage) >= plan.num_stages:
                raise IndexError
            return cls(Op(op), int(stage), plan.grid[m][i])
        except (AttributeError, ValueError, IndexError):
            raise ValueError(
                f"an action reads 'OP STAGE MICROBATCH.SLICE' and lies in the plan, got {text!r}"
            ) from None


class Need(NamedTuple):
    """An action that another waits for, by its place relative to the waiting one. Outside the plan it is no need."""

    op: Op
    stage: int = 0
    slice: int = 0  # of the same microbatch


_BACKWARD = (Need(Op.F), Need(Op.B, stage=+1), Need(Op.B, slice=+1))

# The rule of precedence, the only statement of it. The needs of other slices are all that is special about cutting a
# sequence along its tokens: the keys and values of earlier slices, and the gradients that later ones left on them.
# Who waits for a backward waits for B; where it is split, I stands for it.
NEEDS: dict[Op, tuple[Need, ...]] = {
    Op.F: (Need(Op.F, stage=-1), Need(Op.F, slice=-1)),
    Op.B: _BACKWARD,
    Op.I: _BACKWARD,
    Op.W: (Need(Op.B),),
    Op.SEND_F: (Need(Op.F),),
    Op.SEND_B: (Need(Op.B),),
    Op.RECV_F: (Need(Op.SEND_F, stage=-1),),
    Op.RECV_B: (Need(Op.SEND_B, stage=+1),),
}
ARRIVAL = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}  # what a computation waits for if the need is computed on another rank


def dependencies(action: Action, plan: Plan) -> tuple[Action, ...]:
    """What ``action`` waits for: ``NEEDS``, at its place."""
    op, k, s = action
    row = plan.grid[s.microbatch]
    found = []
    for need in NEEDS[op]:
        stage, number = k + need.stage, s.number + need.slice
        if not (0 <= stage < plan.num_stages and 0 <= number < len(row)):
            continue
        if op in COMPUTE and need.stage and plan.rank_of(stage) != plan.rank_of(k):
            found.append(Action(ARRIVAL[need.op], k, s))
        else:
            found.append(Action(need.op, stage, row[number]))
    return tuple(found)


def counterpart(transfer: Action) -> Action:
    """The other end of a transfer: the receive of a send, the send of a receive."""
    op, k, s = transfer
    if op is Op.SEND_F:
        return Action(Op.RECV_F, k + 1, s)
    if op is Op.RECV_F:
        return Action(Op.SEND_F, k - 1, s)
    if op is Op.SEND_B:
        return Action(Op.RECV_B, k - 1, s)
    if op is Op.RECV_B:
        return Action(Op.SEND_B, k + 1, s)
    raise ValueError(f"only a transfer has a counterpart, got {transfer}")


def completes(action: Action) -> Action:
    """The action that others wait for when this one is done: an ``I`` settles the ``B`` that it is half of."""
    return Action(Op.B, action.stage, action.slice) if action.op is Op.I else action


def required(stage: int, plan: Plan) -> tuple[Op, ...]:
    """What a complete schedule does with every slice on one stage, its backward unsplit."""
    found = [Op.F, Op.B]
    if stage > 0 and plan.rank_of(stage) != plan.rank_of(stage - 1):
        found += [Op.RECV_F, Op.SEND_B]
    if stage < plan.num_stages - 1 and plan.rank_of(stage) != plan.rank_of(stage + 1):
        found += [Op.SEND_F, Op.RECV_B]
    return tuple(found)


@dataclass(frozen=True)
class Schedule:
    """For each rank, the actions it performs, in order."""

    plan: Plan
    ranks: tuple[tuple[Action, ...], ...]

    def to_json(self) -> str:
        ranks = [[action.to_text() for action in rank] for rank in self.ranks]
        return json.dumps({"plan": self.plan.to_dict(), "ranks": ranks})

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data: Any = json.loads(text)
            plan, ranks = data["plan"], [list(rank) for rank in data["ranks"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("a schedule is a JSON object with the keys 'plan' and 'ranks'") from None
        parsed = Plan.from_dict(plan)
        return cls(parsed, tuple(tuple(Action.from_text(a, parsed) for a in rank) for rank in ranks))
