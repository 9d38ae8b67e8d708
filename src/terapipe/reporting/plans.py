"""Plans and comparisons for people: what was chosen, why, and next to what.

Every text exists once, as parts (strings with rich's markup, and tables), and is shown in two ways: a console draws the
parts with colors and in its own width (``explanation``; comparison.py has those of comparisons), or ``as_text`` makes
plain text of them, for ``str(result)``. ``print(terapipe.plan(...))`` therefore says what ``terapipe plan`` prints.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console, RenderableType
from rich.table import Table

from terapipe.planning.device import Device, usable_memory
from terapipe.planning.hardware import Cluster
from terapipe.planning.recompute import recompute_title
from terapipe.planning.slices import Plan
from terapipe.reporting import style
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.rivals import Rival

if TYPE_CHECKING:
    from terapipe.search.result import Comparison, PlanResult
    from terapipe.search.source import Source

Row: TypeAlias = PlanEstimate | Rival

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
        yield table(result.runners_up, Columns(estimate))


def describe(estimate: PlanEstimate) -> dict[str, str]:
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
    if estimate.mfu is not None:
        out["MFU"] = style.share(estimate.mfu)
    if plan.chunks > 1:
        out["chunks"] = f"{plan.chunks} stages per rank"
    if plan.offloads:
        pairs = ", and keys and values" if plan.offload_kv else ""
        out["offload"] = f"{style.share(offloaded_share(plan))} of what slices keep waits in the host's memory{pairs}"
    if estimate.peak_bytes:
        out["peak memory"] = f"{style.memory(estimate.peak_bytes)} per device"
    if estimate.host_bytes:
        out["host memory"] = f"{style.memory(estimate.host_bytes)} for each device"
    return out


def offloaded_share(plan: Plan) -> float:
    """The share of the tokens, over all stages, that are offloaded.

    Args:
        plan: Of any kind.
    """
    tokens = [s.size * s.length for s in plan.slices]
    flags = [plan.offload_of(k) for k in range(plan.num_stages)]
    moved = sum(count for row in flags for count, flag in zip(tokens, row, strict=True) if flag)
    return moved / (sum(tokens) * plan.num_stages)


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


@dataclass(frozen=True)
class Columns:
    """The columns of a table of plans and their rivals, and what their cells need beside the row.

    Columns that no row has a value for are left out: measured costs have no data sheet for MFU, and days need tokens.

    Attributes:
        best: What the column ``x`` is relative to.
        tokens: To train on, for days and cost; such as ``"50B"``.
        price: Of a device for an hour, for the cost.
        hidden: Names of columns to leave out.
    """

    best: Row
    tokens: str | float | None = None
    price: float | None = None
    hidden: tuple[str, ...] = ()

    def of(self, rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The header and the cells of every row.

        Args:
            rows: In the order in which they are shown.
        """
        cells = [self._cells(row) for row in rows]
        header = [name for name in cells[0] if name not in OPTIONAL or any(row[name] for row in cells)]
        header = [name for name in header if name not in self.hidden]
        return tuple(header), [tuple(row[name] for name in header) for row in cells]

    def _cells(self, row: Row) -> dict[str, str]:
        traffic, mfu, tokens = row.traffic, row.mfu, self.tokens
        return {
            "": row.title,
            "step": style.seconds(row.step_time),
            "x": f"{row.step_time / self.best.step_time:.2f}",
            "tokens/s": f"{row.tokens_per_second:,.0f}",
            "MFU": "" if mfu is None else style.share(mfu),
            "idle": style.share(row.idle),
            "peak memory": style.memory(row.peak_bytes) if row.peak_bytes else "?",
            "fits": "yes" if row.fits else "no",
            "sent in host": style.memory(traffic.inside) if traffic and traffic.inside else "",
            "between": style.memory(traffic.between) if traffic and traffic.between else "",
            "days": "" if tokens is None else f"{row.days(tokens):,.1f}",
            "cost": "" if tokens is None or self.price is None else f"{row.cost(tokens, self.price):,.0f}",
            "dp x pp x tp": layout_title(row),
            "microbatches and slices": way_title(row) if isinstance(row, Rival) else cut_title(row.plan),
        }


OPTIONAL = ("MFU", "sent in host", "between", "days", "cost")
TEXT = ("", "dp x pp x tp", "microbatches and slices")  # columns that are no numbers


def table(rows: Sequence[Row], columns: Columns, marks: Callable[[Row], str] = lambda row: "") -> Table:
    """A table of plans for a console, one row each. Rows that do not fit into memory are dim.

    Args:
        rows: In the order in which they are shown.
        columns: What to show of them.
        marks: Gives what follows a row's name, such as a star.
    """
    header, cells = columns.of(rows)
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for name in header:
        drawn.add_column(name, justify="left" if name in TEXT else "right", no_wrap=name != header[-1])
    for row, (name, *rest) in zip(rows, cells, strict=True):
        drawn.add_row(name + marks(row), *rest, style="" if row.fits else "dim")
    return drawn


def layout_title(row: Row) -> str:
    """Replicas, pipeline ranks and tensor parallel ranks: "1 x 8 x 4".

    Args:
        row: A plan, or a rival, which has no pipeline.
    """
    if isinstance(row, Rival):
        return f"{row.way.dp} x 1 x {row.way.tp}"
    return f"{row.layout.dp}{' sharded' * row.layout.shard} x {row.layout.pp} x {row.layout.tp}"


def way_title(rival: Rival) -> str:
    """What a rival does with batch, sequences and state: "4 x 1 seq over 8 devices each, full recompute".

    Args:
        rival: Of ``rivals``.
    """
    way = rival.way
    words = f"{rival.request.batch_size // (way.dp * way.size)} x {way.size} seq"
    if way.cp > 1:
        words += f", each over {way.cp} devices"
    if 1 < way.shards < way.dp * way.cp:
        words += f", shards over {way.shards}"
    if way.recompute != "none":
        words += f", {way.recompute} recompute"
    return words + (f"; {way.devices} of {rival.devices} devices" if way.devices < rival.devices else "")


def cut_title(plan: Plan) -> str:
    """Microbatches and slices, in a few words: "4 x 2 seq in 4 slices, 2 chunks, full recompute".

    Args:
        plan: Of one row of a table.
    """
    slices = microbatches(plan)
    if len(plan.lengths[0]) > 1:
        slices += f" in {len(plan.lengths[0])} slices"
    chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
    words = slices + chunks + ("" if plan.recompute == "none" else f", {recompute_title(plan.recompute)} recompute")
    return words + (f", {style.share(offloaded_share(plan))} offloaded" if plan.offloads else "")
