"""How the microbatches are cut: a bar for each, as long as its tokens, its slices in their shades."""

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from terapipe.planning.slices import Plan
from terapipe.reporting.palette import lightness, of_op, on
from terapipe.reporting.shown import Shown
from terapipe.reporting.words import count
from terapipe.scheduling.actions import Op

_MOST = 8  # different ways of cutting that are drawn


def charts(shown: Sequence[Shown]) -> str:
    """HTML. Runs that are cut alike are drawn once."""
    cuts: dict[tuple[object, ...], list[Shown]] = {}
    for s in shown:
        cuts.setdefault((s.timeline.plan.sizes, s.timeline.plan.lengths), []).append(s)
    return "".join(_plan(same[0].timeline.plan, same if len(cuts) > 1 else []) for same in cuts.values())


def _plan(plan: Plan, runs: Sequence[Shown]) -> str:
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for m, key in enumerate(zip(plan.sizes, plan.lengths, strict=True)):
        alike.setdefault(key, []).append(m)
    head = f"<h3>{escape(', '.join(s.name for s in runs))}</h3>" if runs else ""
    drawn = "".join(_microbatch(size, lengths, which) for (size, lengths), which in list(alike.items())[:_MOST])
    rest = len(alike) - _MOST
    more = f"<p class='note'>{count(rest, 'other way')} of cutting not drawn.</p>" if rest > 0 else ""
    return f"{head}<div class='cuts'>{drawn}</div>{more}"


def _microbatch(size: int, lengths: Sequence[int], which: Sequence[int]) -> str:
    times = f" <b>&times; {len(which)}</b>" if len(which) > 1 else ""
    spread = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    note = (
        f"{count(size, 'sequence')} of {count(sum(lengths), 'token')}, {count(len(lengths), 'slice')} of {spread}"
        if len(lengths) > 1
        else f"{count(size, 'sequence')} of {count(sum(lengths), 'token')}, whole"
    )
    contexts = accumulate(lengths, initial=0)
    slices = (_slice(i, n, context, lengths) for i, (n, context) in enumerate(zip(lengths, contexts, strict=False)))
    return f"<div><p>{_which(which)}{times} <small>{note}</small></p><div class='cut'>{''.join(slices)}</div></div>"


def _slice(number: int, length: int, context: int, lengths: Sequence[int]) -> str:
    light = lightness(number, len(lengths))
    wide = length / sum(lengths)
    label = str(length) if wide > 0.013 * len(str(length)) else ""
    title = f"slice {number}: {count(length, 'token')} after {context}"
    style = f"flex:{length} 0 0;background:{of_op(Op.F, light)};color:{on(light)}"
    return f"<i title='{title}' style='{style}'>{label}</i>"


def _which(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"microbatch {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"microbatches {numbers[0]} to {numbers[-1]}"
    return "microbatches " + ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")
