"""Plans and comparisons for people: what was chosen, why, and next to what."""

from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from terapipe.planning.slices import Plan
from terapipe.recompute import recompute_title
from terapipe.reporting import charts, html, units

if TYPE_CHECKING:
    from terapipe.search.evaluator import PlanEstimate
    from terapipe.search.result import Comparison, PlanResult

WIDTH = 150  # columns, where there is no terminal


def explain(result: "PlanResult") -> str:
    return as_text(explanation(result))


def as_text(parts: Iterator[RenderableType]) -> str:
    file = StringIO()
    console = Console(file=file, width=WIDTH, highlight=False, soft_wrap=True, color_system=None)
    for part in parts:
        console.print(part)
    return file.getvalue().rstrip("\n")


def explanation(result: "PlanResult") -> Iterator[RenderableType]:
    estimate = result.estimate
    yield f"[bold]{estimate.title}[/] on {estimate.layout}: [bold]{units.seconds(estimate.step_time)}[/] per step"
    for name, value in described(estimate).items():
        yield f"  {name:13s} {value}"
    if why := reasons(result):
        yield "\nWhy:"
        yield from (f"  - {reason}" for reason in why)
    if result.runners_up:
        yield "\nRunners-up, the best of every other order (the slowest are not refined):"
        yield table(result.runners_up, estimate)


def described(estimate: "PlanEstimate") -> dict[str, str]:
    plan = estimate.plan
    out = {
        "order": plan.order,
        "layers": "stages of " + runs([b - a for a, b in pairwise(plan.boundaries)]),
        "microbatches": runs(plan.sizes) + (" sequences" if plan.batch_size > 1 else " sequence"),
        "slices": slices(plan),
        "recompute": recompute_title(plan.recompute),
        "idle": units.share(estimate.idle),
        "tokens/s": f"{estimate.tokens_per_second:,.0f}",
    }
    if plan.chunks > 1:
        out["chunks"] = f"{plan.chunks} stages per rank"
    if estimate.peak_bytes:
        out["peak memory"] = f"{units.memory(estimate.peak_bytes)} per device"
    return out


def slices(plan: Plan) -> str:
    if all(len(row) == 1 for row in plan.lengths):
        return f"none: whole sequences of {plan.seq_len} tokens (do not slice)"
    rows = [f"{len(row)} of {runs(row)}" for row in dict.fromkeys(plan.lengths)]
    return "; or ".join(rows) + " tokens"


def runs(numbers: Sequence[int]) -> str:
    """Equal neighbors together: 120 x 4, 112 x 6."""
    grouped = [(value, len(list(group))) for value, group in groupby(numbers)]
    return ", ".join(f"{value} x {count}" if count > 1 else str(value) for value, count in grouped)


def reasons(result: "PlanResult") -> list[str]:
    estimate, whole = result.estimate, result.unsliced
    out = []
    if result.runners_up and not estimate.sliced:
        out.append("slicing does not pay here: shorter slices cost more than the idle time they would save")
    elif whole and whole is not estimate:
        ratio = whole.step_time / estimate.step_time
        out.append(
            f"{ratio:.2f} times as fast as the best without slicing ({whole.title}, "
            f"{units.seconds(whole.step_time)}): {units.share(estimate.idle)} idle instead of {units.share(whole.idle)}"
        )
    if result.runners_up:
        other = result.runners_up[0]
        ahead = other.step_time / estimate.step_time - 1
        if ahead >= 0:
            out.append(f"{ahead:.1%} faster than the next best order, {other.title}")
        else:
            out.append(f"{other.title} would be {-ahead:.1%} faster, which is not worth cutting sequences for")
    if result.runners_up and estimate.plan.recompute != "none":
        out.append("with less recomputation it would not fit, or be slower")
    if result.source is not None and result.source.tensor_degrees() == [estimate.layout.tp] != [1]:
        out.append("tensor parallelism was not measured: the step is predicted as long as it would be without")
    if result.price is not None:
        out.append(f"the limit on distinct lengths costs {result.price - 1:.1%}")
    return out


HEADER = ("", "step", "x", "tokens/s", "idle", "peak memory", "fits", "layout", "cut")


def table(
    rows: "Sequence[PlanEstimate]", best: "PlanEstimate | None" = None, marked: "set[int] | None" = None
) -> Table:
    """One row each; ``x`` is relative to ``best``, or to the fastest. Rows whose ids are ``marked`` get a star."""
    fastest = best or min(rows, key=lambda e: e.step_time)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for name in HEADER:
        drawn.add_column(name, justify="left" if name in ("", "layout", "cut") else "right", no_wrap=True)
    for e in rows:
        fits = "yes" if e.fits else "[red]no[/]"
        star = " *" if marked and id(e) in marked else ""
        ratio = f"{e.step_time / fastest.step_time:.2f}"
        name, step, *rest = _cells(e)
        drawn.add_row(name + star, step, ratio, *rest[:3], fits, *rest[3:])
    return drawn


def _cells(e: "PlanEstimate") -> tuple[str, ...]:
    return (
        e.title,
        units.seconds(e.step_time),
        f"{e.tokens_per_second:,.0f}",
        units.share(e.idle),
        units.memory(e.peak_bytes) if e.peak_bytes else "?",
        f"{e.layout.dp} x {e.layout.pp} x {e.layout.tp}",
        cut(e.plan),
    )


def cut(plan: Plan) -> str:
    """Microbatches times slices, in a few words."""
    slices = f"{len(plan.sizes)} x {plan.sizes[0]} seq"
    if len(plan.lengths[0]) > 1:
        slices += f" in {len(plan.lengths[0])} slices"
    chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
    return slices + chunks + ("" if plan.recompute == "none" else f", {recompute_title(plan.recompute)} recompute")


# Comparisons


def comparison_parts(comparison: "Comparison") -> Iterator[RenderableType]:
    yield table(comparison.rows, marked={id(e) for e in comparison.front})
    yield "\n[dim]* no other that fits is both faster and smaller[/]"
    if comparison.budget:
        seconds = f"compared in {comparison.seconds:.1f} s"
        yield f"[dim]budget: {units.memory(comparison.budget)} per device; {seconds}[/]"


def comparison_text(comparison: "Comparison") -> str:
    return as_text(comparison_parts(comparison))


def comparison_chart(comparison: "Comparison") -> str:
    points = {e.title: (float(e.peak_bytes), e.step_time) for e in comparison.rows}
    front = {e.title for e in comparison.front}
    return charts.frontier(points, front, "peak memory per device", "step time", comparison.budget)


def comparison_page(comparison: "Comparison", model: str) -> str:
    lead = f"{model} on {comparison.where}: {comparison.fastest.title} is fastest of what fits."
    header = ("", "step time", "tokens/s", "idle", "peak memory", "layout dp x pp x tp", "cut", "fits")
    cells = [(*_cells(e), "yes" if e.fits else "no") for e in comparison.rows]
    sections = [("Time against memory", comparison_chart(comparison)), ("All of them", html.table(header, cells))]
    return html.page("Orders compared", lead, sections)
