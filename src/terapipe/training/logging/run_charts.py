"""The charts in the report of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from terapipe.reporting.charts import Point, curves
from terapipe.reporting.units import digits, memory, memory_unit, seconds, share

Rows = Sequence[Mapping[str, Any]]
Sections = list[tuple[str, str]]
_WIDE, _SMALL = (960, 320, 900), (460, 230, 400)  # charts: width, height, maximum number of points
_MAX_RANKS = 6  # up to this number, each rank has a curve of its memory


def values_of(rows: Rows, key: str) -> list[tuple[int, float]]:
    """Steps and values of a key, without steps that have no finite number."""
    return [
        (row["step"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def memory_of(rows: Rows) -> list[tuple[int, list[float]]]:
    """Steps and the bytes used on each rank, without steps at which one of them is unknown."""
    return [(row["step"], row["memory"]) for row in rows if row.get("memory") and None not in row["memory"]]


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


def _panels(charts: Sequence[str]) -> str:
    panels = "".join(f"<div>{chart}</div>" for chart in charts if chart)
    return f"<div class='panels'>{panels}</div>" if panels else ""


def _chart(
    rows: Rows,
    keys: Mapping[str, str],
    label: str,
    form: Callable[[float], str],
    *,
    small: bool = False,
    zero: bool = False,
) -> str:
    """SVG with a note, or nothing if there are no values. ``keys`` maps the name of each series to its key in rows."""
    series = {name: values for name, key in keys.items() if (values := values_of(rows, key))}
    if not series:
        return ""
    top, note = _off_scale(next(iter(series.values())), form) if zero else (math.inf, "")
    width, height, most = _SMALL if small else _WIDE
    points = {name: thinned(values, most) for name, values in series.items()}
    chart = curves(points, label, form, zero=zero, top=top, width=width, height=height)
    return chart + (f"<p class='note'>{escape(note)}</p>" if note else "")


def _rate(value: float) -> str:
    return digits(value) if value >= 1e-5 or value == 0 else f"{value:.1e}"


def _off_scale(values: Sequence[tuple[int, float]], form: Callable[[float], str]) -> tuple[float, str]:
    """The end of the scale, so that a few extreme steps do not flatten all others, and a note that says so."""
    ordered = sorted(value for _, value in values)
    usual = ordered[int(0.995 * (len(ordered) - 1))]
    if len(ordered) < 5 or ordered[-1] <= 3 * usual:
        return math.inf, ""
    top = 1.4 * usual
    step, most = max(values, key=lambda pair: pair[1])
    above = sum(value > top for value in ordered)
    return top, f"Off the scale: {above:,} of {len(ordered):,} values, the highest {form(most)} at step {step:,}."


def _thinning(rows: Rows) -> str:
    note = (
        "Where there are more steps than fit, here and below, a point is the mean of several neighboring steps, and "
        "the pale band spans the lowest and the highest of them."
    )
    return f"<p class='note'>{note}</p>" if len(values_of(rows, "loss")) > _SMALL[2] else ""


def thinned(values: Sequence[tuple[int, float]], most: int) -> list[Point]:
    """At most ``most`` points. Each is the mean of several steps, with their minimum and maximum."""
    size = math.ceil(len(values) / most)
    buckets = (values[at : at + size] for at in range(0, len(values), size or 1))
    return [_mean(bucket) for bucket in buckets]


def _mean(bucket: Sequence[tuple[int, float]]) -> Point:
    ys = [y for _, y in bucket]
    return Point(bucket[-1][0], fmean(ys), min(ys), max(ys))


def _memory(rows: Rows) -> str:
    sizes_by_step = memory_of(rows)
    if not sizes_by_step:
        return ""
    last = sizes_by_step[-1][1]
    ranks = {f"rank {rank}": rank for rank in range(len(last))}
    if len(last) > _MAX_RANKS:
        ordered = sorted(range(len(last)), key=lambda rank: last[rank])
        picked = {"fullest": ordered[-1], "middle": ordered[len(ordered) // 2], "emptiest": ordered[0]}
        ranks = {f"rank {rank}, {name}": rank for name, rank in picked.items()}
    series = {
        name: thinned([(step, float(sizes[rank])) for step, sizes in sizes_by_step if rank < len(sizes)], _WIDE[2])
        for name, rank in ranks.items()
    }
    unit = memory_unit(max(size for _, sizes in sizes_by_step for size in sizes))
    name = memory(unit).split()[-1]
    return curves(series, "in use", lambda v: f"{digits(v / unit)} {name}", zero=True, unit=unit, height=260)
