"""Comparisons for people: orders and their rivals on one cluster, or several clusters side by side.

As in ``plans.py``, a text is a sequence of parts, which a console draws or ``as_text`` writes. A page has the same
parts, and all that someone needs who was not there: the model, the batch, the version, what "simulated" means, and
where the constants of the cluster come from.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import metadata

from rich.console import RenderableType
from rich.table import Table

from terapipe.planning.hardware import Cluster, sources_of
from terapipe.reporting import charts, style
from terapipe.reporting.plans import Columns, Row, budget_title, described_device, table
from terapipe.search.choose import WORTH
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.result import Comparison
from terapipe.search.rivals import Rival

STAR = "no other that fits is both faster and smaller"
TILDE = (
    "not ours, and not simulated: estimates from the same rates of products, attention and links. Their traffic is "
    "taken to overlap as far as it can, which flatters them"
)
SENT = "bytes that a device sends in a step, to devices of its host and to other hosts"


def comparison_parts(comparison: Comparison) -> Iterator[RenderableType]:
    """The parts of a comparison: its table, what the marks mean, under which conditions, and the sentences to take
    home.

    Args:
        comparison: Of ``compare``.
    """
    front = {id(e) for e in comparison.front}
    yield table(
        list(comparison),
        Columns(comparison.best, comparison.tokens, comparison.price),
        lambda row: (" ~" if isinstance(row, Rival) else "") + (" *" if id(row) in front else ""),
    )
    yield "\n" + "\n".join(f"[dim]{note}[/]" for note in _notes(comparison))
    yield from (f"[dim]{name}: {value}[/]" for name, value in _facts(comparison).items())
    if said := verdict(comparison):
        yield f"\n{said}"


def _notes(comparison: Comparison) -> list[str]:
    """What the marks and the less usual columns of the table mean."""
    notes = [f"* {STAR}", *comparison.too_large]
    if comparison.rivals:
        notes.append(f"~ {TILDE}")
    if any(row.traffic for row in comparison):
        notes.append(f"sent: {SENT}")
    return notes


def _facts(comparison: Comparison) -> dict[str, str]:
    """The conditions of a comparison, without which its numbers mean nothing: costs, batch, budget, layouts."""
    request, described = comparison.request, described_device(comparison.source) is not None
    costs = "by data sheets and typical utilization, not measured" if described else "by measured times of slices"
    facts = {
        "simulated": f"{costs}, in {comparison.seconds:.1f} s",
        "batch": f"{request.batch_size} seq of {request.seq_len} tokens",
        "budget": budget_title(comparison) or "not known",
        "layouts": "all in that of the fastest" if comparison.same_layout else "the best for each row",
    }
    if comparison.tokens is not None:
        price = "" if comparison.price is None else f", {comparison.price:g} for a device and hour, idle or not"
        facts["training"] = f"{comparison.tokens} tokens without interruptions{price}"
    return facts


def verdict(comparison: Comparison) -> str:
    """What to do: whether to slice, and whether to use a pipeline at all.

    Args:
        comparison: Of ``compare``.
    """
    return "\n".join(filter(None, (_slicing(comparison), _pipelining(comparison))))


def _slicing(comparison: Comparison) -> str:
    """Compares the fastest plan with the fastest one that does not slice, which is what other libraries have."""
    best, whole = comparison.fastest, comparison.unsliced
    if whole is None or not best.fits:
        return ""
    if whole is best:
        return f"{best.title} is the fastest plan: slicing does not pay here"
    ratio, name = whole.step_time / best.step_time, whole.plan.order if whole.layout.pp > 1 else whole.title
    return f"{best.title} is {ratio:.2f} times as fast as the best with whole sequences ({name})"


def _pipelining(comparison: Comparison) -> str:
    """Compares the fastest pipeline with the fastest way that has none."""
    other, pipeline = comparison.without_pipeline, comparison.pipeline
    if not comparison.rivals:
        return ""
    if other is None:
        return "Without a pipeline nothing fits"
    takes = f"{other.title} takes {style.seconds(other.step_time)}"
    if pipeline is None:
        return f"Do not use a pipeline here: none fits{_lack(comparison)}, and {takes}"
    ratio = pipeline.step_time / other.step_time
    if ratio * WORTH >= 1:
        doubt = ", if its traffic overlaps" if isinstance(other, Rival) else ""
        return (
            f"Do not use a pipeline here: {takes}{doubt}; the best pipeline, {pipeline.title}, {ratio:.2f} times that"
        )
    return f"Without a pipeline, {takes}: {1 / ratio:.2f} times as long as {pipeline.title}"


def _lack(comparison: Comparison) -> str:
    """How much memory the smallest pipeline lacks."""
    pipelines = [row for row in comparison.rows if row.layout.pp > 1]
    if not pipelines or comparison.budget is None:
        return ""
    least = min(pipelines, key=lambda row: row.peak_bytes)
    return f" (the smallest, {least.title}, lacks {style.memory(max(0, least.peak_bytes - comparison.budget))})"


def comparison_chart(comparison: Comparison) -> str:
    """Step time against peak memory of all plans, and of the rivals that fit, as SVG.

    Args:
        comparison: Of ``compare``.
    """
    rows = [row for row in comparison if row.fits or isinstance(row, PlanEstimate)]
    points = {_label(row): (float(row.peak_bytes), row.step_time) for row in rows}
    front = {_label(row) for row in comparison.front}
    return charts.frontier(points, front, "peak memory per device", "step time", comparison.budget)


def _label(row: Row) -> str:
    return f"{row.title} ~" if isinstance(row, Rival) else row.title


# Several clusters


def cluster_parts(comparisons: Sequence[Comparison], failures: Mapping[str, str]) -> Iterator[RenderableType]:
    """The parts of several comparisons side by side.

    Args:
        comparisons: One for each cluster on which a plan fits.
        failures: For each other cluster, why.
    """
    if comparisons:
        header, cells = _side_by_side(comparisons)
        drawn = Table(box=None, pad_edge=False, header_style="dim")
        for name in header:
            left = name in ("cluster", "", *header[-2:])
            drawn.add_column(name, justify="left" if left else "right", no_wrap=name != header[-1])
        for row in cells:
            drawn.add_row(*row)
        yield drawn
        yield f"\n[dim]~ {TILDE}[/]"
        yield from (f"[dim]{name}: {value}[/]" for name, value in _facts(comparisons[0]).items() if name != "budget")
    for comparison in comparisons:
        yield f"\n{comparison.where}: " + verdict(comparison).replace("\n", "\n  ")
    for where, why in failures.items():
        yield f"\n{where}: {why}"


def _side_by_side(comparisons: Sequence[Comparison]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """For each cluster the best plan and the best rival. The column ``x`` is relative to the fastest of all."""
    rows: list[tuple[Comparison, Row]] = []
    for c in comparisons:
        rows += [(c, c.fastest)] if c.fastest.fits else []
        rows += [(c, rival) for rival in _best_rivals(c)]
    first = comparisons[0]
    best = min((c.best for c in comparisons), key=lambda row: row.step_time)
    hidden = ("idle", "fits", "sent in host", "between")  # the tables of the clusters have them
    header, cells = Columns(best, first.tokens, first.price, hidden).of([row for _, row in rows])
    named = []
    last: Comparison | None = None
    for (comparison, row), (_, *rest) in zip(rows, cells, strict=True):
        named.append((comparison.where if comparison is not last else "", str(row.devices), _label(row), *rest))
        last = comparison
    return ("cluster", "devices", *header), named


def _best_rivals(comparison: Comparison) -> list[Rival]:
    return sorted((rival for rival in comparison.rivals if rival.fits), key=lambda rival: rival.step_time)[:1]


# Pages


def comparison_page(comparisons: Sequence[Comparison], model: str, failures: Mapping[str, str] | None = None) -> str:
    """An HTML page that can be passed on: everything that the command prints, the charts, and all constants.

    Args:
        comparisons: One for each cluster.
        model: How the page calls the model.
        failures: Clusters on which no plan fits, and why.
    """
    names = ", ".join(comparison.where for comparison in comparisons)
    said = [verdict(comparison) or comparison.fastest.title for comparison in comparisons]
    lead = f"{model} on {names}, simulated. " + (". ".join(said[0].splitlines()) + "." if len(said) == 1 else "")
    facts = {"model": model, "cluster": names, **_facts(comparisons[0])}
    if len(comparisons) > 1:
        del facts["budget"]  # each has its own
    sections = [("", style.facts({**facts, "terapipe": _version()}))]
    if len(comparisons) > 1:
        header, cells = _side_by_side(comparisons)
        sections.append(("Side by side", style.table(header, cells, wrapped=True) + _paragraphs([f"~ {TILDE}"])))
    for comparison in comparisons:
        sections += _sections(comparison, f"{comparison.where}: " if len(comparisons) > 1 else "")
    sections += [(where, _paragraphs([why])) for where, why in (failures or {}).items()]
    return style.page("Orders compared" if len(comparisons) == 1 else "Clusters compared", lead, sections)


def _sections(comparison: Comparison, prefix: str) -> list[tuple[str, str]]:
    """Chart, table and constants of one cluster."""
    header, cells = Columns(comparison.best, comparison.tokens, comparison.price).of(list(comparison))
    cells = [(_label(row), *rest) for row, (_, *rest) in zip(comparison, cells, strict=True)]
    notes = [*_notes(comparison)[1:], *verdict(comparison).splitlines()]
    rows = style.table(header, cells, wrapped=True) + _paragraphs(notes)
    sections = [("Time against memory", comparison_chart(comparison)), ("All of them", rows)]
    cluster = getattr(comparison.source, "cluster", None)
    if isinstance(cluster, Cluster):
        listed = style.table(("constant", "value", "source"), constants(cluster), wrapped=True)
        sections.append(("Constants and their sources", listed))
    return [(prefix + heading, content) for heading, content in sections]


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p class='note'>{escape(text)}</p>" for text in texts)


def constants(cluster: Cluster) -> list[tuple[str, str, str]]:
    """What is assumed about a cluster, with its sources.

    Args:
        cluster: A described one.
    """
    host, device, sources = cluster.host, cluster.host.device, sources_of(cluster.host)
    speed = device.attention_speed
    values = {
        "peak": f"{device.peak / 1e12:g} TFLOP/s, {device.element} bytes per number",
        "large products": f"{style.share(device.achieved)} of the peak",
        "attention": f"{device.attention_kernel}: {style.share(speed.forward)} of the peak forward, "
        f"{style.share(speed.backward)} backward",
        "memory": f"{style.memory(device.memory)}, {device.bandwidth / 1e9:,.0f} GB/s",
        "links in a host": f"{host.intra_node.bandwidth / 1e9:,.0f} GB/s per device, {host.devices} devices",
        "network": f"{host.inter_node.bandwidth / 1e9:,.1f} GB/s per host, {cluster.hosts} hosts",
        "host": f"{1e3 * (device.host_forward + device.host_backward):.2f} ms to issue a layer",
    }
    return [(name, value, sources[name]) for name, value in values.items()]


def _version() -> str:
    """The version of this package, for a page that is looked at years later."""
    try:
        return metadata.version("terapipe")
    except metadata.PackageNotFoundError:  # run from its source, not installed
        return "not installed"
