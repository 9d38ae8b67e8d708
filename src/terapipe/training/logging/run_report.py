"""The report of a run, written from the files in its folder. It can be written at any time, also during the run.

::

    metrics.jsonl                   -> numbers, curves, generated text, events
    predicted.json, timeline.json   -> the plan as predicted and as measured, to zoom into
    config.toml                     -> settings
                                          |
                                          v
                                    report.html, one file without references to any other

Nothing but these files is read, so the report of a run that crashed is as good as that of one that ended.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from terapipe import files
from terapipe.reporting import style
from terapipe.reporting.charts import Point, curves
from terapipe.reporting.page import report
from terapipe.reporting.style import digits, memory, memory_unit, seconds, share
from terapipe.reporting.view import RunView
from terapipe.scheduling.timeline import Timeline
from terapipe.training.logging.metrics import read

Rows = Sequence[Mapping[str, Any]]
Sections = list[tuple[str, str]]
# A chart of a whole line, and one of two in a line.
_WIDE, _SMALL = (960, 320, 900), (460, 230, 400)  # charts: width, height, maximum number of points
_MAX_RANKS = 6  # up to this number, each rank has a curve of its memory


def values_of(rows: Rows, key: str) -> list[tuple[int, float]]:
    """Returns steps and values of a key, without steps that have no finite number.

    Args:
        rows: Of metrics.jsonl.
        key: Of a row.
    """
    return [
        (row["step"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def memory_of(rows: Rows) -> list[tuple[int, list[float]]]:
    """Returns steps and the bytes used on each rank, without steps at which one of them is missing.

    Args:
        rows: Of metrics.jsonl.
    """
    return [(row["step"], row["memory"]) for row in rows if row.get("memory") and None not in row["memory"]]


def _metrics(rows: Rows) -> str:
    """What the objective reported beside the loss, one chart each: margins of preferences, the share of a teacher, the
    balance of routers. Names are the objective's own, so they are taken as they come."""
    named = [{"step": row["step"], **row["metrics"]} for row in rows if row.get("metrics")]
    names = sorted({name for row in named for name in row} - {"step"})
    return _panels([_chart(named, {"": name}, name, digits, small=True) for name in names])


def charts(rows: Rows) -> Sections:
    """Returns all curves of a run, as titles and HTML. A section without values is empty, and left out later.

    Args:
        rows: Of metrics.jsonl.
    """
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
        ("Objective", _metrics(rows)),
        ("Optimizer", _panels(learning)),
        ("Speed", _panels(speed)),
        ("Memory of each rank", _memory(rows)),
    ]


def _panels(charts: Sequence[str]) -> str:
    """Small charts beside each other; empty ones are left out."""
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
    """Draws values of several keys in one chart.

    Args:
        rows: Of metrics.jsonl.
        keys: The name of each series, and its key in rows.
        label: Of the axis.
        form: Formats a value.
        small: Whether the chart shares its line with others.
        zero: Whether the axis begins at 0, and extreme values may be cut off.

    Returns:
        SVG with a note, or nothing if there are no values.
    """
    series = {name: values for name, key in keys.items() if (values := values_of(rows, key))}
    if not series:
        return ""
    top, note = _off_scale(next(iter(series.values())), form) if zero else (math.inf, "")
    width, height, most = _SMALL if small else _WIDE
    points = {name: thin(values, most) for name, values in series.items()}
    chart = curves(points, label, form, zero=zero, top=top, width=width, height=height)
    return chart + (f"<p class='note'>{escape(note)}</p>" if note else "")


def _rate(value: float) -> str:
    """A learning rate: small ones with an exponent."""
    return digits(value) if value >= 1e-5 or value == 0 else f"{value:.1e}"


def _off_scale(values: Sequence[tuple[int, float]], form: Callable[[float], str]) -> tuple[float, str]:
    """The end of the scale, so that a few extreme steps do not flatten all others, and a note that says so.

    A value is extreme if it is more than three times that of the 99.5th percentile: the first step, which compiles, or
    one that waited for a full disk.
    """
    ordered = sorted(value for _, value in values)
    usual = ordered[int(0.995 * (len(ordered) - 1))]
    if len(ordered) < 5 or ordered[-1] <= 3 * usual:
        return math.inf, ""
    top = 1.4 * usual
    step, most = max(values, key=lambda pair: pair[1])
    above = sum(value > top for value in ordered)
    return top, f"Off the scale: {above:,} of {len(ordered):,} values, the highest {form(most)} at step {step:,}."


def _thinning(rows: Rows) -> str:
    """A note on how the values of long runs are drawn; none for a short one."""
    note = (
        "Where there are more steps than fit, here and below, a point is the mean of several neighboring steps, and "
        "the pale band spans the lowest and the highest of them."
    )
    return f"<p class='note'>{note}</p>" if len(values_of(rows, "loss")) > _SMALL[2] else ""


def thin(values: Sequence[tuple[int, float]], most: int) -> list[Point]:
    """Reduces many values to few points. Each is the mean of several steps, with their minimum and maximum, which are
    drawn as a band: a spike of one step stays visible.

    Args:
        values: Steps and values, in order.
        most: Points.
    """
    size = math.ceil(len(values) / most)
    buckets = (values[at : at + size] for at in range(0, len(values), size or 1))
    return [_mean(bucket) for bucket in buckets]


def _mean(bucket: Sequence[tuple[int, float]]) -> Point:
    """A bucket as a point, at its last step."""
    ys = [y for _, y in bucket]
    return Point(bucket[-1][0], fmean(ys), min(ys), max(ys))


def _memory(rows: Rows) -> str:
    """Curves of all ranks; of many ranks the fullest, the one in the middle and the emptiest, by their last values.

    Stages early in the pipeline keep more slices in flight, so ranks differ even if their layers are alike.
    """
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
        name: thin([(step, float(sizes[rank])) for step, sizes in sizes_by_step if rank < len(sizes)], _WIDE[2])
        for name, rank in ranks.items()
    }
    unit = memory_unit(max(size for _, sizes in sizes_by_step for size in sizes))
    name = memory(unit).split()[-1]
    return curves(series, "in use", lambda v: f"{digits(v / unit)} {name}", zero=True, unit=unit, height=260)


_RECENT = 50  # steps whose mean or median is shown
_SAMPLES, _EVENTS = 3, 100  # how many of the last ones are shown


def write_report(folder: Path) -> Path | None:
    """Writes `report.html` to the folder of a run.

    Args:
        folder: Of the run.

    Returns:
        The file; None if there is nothing to show.
    """
    rows = [row for row in read(folder) if isinstance(row.get("step"), int)]
    shown, notes = _timelines(folder)
    config = folder / "config.toml"
    if not rows and not shown and not config.exists():
        return None
    title, lead, facts = f"Training run {folder.resolve().name}", _lead(rows), _facts(rows)
    first = [*charts(rows), ("Generated text", _samples(rows))]
    last = [("Events", _events(rows)), ("Settings", _settings(config) + notes)]
    if shown:
        page = report(title, lead, shown, facts=facts, first=first, sections=[part for part in last if part[1]])
    else:
        numbers = [("", style.table(list(facts), [list(facts.values())]))] if facts else []
        page = style.page(title, lead, [part for part in (*numbers, *first, *last) if part[1]])
    files.write(folder / "report.html", page)
    return folder / "report.html"


def _timelines(folder: Path) -> tuple[list[RunView], str]:
    """The predicted and the measured timeline, as far as there are any, and notes on files that cannot be read. A
    damaged one must not cost the rest of the report."""
    shown, notes = [], ""
    for name, file in (("predicted", "predicted.json"), ("measured", "timeline.json")):
        path = folder / file
        if path.exists():
            try:
                timeline = Timeline.from_json(path.read_text(encoding="utf-8"))
                shown.append(RunView.of(name, timeline))
            except ValueError as error:
                notes += f"<p class='note'>{file} is not shown: {escape(str(error))}</p>"
    return shown, notes


def _lead(rows: Rows) -> str:
    """The first sentence: how many steps, and how far the loss went down, as a mean of the last ones."""
    losses, evaluated = values_of(rows, "loss"), values_of(rows, "eval_loss")
    if not losses:
        return "No step has been written down yet."
    words = f"{losses[-1][0]:,} steps: the loss went from {digits(losses[0][1])} to {digits(_recent(losses))}"
    return words + (f", in evaluation to {digits(evaluated[-1][1])}." if evaluated else ".")


def _recent(values: Sequence[tuple[int, float]], of: Callable[[Iterable[float]], float] = fmean) -> float:
    """Mean or median of the last _RECENT values: a single step is noise."""
    return of([value for _, value in values[-_RECENT:]])


def _facts(rows: Rows) -> dict[str, str]:
    """The row of numbers at the top. A number that there is not is left out, with its heading.

    Speed is a median of the last steps, which one slow step does not change; loss a mean, because every step counts.
    """
    facts = {}
    if steps := values_of(rows, "seconds"):
        facts["steps"] = f"{steps[-1][0]:,}"
    if tokens := values_of(rows, "tokens"):
        facts["tokens"] = f"{tokens[-1][1]:,.0f}"
    if losses := values_of(rows, "loss"):
        facts[f"loss, mean of last {min(len(losses), _RECENT)}"] = digits(_recent(losses))
    if evaluated := values_of(rows, "eval_loss"):
        step, best = min(evaluated, key=lambda pair: pair[1])
        facts["best evaluation loss"] = f"{digits(best)} at step {step:,}"
    if perplexity := values_of(rows, "perplexity"):
        facts["perplexity"] = digits(perplexity[-1][1])
    if speed := values_of(rows, "tokens_per_second"):
        facts["tokens/s"] = f"{_recent(speed, median):,.0f}"
    if steps:
        facts["step time"] = seconds(_recent(steps, median))
    if predicted := values_of(rows, "predicted"):
        ratio = _recent(steps, median) / predicted[-1][1] if steps and predicted[-1][1] else math.nan
        facts["predicted"] = seconds(predicted[-1][1]) + (f" ({ratio:.2f} x)" if math.isfinite(ratio) else "")
    if idle := values_of(rows, "idle"):
        facts["idle"] = share(idle[-1][1])
    if sizes_by_step := memory_of(rows):
        facts["memory, fullest rank"] = memory(max(max(sizes) for _, sizes in sizes_by_step))
    return facts


def _samples(rows: Rows) -> str:
    """The last few generated texts, the newest first.

    They may contain anything, so they are escaped.
    """
    samples = [row for row in rows if row.get("sample")][-_SAMPLES:]
    return "".join(f"<h3>step {row['step']:,}</h3><pre>{escape(str(row['sample']))}</pre>" for row in reversed(samples))


def _events(rows: Rows) -> str:
    """All events, but only the last checkpoint: there may be thousands.

    Of very many events the last _EVENTS are listed, and a note says how many there were.
    """
    events = [row for row in rows if row.get("event")]
    saved = [row for row in events if row["event"] == "checkpoint"]
    listed = [row for row in events if row["event"] != "checkpoint" or row is saved[-1]]
    cells = [[f"{row['step']:,}", str(row["event"]), str(row.get("message") or "")] for row in listed[-_EVENTS:]]
    notes = [f"The last {_EVENTS} of {len(listed):,} are listed."] if len(listed) > _EVENTS else []
    notes += [f"{len(saved) - 1:,} earlier checkpoints are not listed."] if len(saved) > 1 else []
    note = f"<p class='note'>{' '.join(notes)}</p>" if notes else ""
    return f"<div class='events'>{style.table(['step', 'event', ''], cells)}</div>{note}" if cells else ""


def _settings(config: Path) -> str:
    """The configuration as it was written at the start, folded up."""
    if not config.exists():
        return ""
    text = config.read_text(encoding="utf-8", errors="replace")
    return f"<details><summary>config.toml</summary><pre>{escape(text)}</pre></details>"
