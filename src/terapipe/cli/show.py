"""What the verbs print for people."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from terapipe.planning.slices import Plan
from terapipe.reporting import units
from terapipe.search.choose import PlanResult
from terapipe.search.compare import frontier
from terapipe.search.evaluator import PlanEstimate

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console.width = 150  # in a file or a pipe there is room


def decision(found: PlanResult, seconds: float, saved: Path | None) -> None:
    choice = found.chosen
    console.print(
        f"[bold]{choice.plan.order}[/] on {choice.layout}: [bold]{units.seconds(choice.step_time)}[/] per step"
    )
    for name, value in described(choice).items():
        console.print(f"  {name:13s} {value}")
    console.print("\nWhy:")
    for reason in reasons(found):
        console.print(f"  - {reason}")
    if found.runners_up:
        console.print("\nRunners-up, the best of every other order:")
        console.print(choices(found.runners_up, choice))
    if saved:
        console.print(f"\nSaved to {saved}, with layout and costs; Plan.from_json reads the plan in it.")
    console.print(f"\n[dim]planned in {seconds:.1f} s[/]")


def described(choice: PlanEstimate) -> dict[str, str]:
    plan = choice.plan
    out = {
        "layers": "stages of " + runs([b - a for a, b in zip(plan.boundaries, plan.boundaries[1:], strict=False)]),
        "microbatches": runs(plan.sizes) + (" sequences" if plan.batch_size > 1 else " sequence"),
        "slices": slices(plan),
        "recompute": "yes" if plan.recompute else "no",
        "idle": units.share(choice.idle),
        "tokens/s": f"{choice.tokens_per_second:,.0f}",
    }
    if plan.chunks > 1:
        out["chunks"] = f"{plan.chunks} per rank"
    if choice.peak_bytes:
        out["peak memory"] = f"{units.memory(choice.peak_bytes)} per device"
    return out


def slices(plan: Plan) -> str:
    if all(len(row) == 1 for row in plan.lengths):
        return f"none: whole sequences of {plan.seq_len} tokens (do not slice)"
    rows = [f"{len(row)} of {runs(row)}" for row in dict.fromkeys(plan.lengths)]
    return "; or ".join(rows) + " tokens"


def runs(numbers: Sequence[int]) -> str:
    """Equal neighbours drawn together: 120 x 4, 112 x 6."""
    grouped = [(value, len(list(group))) for value, group in groupby(numbers)]
    return ", ".join(f"{value} x {count}" if count > 1 else str(value) for value, count in grouped)


def reasons(found: PlanResult) -> list[str]:
    choice, whole = found.chosen, found.unsliced
    out = []
    if not choice.sliced:
        out.append("slicing does not pay here: shorter slices cost more than the idle time they would save")
    elif whole:
        ratio = whole.step_time / choice.step_time
        out.append(
            f"{ratio:.2f} times as fast as the best without slicing ({whole.plan.order}, "
            f"{units.seconds(whole.step_time)}): {units.share(choice.idle)} idle instead of {units.share(whole.idle)}"
        )
    if found.runners_up:
        other = found.runners_up[0]
        ahead = other.step_time / choice.step_time - 1
        if ahead >= 0:
            out.append(f"{ahead:.1%} faster than the next best order, {other.plan.order}")
        else:
            out.append(f"{other.plan.order} would be {-ahead:.1%} faster, which is not worth cutting sequences for")
    if choice.plan.recompute:
        out.append("without recomputation it would not fit, or be slower")
    if found.price is not None:
        out.append(f"the limit on distinct lengths costs {found.price - 1:.1%}")
    return out


def choices(rows: Sequence[PlanEstimate], best: PlanEstimate | None = None) -> Table:
    """One row each; with the fastest of them as 1.00, or ``best``."""
    fastest = best or min(rows, key=lambda c: c.step_time)
    kept = {id(c) for c in frontier(c for c in rows if c.fits)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ("", "step", "x", "tokens/s", "idle", "peak memory", "fits", "layout", "cut")
    for name in names:
        table.add_column(name, justify="left" if name in ("", "layout", "cut") else "right", no_wrap=True)
    for c in rows:
        named = c.name or c.plan.order
        table.add_row(
            f"{named} *" if c.name and id(c) in kept else named,
            units.seconds(c.step_time),
            f"{c.step_time / fastest.step_time:.2f}",
            f"{c.tokens_per_second:,.0f}",
            units.share(c.idle),
            units.memory(c.peak_bytes) if c.peak_bytes else "?",
            "yes" if c.fits else "[red]no[/]",
            f"{c.layout.dp} x {c.layout.pp} x {c.layout.tp}",
            cut(c.plan),
        )
    return table


def cut(plan: Plan) -> str:
    """Microbatches times slices, in a few words."""
    slices = f"{len(plan.sizes)} x {plan.sizes[0]} seq"
    if len(plan.lengths[0]) > 1:
        slices += f" in {len(plan.lengths[0])} slices"
    chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
    return slices + chunks + (", recompute" if plan.recompute else "")
