"""Actions, schedules, and the dependency rule between actions."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from terapipe.planning.slices import Plan, Slice


class Op(StrEnum):
    """The kind of an action."""

    __hash__ = str.__hash__  # Enum's own hash is slow, and actions are dict keys in every hot loop

    F = "F"  # forward
    B = "B"  # the whole backward
    I = "I"  # input half of a backward: the gradient that the previous stage waits for
    W = "W"  # weight half of a backward: no other stage waits for it
    SEND_F = "SEND_F"  # sends the output to the next stage
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # sends the gradient of the input to the previous stage
    RECV_B = "RECV_B"
    OUT = "OUT"  # from here on, what the forward left for the backward is in the host's memory only
    BACK = "BACK"  # from here on, it is on its way back to the device
    KV_OUT = "KV_OUT"  # the same of the keys and values of a microbatch, of which the action names the last slice
    KV_BACK = "KV_BACK"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
FORWARD = frozenset({Op.F, Op.SEND_F, Op.RECV_F})
COPIES = frozenset({Op.OUT, Op.BACK, Op.KV_OUT, Op.KV_BACK})


class Action(NamedTuple):
    """What one rank does with one slice on one stage. A tuple, because actions are dict keys in every hot loop."""

    op: Op
    stage: int
    slice: Slice

    def __str__(self) -> str:
        return f"{self.op}(stage {self.stage}, microbatch {self.slice.microbatch}, slice {self.slice.number})"

    def to_text(self) -> str:
        """The action as 'OP STAGE MICROBATCH.SLICE'."""
        return f"{self.op} {self.stage} {self.slice}"

    @classmethod
    def from_text(cls, text: str, plan: Plan) -> Self:
        """Reads what ``to_text`` wrote.

        Args:
            text: The action.
            plan: The plan that it is of.
        """
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


class Dependency(NamedTuple):
    """A dependency, relative to the action that has it. It is ignored where it would lie outside the plan."""

    op: Op
    stage: int = 0  # offset
    slice: int = 0  # offset, within the same microbatch


_BACKWARD = (
    Dependency(Op.F),
    Dependency(Op.B, stage=+1),
    Dependency(Op.B, slice=+1),
    Dependency(Op.BACK),
    Dependency(Op.KV_BACK),
)

# The dependency rule. Validation and simulation derive from this table; execution needs none, because a validated list
# meets it. For two slices on two stages:
#
#     stage 0   F0 ---> F1          B1 ---> B0        F: after the stage before, and after the slice before
#               |       |           ^       ^         B: after the stage after, and after the slice after
#               v       v           |       |
#     stage 1   F0 ---> F1 -------> B1 ---> B0        (B0 also needs F0, which was long before)
#
# Only the dependencies with a slice offset are special to slicing: a forward reads the keys and values of earlier
# slices, and a backward needs the gradients that later slices add to its keys and values.
# A dependency on a backward names B. If the backward is split, its I completes it (see `completes`).
# A slice that is offloaded goes F, OUT, BACK, B. A dependency on a copy is ignored where a slice is not
# offloaded. Keys and values of a microbatch may be away between its last forward and its first backward, both those of
# its last slice.
NEEDS: dict[Op, tuple[Dependency, ...]] = {
    Op.F: (Dependency(Op.F, stage=-1), Dependency(Op.F, slice=-1)),
    Op.B: _BACKWARD,
    Op.I: _BACKWARD,
    Op.W: (Dependency(Op.B),),
    Op.SEND_F: (Dependency(Op.F),),
    Op.SEND_B: (Dependency(Op.B),),
    Op.RECV_F: (Dependency(Op.SEND_F, stage=-1),),
    Op.RECV_B: (Dependency(Op.SEND_B, stage=+1),),
    Op.OUT: (Dependency(Op.F),),
    Op.BACK: (Dependency(Op.OUT),),
    Op.KV_OUT: (Dependency(Op.F),),
    Op.KV_BACK: (Dependency(Op.KV_OUT),),
}
ARRIVAL = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}  # replaces a dependency that is computed on another rank


def dependencies(action: Action, plan: Plan) -> tuple[Action, ...]:
    """The actions that must finish before an action starts: ``NEEDS``, with indices in place of offsets.

    Args:
        action: The action.
        plan: The plan that it is of, for its stages and slices. Its schedule need not have copies of every slice that
            it offloads: a backward does not wait for a copy that is not listed.
    """
    op, k, s = action
    row = plan.grid[s.microbatch]
    needed = []
    for need in NEEDS[op]:
        stage, number = k + need.stage, s.number + need.slice
        if not (0 <= stage < plan.num_stages and 0 <= number < len(row)):
            continue
        if need.op in COPIES and not _is_copied(need.op, plan, stage, row[number]):
            continue
        if op in COMPUTE and need.stage and plan.rank_of(stage) != plan.rank_of(k):
            needed.append(Action(ARRIVAL[need.op], k, s))
        else:
            needed.append(Action(need.op, stage, row[number]))
    return tuple(needed)


def _is_copied(op: Op, plan: Plan, stage: int, s: Slice) -> bool:
    """Whether the plan offloads what the copy is of."""
    if op in (Op.OUT, Op.BACK):
        return plan.is_offloaded(stage, s)
    return plan.offloads_cache_after(s)


def counterpart(transfer: Action) -> Action:
    """The other end of a transfer: the receive for a send, the send for a receive."""
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
    """The action as dependencies name it: ``I`` completes the ``B`` of its slice, any other action itself."""
    return Action(Op.B, action.stage, action.slice) if action.op is Op.I else action


def required_ops(stage: int, plan: Plan) -> tuple[Op, ...]:
    """The ops that a complete schedule has for every slice on one stage, with ``B`` standing for a split backward."""
    ops = [Op.F, Op.B]
    if stage > 0 and plan.rank_of(stage) != plan.rank_of(stage - 1):
        ops += [Op.RECV_F, Op.SEND_B]
    if stage < plan.num_stages - 1 and plan.rank_of(stage) != plan.rank_of(stage + 1):
        ops += [Op.SEND_F, Op.RECV_B]
    return tuple(ops)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order."""

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
