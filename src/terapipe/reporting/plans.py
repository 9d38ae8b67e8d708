"""Plans and comparisons for people: what was chosen, why, and next to what.

Every text exists once, as parts (strings with rich's markup, and tables), and is shown in two ways: a console draws the
parts with colors and in its own width (``explanation``, ``comparison_parts``), or ``as_text`` makes plain text of them,
for ``str(result)``. ``print(terapipe.plan(...))`` therefore says what ``terapipe plan`` prints.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from io import StringIO
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from terapipe.planning.device import Device, usable_memory
from terapipe.planning.hardware import Cluster
from terapipe.planning.recompute import recompute_title
from terapipe.planning.slices import Plan
from terapipe.reporting import charts, style

if TYPE_CHECKING:
    from terapipe.search.evaluator import PlanEstimate
    from terapipe.search.result import Comparison, PlanResult
    from terapipe.search.source import Source

WIDTH = 170  # columns, where there is no terminal


def explain(result: "PlanResult") -> str:
    """A planner's result as plain text: what was chosen, why, and next to what.

    Args:
        result: Of ``plan`` or ``estimate``.
    """
    return as_text(explanation(result))


def as_text(parts: Iterator[RenderableType]) -> str:
    """Renders parts as plain text, without colors, 170 columns wide.

    Args:
        parts: As ``explanation`` yields them.
    """
    file = StringIO()
    console = Console(file=file, width=WIDTH, highlight=False, soft_wrap=True, color_system=None)
    for part in parts:
        console.print(part)
    return file.getvalue().rstrip("\n")


def explanation(result: "PlanResult") -> Iterator[RenderableType]:
    """The parts of ``explain``, for a console that draws tables itself::

        terapipe-v on dp 1 x pp 8 x tp 4: 393 ms per step        the plan, and its facts one per line
          layers        16 x 2, 8 x 1 per stage
          ...
        Why:                                                     what it gains, and what bounds it
          - 1.08 times as fast as the best without slicing ...
        Runners-up, the best of every other order ...            a table

    Args:
        result: Of ``plan`` or ``estimate``. The latter has no runners-up and fewer reasons.
    """
    estimate = result.estimate
    yield f"[bold]{estimate.title}[/] on {estimate.layout}: [bold]{style.seconds(estimate.step_time)}[/] per step"
    for name, value in (describe(estimate) | {"budget": budget_title(result)}).items():
        if value:
            yield f"  {name:13s} {value}"
    if why := reasons(result):
        yield "\nWhy:"
        yield from (f"  - {reason}" for reason in why)
    if result.runners_up:
        yield "\nRunners-up, the best of every other order, each in its own best layout:"
        yield table(result.runners_up, estimate)


def describe(estimate: "PlanEstimate") -> dict[str, str]:
    """Facts of a plan by name, in the order in which they are shown.

    Args:
        estimate: A plan with its predicted times and bytes.
    """
    plan = estimate.plan
    out = {
        "order": plan.order,
        "layers": runs([b - a for a, b in pairwise(plan.boundaries)]) + " per stage",
        "microbatches": microbatches(plan),
        "slices": slices(plan),
        "recompute": recompute_title(plan.recompute),
        "idle": style.share(estimate.idle),
        "tokens/s": f"{estimate.tokens_per_second:,.0f}",
    }
    if plan.chunks > 1:
        out["chunks"] = f"{plan.chunks} stages per rank"
    if estimate.peak_bytes:
        out["peak memory"] = f"{style.memory(estimate.peak_bytes)} per device"
    return out


def slices(plan: Plan) -> str:
    """The lengths of the slices, in a few words: "4: 704, 576, 2 x 384 tokens".

    Args:
        plan: Its microbatches may be cut in several ways, which are all named.
    """
    if all(len(row) == 1 for row in plan.lengths):
        return f"none: whole sequences of {plan.seq_len} tokens (do not slice)"
    rows = [f"{len(row)}: {runs(row)}" for row in dict.fromkeys(plan.lengths)]
    return "; or ".join(rows) + " tokens"


def runs(numbers: Sequence[int]) -> str:
    """Writes numbers with equal neighbors together, as everywhere the count first: "4 x 120, 6 x 112".

    Args:
        numbers: Such as lengths of slices, or layers of stages.
    """
    grouped = [(value, len(list(group))) for value, group in groupby(numbers)]
    return ", ".join(f"{count} x {value}" if count > 1 else str(value) for value, count in grouped)


def microbatches(plan: Plan) -> str:
    """Writes the number of microbatches x sequences in each: "8 x 1 seq".

    Args:
        plan: Microbatches may have different sizes.
    """
    return ", ".join(f"{count} x {size}" for size, count in Counter(plan.sizes).items()) + " seq"


def budget_title(result: "PlanResult | Comparison") -> str:
    """The memory budget, and what it leaves of the device's memory; empty if the costs have none.

    Args:
        result: Anything with a budget, a request and a source.
    """
    if result.budget is None:
        return ""
    text, device = f"{style.memory(result.budget)} per device", described_device(result.source)
    if device is None or (usable := usable_memory(device)) == device.memory:
        return text
    if result.request.budget is not None:
        too_much = result.budget > usable
        return text + (f", more than the {style.memory(usable)} that are usable" if too_much else "")
    taken = f"{style.memory(device.memory - usable)} less for driver, context, NCCL, fragmentation"
    return f"{text}: {style.memory(device.memory)}, {taken}"


def described_device(source: "Source | None") -> Device | None:
    """The device of a described cluster; None for a profile, which knows only what it measured.

    Args:
        source: Where costs came from.
    """
    cluster = getattr(source, "cluster", None)
    return cluster.host.device if isinstance(cluster, Cluster) else None


def reasons(result: "PlanResult") -> list[str]:
    """Sentences that say why the plan was chosen: what it gains over whole sequences, and what bounds it.

    Each reason is one condition. They name the price of every restriction that the user or the device sets (distinct
    lengths, reserved memory, a slow host), because a price is what tells whether it is worth lifting one.

    Args:
        result: Of ``plan``. That of ``estimate`` compared nothing, so most reasons do not apply.
    """
    estimate, whole = result.estimate, result.unsliced
    out = []
    if result.runners_up and not estimate.sliced:
        out.append("slicing does not pay here: shorter slices cost more than the idle time they would save")
    elif whole and whole is not estimate:
        ratio = whole.step_time / estimate.step_time
        best = (
            f"{ratio:.2f} times as fast as the best without slicing ({whole.title}, {style.seconds(whole.step_time)})"
        )
        if estimate.idle < whole.idle:
            out.append(f"{best}: {style.share(estimate.idle)} idle instead of {style.share(whole.idle)}")
        else:  # it idles less because it pays for that with tensor parallelism or recomputation
            out.append(f"{best}, which takes {whole.layout}, {recompute_title(whole.plan.recompute)} recompute")
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
    if result.source is not None and (price := result.price_of_host) >= 1.01:
        out.append(
            f"{price - 1:.0%} longer than devices alone would take: hosts are too slow for kernels of so short slices"
        )
    if result.reserve is not None:
        out.append(
            f"{result.reserve - 1:.1%} slower than this order and layout would be with all memory of a device, "
            "part of which is reserved"
        )
    if result.price is not None:
        out.append(f"the limit on distinct lengths costs {result.price - 1:.1%}")
    return out


HEADER = ("", "step", "x", "tokens/s", "idle", "peak memory", "fits", "dp x pp x tp", "microbatches and slices")
TEXT = ("", "dp x pp x tp", "microbatches and slices")  # columns that are no numbers


def table(
    rows: "Sequence[PlanEstimate]", best: "PlanEstimate | None" = None, marked: "set[int] | None" = None
) -> Table:
    """A table of plans for a console, one row each. Rows that do not fit into memory are dim.

    Args:
        rows: In the order in which they are shown.
        best: What the column ``x`` is relative to, by default the fastest row.
        marked: Ids of rows whose names get a star.
    """
    fastest = best or min(rows, key=lambda e: e.step_time)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for name in HEADER:
        drawn.add_column(name, justify="left" if name in TEXT else "right", no_wrap=name != HEADER[-1])
    for e in rows:
        name, *cells = _cells(e, fastest)
        drawn.add_row(name + (" *" if marked and id(e) in marked else ""), *cells, style="" if e.fits else "dim")
    return drawn


def _cells(e: "PlanEstimate", fastest: "PlanEstimate") -> tuple[str, ...]:
    """Returns the cells of a row, in the order of ``HEADER``."""
    return (
        e.title,
        style.seconds(e.step_time),
        f"{e.step_time / fastest.step_time:.2f}",
        f"{e.tokens_per_second:,.0f}",
        style.share(e.idle),
        style.memory(e.peak_bytes) if e.peak_bytes else "?",
        "yes" if e.fits else "no",
        f"{e.layout.dp}{' sharded' * e.layout.shard} x {e.layout.pp} x {e.layout.tp}",
        cut_title(e.plan),
    )


def cut_title(plan: Plan) -> str:
    """Microbatches and slices, in a few words: "4 x 2 seq in 4 slices, 2 chunks, full recompute".

    Args:
        plan: Of one row of a table.
    """
    slices = microbatches(plan)
    if len(plan.lengths[0]) > 1:
        slices += f" in {len(plan.lengths[0])} slices"
    chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
    return slices + chunks + ("" if plan.recompute == "none" else f", {recompute_title(plan.recompute)} recompute")


# Comparisons


def comparison_parts(comparison: "Comparison") -> Iterator[RenderableType]:
    """The parts of a comparison: its table, what the star means, under which conditions, and the sentence to take home.

    Args:
        comparison: Of ``compare``.
    """
    yield table(comparison.rows, comparison.fastest, {id(e) for e in comparison.front})
    yield "\n[dim]* no other that fits is both faster and smaller[/]"
    yield from (f"[dim]{sentence}[/]" for sentence in comparison.too_large)
    yield from (f"[dim]{name}: {value}[/]" for name, value in _facts(comparison).items())
    if factor := _factor(comparison):
        yield f"\n{factor}"


def _facts(comparison: "Comparison") -> dict[str, str]:
    """The conditions of a comparison, without which its numbers mean nothing: costs, batch, budget, layouts."""
    request, described = comparison.request, described_device(comparison.source) is not None
    costs = "by data sheets and typical utilization" if described else "by measured times of slices"
    return {
        "simulated": f"{costs}, in {comparison.seconds:.1f} s",
        "batch": f"{request.batch_size} seq of {request.seq_len} tokens",
        "budget": budget_title(comparison) or "not known",
        "layouts": "all in that of the fastest" if comparison.same_layout else "the best for each row",
    }


def _factor(comparison: "Comparison") -> str:
    """Compares the fastest row with the fastest one that does not slice, which is what other libraries have."""
    best, whole = comparison.fastest, comparison.unsliced
    if whole is None or not best.fits:
        return ""
    if whole is best:
        return f"{best.title} is fastest: slicing does not pay here"
    ratio, name = whole.step_time / best.step_time, whole.plan.order if whole.layout.pp > 1 else whole.title
    return f"{best.title} is {ratio:.2f} times as fast as the best with whole sequences ({name})"


def comparison_text(comparison: "Comparison") -> str:
    """A comparison as plain text.

    Args:
        comparison: Of ``compare``.
    """
    return as_text(comparison_parts(comparison))


def comparison_chart(comparison: "Comparison") -> str:
    """Step time against peak memory of all rows, as SVG.

    Args:
        comparison: Of ``compare``.
    """
    points = {e.title: (float(e.peak_bytes), e.step_time) for e in comparison.rows}
    front = {e.title for e in comparison.front}
    return charts.frontier(points, front, "peak memory per device", "step time", comparison.budget)


def comparison_page(comparison: "Comparison", model: str) -> str:
    """An HTML page with everything that the command prints, and the chart.

    Args:
        comparison: Of ``compare``.
        model: How the page calls the model.
    """
    lead = f"{model} on {comparison.where}, simulated. {_factor(comparison) or comparison.fastest.title}."
    cells = [_cells(e, comparison.fastest) for e in comparison.rows]
    facts = {"model": model, "cluster": comparison.where, **_facts(comparison), "terapipe": _version()}
    sections = [
        ("", style.facts(facts)),
        ("Time against memory", comparison_chart(comparison)),
        ("All of them", style.table(HEADER, cells, wrapped=True)),
    ]
    return style.page("Orders compared", lead, sections)


def _version() -> str:
    """The version of this package, for a page that is looked at years later."""
    try:
        return metadata.version("terapipe")
    except metadata.PackageNotFoundError:  # run from its source, not installed
        return "not installed"
