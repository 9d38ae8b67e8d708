"""The curves on the page of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean

from terapipe.reporting.charts import Point, curves
from terapipe.reporting.units import digits, memory, memory_unit, seconds, share
from terapipe.training.logging.rows import Rows, memory_of, values_of

Sections = list[tuple[str, str]]
_WIDE, _SMALL = (960, 320, 900), (460, 230, 400)  # charts: width, height, and the most points of a curve
_LINES = 6  # ranks whose memory is drawn each


def charts(rows: Rows) -> Sections:
    loss = _chart(rows, {"training": "loss", "evaluation": "eval_loss"}, "loss", digits) + _thinning(rows)
    learning = [
        _chart(rows, {"": "lr"}, "learning rate", _rate, small=True, zero=True),
        _chart(rows, {"": "grad_norm"}, "norm of the gradients", digits, small=True, zero=True),
    ]
    speed = [
        _chart(rows, {"measured": "seconds", "predicted": "predicted"}, "step time", seconds, small=True, zero=True),
        _chart(rows, {"": "tokens_per_second"}, "tokens per second", "{:,.0f}".format, small=True, zero=True),
        _chart(rows, {"": "idle"}, "idle share of the pipeline's time", share, small=True, zero=True),
    ]
    return [
        ("Loss", loss),
        ("Optimizer", _panels(learning)),
        ("Speed", _panels(speed)),
        ("Memory of each rank", _memory(rows)),
    ]


def _panels(drawn: Sequence[str]) -> str:
    found = "".join(f"<div>{chart}</div>" for chart in drawn if chart)
    return f"<div class='panels'>{found}</div>" if found else ""


def _chart(
    rows: Rows,
    keys: Mapping[str, str],
    label: str,
    form: Callable[[float], str],
    *,
    small: bool = False,
    zero: bool = False,
) -> str:
    """SVG with a note, or nothing where there are no values. ``keys``: the name of each series, and its key."""
    given = {name: values for name, key in keys.items() if (values := values_of(rows, key))}
    if not given:
        return ""
    top, note = _off_scale(next(iter(given.values())), form) if zero else (math.inf, "")
    width, height, most = _SMALL if small else _WIDE
    points = {name: thinned(values, most) for name, values in given.items()}
    drawn = curves(points, label, form, zero=zero, top=top, width=width, height=height)
    return drawn + (f"<p class='note'>{escape(note)}</p>" if note else "")


def _rate(value: float) -> str:
    return digits(value) if value >= 1e-5 or value == 0 else f"{value:.1e}"


def _off_scale(values: Sequence[tuple[int, float]], form: Callable[[float], str]) -> tuple[float, str]:
    """Where the scale ends, so that a few extreme steps do not flatten all others; and a note that owns up to it."""
    ordered = sorted(value for _, value in values)
    usual = ordered[int(0.995 * (len(ordered) - 1))]
    if len(ordered) < 5 or ordered[-1] <= 3 * usual:
        return math.inf, ""
    top = 1.4 * usual
    step, most = max(values, key=lambda pair: pair[1])
    above = sum(value > top for value in ordered)
    return top, f"Off the scale: {above:,} of {len(ordered):,} values, the highest {form(most)} at step {step:,}."


def _thinning(rows: Rows) -> str:
    told = (
        "Where there are more steps than fit, here and below, a point is the mean of several neighbouring steps, and "
    )
    told += "the pale band spans the lowest and the highest of them."
    return f"<p class='note'>{told}</p>" if len(values_of(rows, "loss")) > _SMALL[2] else ""


def thinned(values: Sequence[tuple[int, float]], most: int) -> list[Point]:
    """At most so many points: each the mean of as many steps as that takes, with their lowest and highest."""
    size = math.ceil(len(values) / most)
    buckets = (values[at : at + size] for at in range(0, len(values), size or 1))
    return [_mean(bucket) for bucket in buckets]


def _mean(bucket: Sequence[tuple[int, float]]) -> Point:
    ys = [y for _, y in bucket]
    return Point(bucket[-1][0], fmean(ys), min(ys), max(ys))


def _memory(rows: Rows) -> str:
    held = memory_of(rows)
    if not held:
        return ""
    last = held[-1][1]
    ranks = {f"rank {rank}": rank for rank in range(len(last))}
    if len(last) > _LINES:
        ordered = sorted(range(len(last)), key=lambda rank: last[rank])
        picked = {"fullest": ordered[-1], "middle": ordered[len(ordered) // 2], "emptiest": ordered[0]}
        ranks = {f"rank {rank}, {name}": rank for name, rank in picked.items()}
    shown = {
        name: thinned([(step, float(sizes[rank])) for step, sizes in held if rank < len(sizes)], _WIDE[2])
        for name, rank in ranks.items()
    }
    unit = memory_unit(max(size for _, sizes in held for size in sizes))
    name = memory(unit).split()[-1]
    return curves(shown, "in use", lambda v: f"{digits(v / unit)} {name}", zero=True, unit=unit, height=260)
