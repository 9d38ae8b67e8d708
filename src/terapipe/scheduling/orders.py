"""Orders: pure functions from a Plan to the computations of each rank. They differ only in the sequence of actions.

First the orders, each a function with a picture or a sentence; then a ``register(Order(...))`` for each; then
``computations`` and ``schedule``, through which everybody else asks for them; last the rules that orders share. The
shortest is ``flush``, with ``_flush``.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from terapipe.planning.order import InFlight, Order, order_named, register
from terapipe.planning.slices import Plan, Slice
from terapipe.scheduling.actions import Action, Op, Schedule
from terapipe.scheduling.transfers import with_transfers

Computations = list[list[Action]]  # for each rank, in order


def flush(plan: Plan) -> Computations:
    """All forwards, then all backwards in reverse order: GPipe (Huang et al., 2019) with whole microbatches, the
    schedule of the TeraPipe paper (Li et al., 2021) with slices."""
    return _flush(plan)


def terapipe_deferred(plan: Plan) -> Computations:
    """As ``terapipe``, with split backwards: first all input halves, which other ranks wait for, then all weight
    halves. Ranks that would drain early fill that time with weight gradients."""
    return _flush(plan, deferred=True)


def terapipe_v(plan: Plan) -> Computations:
    """As ``terapipe-deferred``, with V-shaped placement as in zero-bubble schedules (Qi et al., 2024), over slices.

    Every rank holds one stage on the way down and one on the way back up. With three ranks:

        rank     0  1  2
        down     0  1  2    stages
        up       5  4  3

    The last rank has two adjacent stages and returns every slice at once. The other ranks run ahead to keep it busy,
    and compute weight gradients while they wait for returning slices. So ranks only idle until the first slice arrives
    and while the last one returns. These two slices may be short and those between long: with two ranks a slice may
    take twice as long as the one before it without delaying the last rank, with K ranks K / (K - 1) times as long.
    """
    *others, last = range(plan.num_ranks)
    return [_running_ahead(plan, rank) for rank in others] + [_turning(plan, last)]


def one_f_one_b(plan: Plan) -> Computations:
    """One forward, one backward in turn after a warm-up (DAPPLE, DeepSpeed, Megatron-LM). Microbatches are first in,
    first out. The slices of a microbatch are last in, first out: gradients flow from later slices to earlier ones."""
    return [_whole_backwards(plan, rank, lead=plan.num_ranks - 1 - rank) for rank in range(plan.num_ranks)]


def terapipe_zb(plan: Plan) -> Computations:
    """1F1B over slices with split backwards, within the memory of 1F1B: ZB-H1 (Qi et al., 2024) for slices.

    The gradient for the previous rank leaves after the input half, so the first backward passes the ranks sooner. Rank
    ``r`` has a lead of ``K - 1 - r`` forwards, as in 1F1B, and defers ``r - 1`` weight halves, which fill the time at
    the end in which 1F1B idles. Nobody waits for the input gradients of rank 0, so its backwards stay whole. With three
    ranks and two microbatches of three slices (``.`` is idle, a B takes two units of time and the others one):

        rank 0   F F F F F . . B B F B B . B B B B B B B B
        rank 1   . F F F F . I W F I W F I W I I I W W W .
        rank 2   . . F F F I F I W F I W F I I I W W W W .

    Lead and deferred halves add up to the same on every rank: at most M + K - 1 slices of a microbatch of M, as on the
    first rank of 1F1B. The slice whose halves are both there, during its input half, counts twice.
    """
    return _zero_bubble(plan, 1)


def terapipe_zb2(plan: Plan) -> Computations:
    """As ``terapipe-zb``, with twice the lead and twice the deferred halves, like ZB-H2: at most M + 2(K - 1) slices.

    The larger lead fills the wait for the first gradient. It also covers input halves that take longer than forwards,
    and slices that take different times.
    """
    return _zero_bubble(plan, 2)


def interleaved(plan: Plan) -> Computations:
    """1F1B with several chunks of layers per rank, over slices or whole microbatches (Narayanan et al., 2021).

    Slices pass the chunks in groups of ``num_ranks``. The last group is filled up with padding, dropped in the end, so
    that the order is free of deadlock for any number of slices (docs/architecture.md has the argument). The warm-up is
    as long as the first backward of a microbatch requires, so any number of slices per microbatch works.
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


def _one_f_one_b_in_flight(work: InFlight, lead: int = 1) -> float:
    return min(float(work.microbatches), 1 + lead * (work.ranks - 1) / work.slices)


def _interleaved_in_flight(work: InFlight) -> float:
    """The published peaks, converted to microbatches."""
    if work.slices == 1:
        most = work.ranks + (work.ranks - 1) / work.chunks
    else:
        most = 1 + 2 * (work.ranks - 1) / (work.chunks * work.slices)
    return min(float(work.microbatches), most)


register(Order("gpipe", "GPipe", flush, sliced=False))
register(Order("1f1b", "1F1B", one_f_one_b, sliced=False, chunks=1, one_rank=True, in_flight=_one_f_one_b_in_flight))
register(
    Order(
        "terapipe",
        "TeraPipe",
        flush,
        unsliced_twin="gpipe",
        tried_chunks=(1, 2, 3, 4, 6, 8),
        variants=("whole", "equal", "sliced"),
    )
)
register(
    Order(
        "terapipe-deferred",
        "TeraPipe, deferred weight gradients",
        terapipe_deferred,
        tried_chunks=(1, 2, 3, 4, 6, 8),
        bubble=2 / 3,  # weight gradients fill a third of the drain
        deferred=True,
    )
)
register(
    Order(
        "terapipe-v",
        "TeraPipe, V-shaped",
        terapipe_v,
        placement="v",
        chunks=2,
        bubble=1 / 2,  # ranks only idle for the first and the last slice, which may be short
        deferred=True,
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
register(
    Order(
        "terapipe-zb",
        "zero bubble over slices",
        terapipe_zb,
        chunks=1,
        bubble=1 / 3,  # a rank waits for input halves only, and weight halves fill the drain
        in_flight=_one_f_one_b_in_flight,
        deferred=True,
    )
)
register(
    Order(
        "terapipe-zb2",
        "zero bubble over slices, twice the lead",
        terapipe_zb2,
        chunks=1,
        bubble=1 / 3,
        in_flight=partial(_one_f_one_b_in_flight, lead=2),
        deferred=True,
    )
)
register(
    Order(
        "interleaved",
        "interleaved 1F1B",
        interleaved,
        tried_chunks=(2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24),
        in_flight=_interleaved_in_flight,
    )
)


def computations(plan: Plan) -> Computations:
    """The computations of each rank, by the plan's order, without transfers.

    Args:
        plan: The plan. Its order says whether it supports it.
    """
    order = order_named(plan.order)
    order.check(plan)
    ranks: Computations = order.build(plan)
    return ranks


def schedule(plan: Plan) -> Schedule:
    """The Schedule of a plan by its order, with transfers. It depends on the number of slices and on what is recomputed
    or offloaded, not on lengths.

    Args:
        plan: The plan.
    """
    return with_transfers(plan, computations(plan))


def _flush(plan: Plan, deferred: bool = False) -> Computations:
    """With several chunks per rank, all slices pass one chunk before the next one begins: breadth first."""
    halves = (Op.I, Op.W) if deferred else (Op.B,)
    ranks = []
    for rank in range(plan.num_ranks):
        forwards = [Action(Op.F, k, s) for k in plan.stages_of(rank) for s in plan.slices]
        ranks.append(forwards + [Action(op, k, s) for op in halves for _, k, s in reversed(forwards)])
    return ranks


def _zero_bubble(plan: Plan, lead: int) -> Computations:
    """Leads of ``lead`` slices per rank still to come, and as many deferred weight halves per rank before, less one."""
    last = plan.num_ranks - 1
    first = _whole_backwards(plan, 0, lead * last)
    return [first, *(_split_backwards(plan, r, lead * (last - r), lead * r - 1) for r in range(1, plan.num_ranks))]


def _whole_backwards(plan: Plan, rank: int, lead: int) -> list[Action]:
    """One rank's forwards and backwards in turn, each backward with ``lead`` more forwards ahead of it than needed on
    the last stage. With a lead of 1 and two microbatches of two slices, written microbatch.slice:

        F0.0 F0.1 F1.0 | B0.1 F1.1 B0.0 | B1.1 B1.0
        warm-up: two       in turn        drain
        slices and lead
    """
    forwards = [Action(Op.F, rank, s) for s in plan.slices]
    backwards = [Action(Op.B, rank, s) for s in _backward_order(plan)]
    return _alternate(forwards, backwards, [n + lead for n in _forwards_before_backward(plan)])


def _split_backwards(plan: Plan, rank: int, lead: int, deferred: int) -> list[Action]:
    """As ``_whole_backwards``, with input and weight halves, of which ``deferred`` weight halves wait.

    Each weight half is done once so many input halves follow its own, right before the next forward, so that the three
    kinds take turns: before input half j comes the weight half of number ``j - 1 - deferred``. In the last microbatch
    all wait for the last input half and are done in a row. Rank 2 of three, with a lead of 0 and one deferred half, two
    microbatches of three slices (numbered 0 to 2 and 3 to 5):

        input halves      I2  I1  I0  I5  I4  I3                slices of a microbatch are last in, first out
        then weight half  .   W2  W1  .   .   W0 W5 W4 W3       one behind, up to ``turns``; the others in a row

        merged with the forwards:   F0 F1 F2 I2 F3 I1 W2 F4 I0 W1 F5 I5 I4 I3 W0 W5 W4 W3

    With recomputation weight halves keep more memory than the activations that they follow, so they do not wait for
    the end.
    """
    slices, before = _backward_order(plan), [n + lead for n in _forwards_before_backward(plan)]
    forwards = [Action(Op.F, rank, s) for s in plan.slices]
    turns = len(slices) - (1 if plan.recomputes else len(plan.grid[-1]))  # the last input half with a W ahead of it
    halves: list[tuple[Action, int]] = []  # with the number of forwards ahead
    for j, s in enumerate(slices):
        if deferred < j <= turns:
            halves.append((Action(Op.W, rank, slices[j - 1 - deferred]), before[j - 1]))
        halves.append((Action(Op.I, rank, s), before[j]))
    halves += [(Action(Op.W, rank, s), before[-1]) for s in slices[max(0, turns - deferred) :]]
    return _alternate(forwards, *zip(*halves, strict=True))


def _turning(plan: Plan, rank: int) -> list[Action]:
    """The last rank of ``terapipe-v``: its two stages are adjacent, so each slice passes both in a row."""
    near, far = plan.stages_of(rank)
    forwards = [Action(Op.F, k, s) for s in plan.slices for k in (near, far)]
    return forwards + [Action(Op.I, k, s) for _, k, s in reversed(forwards)] + _halves(plan, (Op.W, far), (Op.W, near))


def _running_ahead(plan: Plan, rank: int) -> list[Action]:
    """Any other rank of ``terapipe-v``. Its near stage runs ahead of its far stage.

    A slice needs about ``far - near`` computations to return to this rank. In that time the near stage processes the
    slices that follow. So its lead is ``far - near`` slices. With two ranks, rank 0 has the stages 0 and 3; n are
    forwards of stage 0 and f of stage 3, over five slices:

        n0 n1 n2 f0 n3 f1 n4 f2 f3 f4

    In the backward the far stage comes first and has the lead. Its weight halves fill the gaps at the end. On rank 1 of
    three, with the stages 1 and 4 (a lead of 3), i and w are halves of the far stage, I and W of the near one:

        i4 i3 i2 I4 i1 I3 i0 I2 w4 I1 w3 I0 | w2 w1 w0 | W4 W3 W2 W1 W0
        in turn                               what is    nobody waits
                                              left       for these

    Nobody waits for the input gradients of stage 0, so on rank 0 they come after all halves of the far stage.
    """
    near, far = plan.stages_of(rank)
    leads = [far - near + j for j in range(len(plan.slices))]
    near_forwards, far_forwards = ([Action(Op.F, k, s) for s in plan.slices] for k in (near, far))
    forwards = _alternate(near_forwards, far_forwards, leads)
    far_halves, near_inputs = _halves(plan, (Op.I, far), (Op.W, far)), _halves(plan, (Op.I, near))
    if rank == 0:
        backwards = far_halves + near_inputs
    else:
        backwards = _alternate(far_halves, near_inputs, leads) + far_halves[leads[-1] :]
    return forwards + backwards + _halves(plan, (Op.W, near))


def _halves(plan: Plan, *kinds: tuple[Op, int]) -> list[Action]:
    return [Action(op, k, s) for op, k in kinds for s in reversed(plan.slices)]


def _backward_order(plan: Plan) -> list[Slice]:
    return [s for row in plan.grid for s in reversed(row)]


def _forwards_before_backward(plan: Plan) -> list[int]:
    """For each backward, how many forwards precede it on the last stage.

    All those of its own microbatch, and of the next microbatch the same share as this one has done backwards. So memory
    stays level even if microbatches have different numbers of slices. With two microbatches of two slices, written
    microbatch.slice, the last stage then does F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0.
    """
    counts = [len(row) for row in plan.grid]
    total = list(accumulate(counts))
    following = counts[1:] + [0]
    return [
        total[m] + position * following[m] // counts[m] for m in range(len(counts)) for position in range(counts[m])
    ]


def _forwards_before_interleaved_backward(plan: Plan, forwards: "Rounds", backwards: "Rounds") -> list[int]:
    """For each entry of ``backwards``, how many entries of ``forwards`` precede it on the last rank.

    Only the last chunk sets a minimum: the backward of a microbatch can start once its last slice has passed that
    chunk. ``lag`` is the largest (minimum - j) so far, so the result rises by at least one per backward, which the
    argument against deadlock requires (docs/architecture.md). With two ranks, two chunks and four microbatches of one
    slice, written chunk.slice:

        forwards   0.0 0.1 1.0 1.1 0.2 0.3 1.2 1.3
        backwards  1.0 1.1 0.0 0.1 1.2 1.3 0.2 0.3
        result       3   4   5   6   7   8   9  10    backward 1.0 follows forward 1.0, the third; lag is 3
    """
    place = {(c, s): i for i, (c, s) in enumerate(forwards) if s}
    needed: list[int] = []
    lag = 1
    for j, (chunk, s) in enumerate(backwards):
        if s and chunk == plan.chunks - 1:
            lag = max(lag, place[chunk, plan.grid[s.microbatch][-1]] + 1 - j)
        needed.append(j + lag)
    return needed


Rounds = list[tuple[int, Slice | None]]  # chunk and slice; None is padding


def _rounds(slices: Sequence[Slice | None], group: int, chunks: Sequence[int]) -> Rounds:
    """Each group of slices passes one chunk after the other."""
    return [(c, s) for g in range(0, len(slices), group) for c in chunks for s in slices[g : g + group]]


def _alternate(
    forwards: Sequence[Action | None], backwards: Sequence[Action | None], before: Sequence[int]
) -> list[Action]:
    """Merges both lists with ``before[j]`` forwards ahead of backward ``j``, and drops the padding."""
    actions: list[Action | None] = []
    done = 0
    for backward, needed in zip(backwards, before, strict=True):
        if needed > done:
            actions += forwards[done:needed]
            done = needed
        actions.append(backward)
    return [action for action in actions if action is not None]
