"""The report of a run, written from the files in its folder. It can be written at any time, also during the run."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median

from terapipe import files
from terapipe.reporting import html
from terapipe.reporting.page import report
from terapipe.reporting.units import digits, memory, seconds, share
from terapipe.reporting.view import RunView
from terapipe.scheduling.timeline import Timeline
from terapipe.training.logging.metrics import read
from terapipe.training.logging.run_charts import Rows, charts, memory_of, values_of

_RECENT = 50  # steps whose mean or median is shown
_SAMPLES, _EVENTS = 3, 100  # how many of the last ones are shown


def write_report(folder: Path) -> Path | None:
    """Write ``report.html`` to the folder, unless there is nothing to show."""
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
        numbers = [("", html.table(list(facts), [list(facts.values())]))] if facts else []
        page = html.page(title, lead, [part for part in (*numbers, *first, *last) if part[1]])
    files.write(folder / "report.html", page)
    return folder / "report.html"


def _timelines(folder: Path) -> tuple[list[RunView], str]:
    """The predicted and the measured timeline, as far as there are any, and notes on files that cannot be read."""
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
    losses, evaluated = values_of(rows, "loss"), values_of(rows, "eval_loss")
    if not losses:
        return "No step has been written down yet."
    words = f"{losses[-1][0]:,} steps: the loss went from {digits(losses[0][1])} to {digits(_recent(losses))}"
    return words + (f", in evaluation to {digits(evaluated[-1][1])}." if evaluated else ".")


def _recent(values: Sequence[tuple[int, float]], of: Callable[[Iterable[float]], float] = fmean) -> float:
    return of([value for _, value in values[-_RECENT:]])


def _facts(rows: Rows) -> dict[str, str]:
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
    samples = [row for row in rows if row.get("sample")][-_SAMPLES:]
    return "".join(f"<h3>step {row['step']:,}</h3><pre>{escape(str(row['sample']))}</pre>" for row in reversed(samples))


def _events(rows: Rows) -> str:
    """All events, but only the last checkpoint."""
    events = [row for row in rows if row.get("event")]
    saved = [row for row in events if row["event"] == "checkpoint"]
    listed = [row for row in events if row["event"] != "checkpoint" or row is saved[-1]]
    cells = [[f"{row['step']:,}", str(row["event"]), str(row.get("message") or "")] for row in listed[-_EVENTS:]]
    notes = [f"The last {_EVENTS} of {len(listed):,} are listed."] if len(listed) > _EVENTS else []
    notes += [f"{len(saved) - 1:,} earlier checkpoints are not listed."] if len(saved) > 1 else []
    note = f"<p class='note'>{' '.join(notes)}</p>" if notes else ""
    return f"<div class='events'>{html.table(['step', 'event', ''], cells)}</div>{note}" if cells else ""


def _settings(config: Path) -> str:
    if not config.exists():
        return ""
    text = config.read_text(encoding="utf-8", errors="replace")
    return f"<details><summary>config.toml</summary><pre>{escape(text)}</pre></details>"
