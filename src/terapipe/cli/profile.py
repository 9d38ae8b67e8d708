"""``terapipe profile``: measure a model on this machine."""

import argparse
from dataclasses import replace
from pathlib import Path

from terapipe.cli import show
from terapipe.cli.options import Verbs
from terapipe.planning.fitted import FittedCost
from terapipe.planning.profile import Profile, typical
from terapipe.presets import PRESETS, GPTConfig, model
from terapipe.reporting import html, units


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "profile",
        help="measure a model on this machine",
        description="Times a stage on a grid of slices, on all ranks at once, and what else a step does. Starts the "
        "ranks itself, or runs as one of those that torchrun started.",
    )
    parser.add_argument("--model", required=True, help=f"a preset ({', '.join(PRESETS)}) or a shape")
    parser.add_argument("--seq", type=int, required=True, metavar="TOKENS", help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2, help="processes that measure at the same time (default 2)")
    parser.add_argument("--sizes", default="1", help="sequences per microbatch to measure, such as 1,2,4")
    parser.add_argument("--seconds", type=float, default=45.0, help="stop after about so long (default 45)")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="default: profile.json")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    config = replace(model(parsed.model), max_tokens=max(parsed.seq, model(parsed.model).max_tokens))
    sizes = _sizes(parsed.sizes)
    if not 1 <= parsed.ranks <= config.layers:
        raise ValueError(f"every rank measures at least one of the {config.layers} layers, got --ranks {parsed.ranks}")
    if parsed.seq < 1 or not parsed.seconds > 0:
        raise ValueError(f"--seq and --seconds must be positive, got {parsed.seq} and {parsed.seconds}")
    from terapipe.runtime.launch import launch
    from terapipe.runtime.transport import under_torchrun

    if under_torchrun():
        measured = measure(config, parsed.seq, sizes, parsed.seconds, parsed.ranks)
    else:
        measured = launch(measure, parsed.ranks, config, parsed.seq, sizes, parsed.seconds, parsed.ranks)
    if measured is not None:
        _show(measured, parsed.out)
    return 0


def measure(config: GPTConfig, tokens: int, sizes: tuple[int, ...], seconds: float, ranks: int) -> Profile | None:
    """What every rank runs; only the first returns the profile, and shows how far it is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from terapipe.modeling.gpt import GPT
    from terapipe.runtime.launch import take_cores
    from terapipe.runtime.profiler import Profiler

    take_cores()
    profiler = Profiler(GPT(config), layers=max(1, config.layers // ranks), tokens=tokens, sizes=sizes)
    first = profiler.transport.rank == 0
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, disable=not first, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        measured = profiler.run(seconds, lambda share: bar.update(task, completed=share))
    return measured if first else None


def _show(measured: Profile, out: Path) -> None:
    html.write(out, measured.to_json() + "\n")
    errors = [abs(e) for e in FittedCost(measured).errors()]
    held_out = f"{max(errors):.1%} at most, {sum(errors) / len(errors):.1%} on average" if errors else "none held out"
    counts = [len(sample.seconds) for sample in measured.samples]
    show.console.print(
        f"{len(measured.samples)} points, {min(counts)} to {max(counts)} measurements each, on {measured.ranks} ranks; "
        f"error on held-out points: {held_out}"
    )
    whole_stage = [s for s in measured.samples if s.length == measured.tokens and s.kind in ("forward", "backward")]
    for sample in whole_stage:
        middle = sorted(sample.seconds)[len(sample.seconds) // 2]
        what = f"{sample.kind} of {measured.layers} layers, {sample.size} x {sample.length} tokens"
        show.console.print(f"  {what}: {units.seconds(middle)}")
    for apart, where in ((False, "inside a host"), (True, "between hosts")):
        sizes = {t.nbytes: typical(t.seconds) for t in measured.transfers if t.between_hosts == apart}
        if sizes:
            shown = ", ".join(f"{units.seconds(sizes[n])} for {units.memory(n)}" for n in (min(sizes), max(sizes)))
            show.console.print(f"  messages {where}: {shown}")
    show.console.print(f"Wrote [bold]{out}[/]. Next: terapipe plan --profile {out} --batch 1 --seq {measured.tokens}")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"--sizes lists numbers of sequences, such as 1,2,4, got {text!r}")
    return tuple(sorted(set(sizes)))
