"""Tables of studies that go beyond the paper: other orders, larger batches, other models and clusters."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terapipe.paper.published import SETTINGS, Setting
from terapipe.paper.studies import CASES, Outcome, largest_throughput, orders, outcome
from terapipe.reporting import charts, units
from terapipe.reporting.plans import cut
from terapipe.search.evaluator import PlanEstimate


class Section(NamedTuple):
    heading: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    picture: str = ""


GROWN = (5, 8, 10)  # settings, one of each model in which slicing matters


def sections(*, question: bool, grow: bool, what_if: bool) -> Iterator[Section]:
    if question:
        header = ("setting", "order", "step", "idle", "peak memory", "cut")
        rows = [row for setting in SETTINGS for row in _orders(setting)]
        yield Section("The ten settings with every order, within 16 GiB", header, rows)
    if grow:
        header = ("setting", "order", "tokens/s", "batch", "peak memory", "cut")
        rows = [row for number in GROWN for row in _grown(SETTINGS[number - 1])]
        yield Section("With batches up to sixteen times as large, as far as 16 GiB permit", header, rows)
    if what_if:
        header = ("model, cluster, batch x tokens", "way", "step", "x", "peak memory", "how")
        outcomes = [outcome(case) for case in CASES]
        rows = [row for each in outcomes for row in _outcome(each)]
        yield Section("Modern models and clusters, with costs that were not measured", header, rows, picture(outcomes))


def picture(outcomes: Sequence[Outcome]) -> str:
    """Step times relative to the planned one. What does not fit has no bar."""
    names = ("planned", "best 1F1B", "FSDP, sequences over devices (estimate)")
    ratios = {}
    for each in outcomes:
        case, planned = each.case, each.planned.step_time
        one_f_one_b = each.best_1f1b.step_time / planned if each.best_1f1b else 0.0
        other = each.others[0].step_time / planned if each.others else 0.0
        ratios[f"{case.model}, {case.where}, {case.batch_size} x {case.seq_len // 1024}k"] = (1.0, one_f_one_b, other)
    return charts.groups(
        ratios, names, "Step time relative to the planned one", lambda x: f"{x:.2f}" if x else "none fits"
    )


def _orders(setting: Setting) -> Iterator[tuple[str, ...]]:
    for i, c in enumerate(orders(setting)):
        first = "" if i else f"({setting.number}) {setting.model}"
        yield first, c.name, units.seconds(c.step_time), units.share(c.idle), units.memory(c.peak_bytes), cut(c.plan)


def _grown(setting: Setting) -> Iterator[tuple[str, ...]]:
    for i, c in enumerate(largest_throughput(setting).values()):
        first = "" if i else f"({setting.number}) {setting.model}"
        batch_size = str(c.plan.batch_size * c.layout.dp)
        yield first, c.name, f"{c.tokens_per_second:,.0f}", batch_size, units.memory(c.peak_bytes), cut(c.plan)


def _outcome(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    case, planned, usual = outcome.case, outcome.planned, outcome.best_1f1b
    first = f"{case.model}, {case.where}, {case.batch_size} x {case.seq_len // 1024}k"
    yield (first, *_row("planned", planned, planned))
    yield ("", *_row("best 1F1B", usual, planned)) if usual else ("", "best 1F1B", "none fits", "", "", "")
    for e in outcome.others:
        step, peak = units.seconds(e.step_time), units.memory(e.peak_bytes)
        yield "", e.name, step, f"{e.step_time / planned.step_time:.2f}", peak, e.note


def _row(name: str, estimate: PlanEstimate, best: PlanEstimate) -> tuple[str, ...]:
    layout = estimate.layout
    how = f"{estimate.plan.order}, {layout.dp} x {layout.pp} x {layout.tp}, {cut(estimate.plan)}"
    ratio = f"{estimate.step_time / best.step_time:.2f}"
    return name, units.seconds(estimate.step_time), ratio, units.memory(estimate.peak_bytes), how
