"""Proof, before the first step, that a Schedule is whole and cannot block."""

from collections import Counter
from collections.abc import Sequence

from terapipe.planning.slices import Plan
from terapipe.scheduling.actions import (
    COMPUTE,
    SENDS,
    Action,
    Op,
    Schedule,
    counterpart,
    dependencies,
    required,
    settles,
)


def validate(schedule: Schedule) -> None:
    """Raises ValueError unless every rank does its work once, neighbours list their transfers alike, nothing blocks.

    Blocking is judged as if every transfer held up both ends until it is done. A runtime that only posts transfers
    and waits when it needs them can then never deadlock, tags or no tags.
    """
    _check_complete(schedule)
    _check_alike(schedule)
    _check_progress(schedule)


def _check_complete(schedule: Schedule) -> None:
    plan = schedule.plan
    if len(schedule.ranks) != plan.num_ranks:
        raise ValueError(f"the plan is for {plan.num_ranks} ranks, the schedule has {len(schedule.ranks)}")
    for rank, actions in enumerate(schedule.ranks):
        found = Counter(map(settles, actions))
        wanted = Counter(a for k in plan.stages_of(rank) for s in plan.slices for a in required(k, plan, s))
        for action in actions:
            if action.op is Op.I:
                wanted[Action(Op.W, action.stage, action.slice)] += 1
        for action in wanted - found:
            raise ValueError(f"rank {rank} never does {action}; every slice is forwarded and backwarded on every stage")
        for action in found - wanted:
            raise ValueError(f"rank {rank} does {action} too often, or it is not that rank's to do")


def _check_alike(schedule: Schedule) -> None:
    shared = [_by_peer(actions, schedule.plan) for actions in schedule.ranks]
    for a, peers in enumerate(shared):
        for b in (peer for peer in peers if peer > a):
            for mine, theirs in zip(peers[b], shared[b][a], strict=True):  # as many: both are complete
                if mine != counterpart(theirs):
                    raise ValueError(
                        f"neighbours must list their shared transfers in the same order: where rank {a} has {mine}, "
                        f"rank {b} has {theirs}"
                    )


def _by_peer(actions: Sequence[Action], plan: Plan) -> dict[int, list[Action]]:
    """One rank's transfers, by the rank at their other end."""
    peers: dict[int, list[Action]] = {}
    for action in actions:
        if action.op not in COMPUTE:
            peers.setdefault(plan.rank_of(counterpart(action).stage), []).append(action)
    return peers


def _check_progress(schedule: Schedule) -> None:
    """Walks all lists at once, each transfer a meeting of both ends; whoever cannot go on is part of a cycle."""
    plan, lists = schedule.plan, schedule.ranks
    done: set[Action] = set()
    at = [0] * len(lists)
    waiting: dict[Action, list[int]] = {}  # what is missing -> the ranks that stopped for it
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(lists[rank]):
            action = lists[rank][at[rank]]
            missing = _missing(action, schedule, done, at)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            done.add(settles(action))
            runnable += waiting.pop(settles(action), [])
            if action.op not in COMPUTE:  # the other end stands at its half of it: both pass
                other = counterpart(action)
                at[plan.rank_of(other.stage)] += 1
                done.add(other)
                runnable += waiting.pop(other, []) + [plan.rank_of(other.stage)]
    if any(i < len(actions) for i, actions in zip(at, lists, strict=True)):
        raise ValueError("the schedule cannot go on: " + _cycle(schedule, done, at))


def _missing(action: Action, schedule: Schedule, done: set[Action], at: Sequence[int]) -> Action | None:
    """What keeps this action from running: a dependency, or the other end of the transfer not being there."""
    if action.op in COMPUTE or action.op in SENDS:
        for need in dependencies(action, schedule.plan):
            if need not in done:
                return need
    if action.op in COMPUTE:
        return None
    other = counterpart(action)
    rank = schedule.plan.rank_of(other.stage)
    there = at[rank] < len(schedule.ranks[rank]) and schedule.ranks[rank][at[rank]] == other
    if not there:
        return other
    if action.op not in SENDS:  # a receive passes when its send can
        return next((need for need in dependencies(other, schedule.plan) if need not in done), None)
    return None


def _cycle(schedule: Schedule, done: set[Action], at: Sequence[int]) -> str:
    rank = next(r for r, actions in enumerate(schedule.ranks) if at[r] < len(actions))
    seen: dict[int, str] = {}
    while rank not in seen:
        action = schedule.ranks[rank][at[rank]]
        missing = _missing(action, schedule, done, at)
        assert missing is not None
        owner = schedule.plan.rank_of(missing.stage)
        seen[rank] = f"rank {rank} is at {action} and waits for {missing}" + (
            ", which comes later in its own list" if owner == rank else f" of rank {owner}"
        )
        rank = owner
    steps = list(seen.items())
    start = [r for r, _ in steps].index(rank)
    return "; ".join(text for _, text in steps[start:])
