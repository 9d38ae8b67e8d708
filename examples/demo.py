"""`make demo`: a small GPT on real text over two pipeline stages, each sequence cut along its tokens.

Proves that nothing changes but the speed; runs `terapipe train`, which measures the model on this machine, plans with
that and trains; sets the plan against GPipe and against its own prediction; and writes a report to look at.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from terapipe import GPT, PRESETS, GPTConfig, Pipeline, Plan, Timeline, files, next_token_labels, schedule
from terapipe.cli import main as terapipe
from terapipe.config import load
from terapipe.launch.processes import launch, take_cores
from terapipe.modeling.stage import IGNORE
from terapipe.planning.fitted import FittedCost
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.profile import Profile
from terapipe.reporting import charts, html, svg, text
from terapipe.reporting.page import report
from terapipe.reporting.view import RunView
from terapipe.scheduling.simulator import simulate
from terapipe.training.logging.metrics import read

FILE = Path(__file__).with_name("demo.toml")
FOLDER = Path("build/demo")
RUN = FOLDER / "run"
ROUNDS = 6
UNEVEN = Plan((1,), ((100, 1, 60, 95),), (0, 3, 6), "terapipe")

Raced = dict[str, tuple[float, Timeline]]


def main() -> None:
    began = time.monotonic()
    console = Console(highlight=False)
    console.rule("[bold]terapipe: one sequence, two stages")
    config = load(FILE)
    shape = replace(PRESETS[config.model.preset], vocab=257)
    console.print(
        f"A GPT of {shape.parameters / 1e6:.1f} million parameters, {shape.layers} layers over two processes;\n"
        f"each step one sequence of {config.data.seq_len} tokens of Shakespeare.\n"
    )
    error = launch(check, 2, shape)
    console.print(f"Exactness: largest relative gradient difference from the plain model: [bold]{error:.1e}[/]")
    if error > 1e-10:
        raise SystemExit("the gradients differ from the plain model's: this is a bug, please report it")
    shutil.rmtree(RUN, ignore_errors=True)  # of an earlier demo, which would be gone on with
    console.print(f"\n[bold]terapipe train {FILE.relative_to(Path.cwd())}[/]")
    if terapipe(["train", str(FILE)]) != 0:
        raise SystemExit("the training run did not end well")
    times: Raced = launch(race, 2, shape)
    show(console, shape, error, times)
    console.print(
        f"\nReports: [bold]{FOLDER / 'report.html'}[/] and, of the run, [bold]{RUN / 'report.html'}[/]  "
        f"({time.monotonic() - began:.0f} s in all)"
    )


# On two ranks


def check(shape: GPTConfig) -> float:
    """The largest relative difference of any gradient from the plain model's, in float64, slices uneven."""
    ids = torch.randint(shape.vocab, (1, UNEVEN.seq_len), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(ids)
    plain = GPT(shape).double()
    (plain.loss(plain(ids), labels) / (labels != IGNORE).sum()).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    wanted["head.weight"] = wanted["embedding.weight"]
    pipe = Pipeline(GPT(shape).double(), UNEVEN)
    pipe.step(ids, labels)
    worst = max(
        ((p.grad - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-6)).item()
        for name, p in pipe.named_parameters()
    )
    return max(pipe.gather(worst))


def race(shape: GPTConfig) -> Raced:
    """Best step time of each, taking turns, with the timeline of that step."""
    take_cores()
    planned = Plan.from_json((RUN / "plan.json").read_text())
    gpipe = Plan((1,), ((planned.seq_len,),), (0, 3, 6), "gpipe")
    ids = torch.randint(shape.vocab, (1, planned.seq_len), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(ids)
    model = GPT(shape)
    pipes = {"GPipe": Pipeline(model, gpipe), "TeraPipe": Pipeline(model, planned)}
    best: Raced = {}
    for turn in range(-1, ROUNDS):
        for name, pipe in pipes.items():
            seconds = max(pipe.gather(_timed(lambda pipe=pipe: pipe.step(ids, labels))))
            pipe.zero_grad(set_to_none=False)
            timeline = pipe.timeline()
            if turn >= 0 and (name not in best or seconds < best[name][0]):
                best[name] = (seconds, timeline)
    return best


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# To look at


def show(console: Console, shape: GPTConfig, error: float, times: Raced) -> None:
    cost = FittedCost(Profile.from_json((RUN / "profile.json").read_text()))
    predicted = {name: simulate(schedule(timeline.plan), cost) for name, (_, timeline) in times.items()}
    rows = [
        (
            name,
            f"{seconds:.3f} s",
            f"{predicted[name].makespan:.3f} s",
            f"{predicted[name].makespan / seconds:.2f}",
            f"{timeline.idle:.0%}",
            f"{times['GPipe'][0] / seconds:.2f} x",
        )
        for name, (seconds, timeline) in times.items()
    ]
    header = ("", "measured step", "predicted", "ratio", "idle", "speed-up")
    console.print(f"\nThe same step, measured in turns, best of {ROUNDS}, and as the profile predicts it:")
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    drawn = {name: timeline for name, (_, timeline) in times.items()}
    scale = max(timeline.makespan for timeline in drawn.values())
    for name, timeline in drawn.items():
        console.print(f"\n{name}: forwards are digits, backwards letters, idle time dots")
        console.print(text.draw(timeline, min(100, console.width - 10), scale))
    write(shape, error, drawn, predicted, (header, rows))


def write(
    shape: GPTConfig,
    error: float,
    measured: dict[str, Timeline],
    predicted: dict[str, Timeline],
    table: tuple[tuple[str, ...], list[tuple[str, ...]]],
) -> None:
    memory = ShapeMemory(shape)
    timelines = {"predicted": predicted["TeraPipe"], "measured": measured["TeraPipe"]}
    runs = [RunView.of(name, timeline, memory) for name, timeline in timelines.items()]
    losses = [row["loss"] for row in read(RUN) if "loss" in row]
    proof = f"<p>Largest relative gradient difference from the plain model: <b>{error:.1e}</b> (float64).</p>"
    sections = [
        ("Measured in turns", html.table(*table)),
        ("GPipe and TeraPipe on one scale", svg.timelines(measured)),
        ("Training loss", charts.lines({"loss": losses}, "loss per step")),
        ("Exactness", proof),
    ]
    tokens = measured["TeraPipe"].plan.seq_len
    lead = f"One sequence of {tokens} tokens on two stages: TeraPipe is {table[1][1][-1]} as fast as GPipe."
    files.write(FOLDER / "report.html", report("terapipe demo", lead, runs, sections=sections))
    files.write(FOLDER / "timeline.json", measured["TeraPipe"].to_json())
    files.write(FOLDER / "timeline.svg", svg.timelines(measured))


if __name__ == "__main__":
    main()
