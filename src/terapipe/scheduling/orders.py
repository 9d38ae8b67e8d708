"""Orders: pure functions from a Plan to what each rank computes. The actions are the same; only their order differs."""

from collections.abc import Sequence
from itertools import accumulate

from terapipe.planning.order import InFlight, Order, order_named, register
from terapipe.planning.slices import Plan, Slice
from terapipe.scheduling.actions import Action, Op, Schedule
from terapipe.scheduling.transfers import with_transfers

Computations = list[list[Action]]  # for each rank, in order


def flush(plan: Plan) -> Computations:
    """All forwards, then all backwards in reverse: GPipe (Huang et al., 2019) over whole microbatches, the TeraPipe
    paper's schedule over slices."""
    return _flush(plan)


def terapipe_deferred(plan: Plan) -> Computations:
    """As ``terapipe``, but backwards are split: first all input halves, which other ranks wait for, then all weight
    halves, with which the later ranks fill their drain."""
    return _flush(plan, deferred=True)


def terapipe_v(plan: Plan) -> Computations:
    """As ``terapipe-deferred``, with the layers laid over the ranks there and back: the fold of zero-bubble schedules
    (Qi et al., 2024), over slices.

    The last rank turns every slice round at once. It is the one to keep busy: the others run ahead of it, and do
    weight halves while they wait for slices that return. So the only waits are for the first slice to come and for the
    last to turn. Those may be short and the ones between long: with two ranks a slice may take twice as long as its
    neighbours before the last rank waits for it, with more ranks they must grow more slowly.
    """
    *others, last = range(plan.num_ranks)
    return [_running_ahead(plan, rank) for rank in others] + [_turning(plan, last)]


def one_f_one_b(plan: Plan) -> Computations:
    """One forward, one backward in turn (DAPPLE, DeepSpeed, Megatron-LM). Over slices: microbatches first in, first
    out; the slices inside one last in, first out."""
    backwards = _backward_order(plan)
    needed = _forwards_before_backward(plan)
    ranks = []
    for rank in range(plan.num_ranks):
        lead = plan.num_ranks - 1 - rank
        before = [n + lead for n in needed]
        ranks.append(
            _alternate([Action(Op.F, rank, s) for s in plan.slices], [Action(Op.B, rank, s) for s in backwards], before)
        )
    return ranks


def interleaved(plan: Plan) -> Computations:
    """1F1B with several chunks of layers per rank, over slices or whole microbatches (Narayanan et al., 2021).

    Work goes round in groups of as many slices as there are ranks. The last group is filled up with phantoms that are
    dropped again, which keeps the proof of progress for any number of slices; and the warm-up is as long as the first
    backward needs, so any number of slices per microbatch works.
    """
    if plan.chunks == 1:
        return one_f_one_b(plan)
    group, chunks = plan.num_ranks, plan.chunks
    padding = [None] * (-len(plan.slices) % group)
    forwards = _rounds([*plan.slices, *padding], group, range(chunks))
    backwards = _rounds([*_backward_order(plan), *padding], group, range(chunks - 1, -1, -1))
    needed = _forwards_before_interleaved_backward(plan, forwards, backwards)
    ranks = []
    for rank in range(plan.num_ranks):
        lead = 2 * (plan.num_ranks - 1 - rank)
        stage = [c * plan.num_ranks + rank for c in range(chunks)]
        f = [Action(Op.F, stage[c], s) if s else None for c, s in forwards]
        b = [Action(Op.B, stage[c], s) if s else None for c, s in backwards]
        ranks.append(_alternate(f, b, [n + lead for n in needed]))
    return ranks


def _one_f_one_b_in_flight(work: InFlight) -> float:
    return min(float(work.microbatches), 1 + (work.ranks - 1) / work.slices)


def _interleaved_in_flight(work: InFlight) -> float:
    """The published peaks, in microbatches."""
    if work.slices == 1:
        most = work.ranks + (work.ranks - 1) / work.chunks
    else:
        most = 1 + 2 * (work.ranks - 1) / (work.chunks * work.slices)
    return min(float(work.microbatches), most)


register(Order("gpipe", "GPipe", flush, sliced=False))
register(Order("1f1b", "1F1B", one_f_one_b, sliced=False, chunks=1, one_rank=True, in_flight=_one_f_one_b_in_flight))
register(Order("terapipe", "TeraPipe", flush, unsliced_twin="gpipe", tried_chunks=(1, 2)))
register(
    Order(
        "terapipe-deferred",
        "TeraPipe, deferred weight gradients",
        terapipe_deferred,
        tried_chunks=(1, 2),
        bubble=2 / 3,  # weight gradients fill a third of the drain
    )
)
register(
    Order(
        "terapipe-v",
        "TeraPipe, V-shaped",
        terapipe_v,
        placement="v",
        chunks=2,
        bubble=1 / 2,  # ranks only wait for the first and the last slice, which may be short
    )
)
register(
    Order(
        "terapipe-1f1b",
        "1F1B over slices",
        one_f_one_b,
        chunks=1,
        unsliced_twin="1f1b",
        one_rank=True,
        in_flight=_one_f_one_b_in_flight,
    )
)
register(Order("interleaved", "interleaved 1F1B", interleaved, tried_chunks=(2, 4), in_flight=_interleaved_in_flight))


def computations(plan: Plan) -> Computations:
    """What each rank computes, in the plan's own order."""
    order = order_named(plan.order)
    order.check(plan)
    made: Computations = order.build(plan)
    return made


def schedule(plan: Plan) -> Schedule:
    """The Schedule of the plan's own order, transfers included. It depends on the plan's ``Shape`` alone."""
    return with_transfers(plan, computations(plan))


def _flush(plan: Plan, deferred: bool = False) -> Computations:
    """With several chunks per rank, chunk after chunk: breadth first."""
    halves = (Op.I, Op.W) if deferred else (Op.B,)
    ranks = []
    for rank in range(plan.num_ranks):
        forwards = [Action(Op.F, k, s) for k in plan.stages_of(rank) for s in plan.slices]
        ranks.append(forwards + [Action(op, k, s) for op in halves for _, k, s in reversed(forwards)])
    return ranks


def _turning(plan: Plan, rank: int) -> list[Action]:
    near, far = plan.stages_of(rank)
    there = [Action(Op.F, k, s) for s in plan.slices for k in (near, far)]
    return there + [Action(Op.I, k, s) for _, k, s in reversed(there)] + _halves(plan, (Op.W, far), (Op.W, near))


def _running_ahead(plan: Plan, rank: int) -> list[Action]:
    """Of ``terapipe-v``. A slice is back after as many computations as there are stages after this one and before its
    counterpart, so by so many the far stage lags behind the near one; and the other way round when gradients pass."""
    near, far = plan.stages_of(rank)
    count = len(plan.slices)
    lags = [far - near + j for j in range(count)]
    there = _alternate([Action(Op.F, near, s) for s in plan.slices], [Action(Op.F, far, s) for s in plan.slices], lags)
    early = _halves(plan, (Op.I, far), (Op.W, far))
    if rank == 0:  # nobody waits for the first rank's last input halves
        lags = [len(early)] * count
    back = _alternate(early, _halves(plan, (Op.I, near)), lags)
    return there + back + early[lags[-1] :] + _halves(plan, (Op.W, near))


def _halves(plan: Plan, *kinds: tuple[Op, int]) -> list[Action]:
    return [Action(op, k, s) for op, k in kinds for s in reversed(plan.slices)]


def _backward_order(plan: Plan) -> list[Slice]:
    return [s for row in plan.grid for s in reversed(row)]


def _forwards_before_backward(plan: Plan) -> list[int]:
    """How many forwards the last stage has done before each backward.

    All of the backward's own microbatch; and of the next one as large a share as has been backwarded of this one, so
    that memory stays level also where microbatches are cut into different numbers of slices.
    """
    counts = [len(row) for row in plan.grid]
    total = list(accumulate(counts))
    following = counts[1:] + [0]
    return [
        total[m] + position * following[m] // counts[m] for m in range(len(counts)) for position in range(counts[m])
    ]


def _forwards_before_interleaved_backward(plan: Plan, forwards: "Rounds", backwards: "Rounds") -> list[int]:
    """As above, for chunks: the last chunk's forward of the microbatch's last slice must be done.

    From one backward to the next the number rises by at least one: the proof of progress rests on that.
    """
    place = {(c, s): i for i, (c, s) in enumerate(forwards) if s}
    needed: list[int] = []
    lag = 1
    for j, (chunk, s) in enumerate(backwards):
        if s and chunk == plan.chunks - 1:
            lag = max(lag, place[chunk, plan.grid[s.microbatch][-1]] + 1 - j)
        needed.append(j + lag)
    return needed


Rounds = list[tuple[int, Slice | None]]


def _rounds(slices: Sequence[Slice | None], group: int, chunks: Sequence[int]) -> Rounds:
    return [(c, s) for g in range(0, len(slices), group) for c in chunks for s in slices[g : g + group]]


def _alternate(
    forwards: Sequence[Action | None], backwards: Sequence[Action | None], before: Sequence[int]
) -> list[Action]:
    """The forwards and backwards, with ``before[j]`` forwards ahead of backward ``j``; phantoms left out."""
    actions: list[Action | None] = []
    done = 0
    for backward, needed in zip(backwards, before, strict=True):
        if needed > done:
            actions += forwards[done:needed]
            done = needed
        actions.append(backward)
    return [action for action in actions if action is not None]
