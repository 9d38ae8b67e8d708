"""`make demo`: a small GPT on real text over two pipeline stages, each sequence cut along its tokens.

Proves that nothing changes but the speed; runs `terapipe train`, which measures the model on this machine, plans with
that and trains; sets the plan against GPipe and against its own prediction; and writes a report to look at.
"""

import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import terapipe as tp
from terapipe.launch import launch, take_cores
from terapipe.planning import ShapeMemory
from terapipe.reporting import RunView, draw, lines, report, table, timelines

FILE = Path(__file__).with_name("demo.toml")
FOLDER = Path("build/demo")
RUN = FOLDER / "run"
ROUNDS = 6
UNEVEN = tp.Plan((1,), ((100, 1, 60, 95),), (0, 3, 6), "terapipe")

Raced = dict[str, tuple[float, tp.Timeline]]


def main() -> None:
    began = time.monotonic()
    console = Console(highlight=False)
    console.rule("[bold]terapipe: one sequence, two stages")
    config = tomllib.loads(FILE.read_text())
    shape = replace(tp.PRESETS[config["model"]["preset"]], vocab=257)
    console.print(
        f"A GPT of {shape.parameters / 1e6:.1f} million parameters, {shape.layers} layers over two processes;\n"
        f"each step one sequence of {config['data']['seq_len']} tokens of Shakespeare.\n"
    )
    error = launch(check, 2, shape)
    console.print(f"Exactness: largest relative gradient difference from the plain model: [bold]{error:.1e}[/]")
    if error > 1e-10:
        raise SystemExit("the gradients differ from the plain model's: this is a bug, please report it")
    shutil.rmtree(RUN, ignore_errors=True)  # of an earlier demo, which would be gone on with
    console.print(f"\n[bold]terapipe train {FILE.relative_to(Path.cwd())}[/]")
    if subprocess.run([sys.executable, "-m", "terapipe", "train", str(FILE)]).returncode != 0:
        raise SystemExit("the training run did not end well")
    times: Raced = launch(race, 2, shape)
    show(console, shape, error, times)
    console.print(
        f"\nReports: [bold]{FOLDER / 'report.html'}[/] and, of the run, [bold]{RUN / 'report.html'}[/]  "
        f"({time.monotonic() - began:.0f} s in all)"
    )


# On two ranks


def check(shape: tp.GPTConfig) -> float:
    """The largest relative difference of any gradient from the plain model's, in float64, slices uneven."""
    ids = torch.randint(shape.vocab, (1, UNEVEN.seq_len), generator=torch.Generator().manual_seed(0))
    labels = tp.next_token_labels(ids)
    plain = tp.GPT(shape).double()
    (plain.loss(plain(ids), labels) / (labels != -100).sum()).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    wanted["head.weight"] = wanted["embedding.weight"]
    pipe = tp.Pipeline(tp.GPT(shape).double(), UNEVEN)
    pipe.step(ids, labels)
    worst = max(
        ((p.grad - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-6)).item()
        for name, p in pipe.named_parameters()
    )
    return max(pipe.gather(worst))


def race(shape: tp.GPTConfig) -> Raced:
    """Best step time of each, taking turns, with the timeline of that step."""
    take_cores()
    planned = tp.Plan.from_json((RUN / "plan.json").read_text())
    gpipe = tp.Plan((1,), ((planned.seq_len,),), (0, 3, 6), "gpipe")
    ids = torch.randint(shape.vocab, (1, planned.seq_len), generator=torch.Generator().manual_seed(0))
    labels = tp.next_token_labels(ids)
    model = tp.GPT(shape)
    pipes = {"GPipe": tp.Pipeline(model, gpipe), "TeraPipe": tp.Pipeline(model, planned)}
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


def show(console: Console, shape: tp.GPTConfig, error: float, times: Raced) -> None:
    profile = tp.Profile.load(RUN / "profile.json")
    predicted = {name: tp.simulate(timeline.plan, profile) for name, (_, timeline) in times.items()}
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
    drawn = Table(*header)
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)
    measured = {name: timeline for name, (_, timeline) in times.items()}
    scale = max(timeline.makespan for timeline in measured.values())
    for name, timeline in measured.items():
        console.print(f"\n{name}: forwards are digits, backwards letters, idle time dots")
        console.print(draw(timeline, min(100, console.width - 10), scale))
    write(shape, error, measured, predicted, (header, rows))


def write(
    shape: tp.GPTConfig,
    error: float,
    measured: dict[str, tp.Timeline],
    predicted: dict[str, tp.Timeline],
    race: tuple[tuple[str, ...], list[tuple[str, ...]]],
) -> None:
    memory = ShapeMemory(shape)
    runs = [
        RunView.of("predicted", predicted["TeraPipe"], memory),
        RunView.of("measured", measured["TeraPipe"], memory),
    ]
    rows = map(json.loads, (RUN / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    proof = f"<p>Largest relative gradient difference from the plain model: <b>{error:.1e}</b> (float64).</p>"
    sections = [
        ("Measured in turns", table(*race)),
        ("GPipe and TeraPipe on one scale", timelines(measured)),
        ("Training loss", lines({"loss": losses}, "loss per step")),
        ("Exactness", proof),
    ]
    tokens = measured["TeraPipe"].plan.seq_len
    lead = f"One sequence of {tokens} tokens on two stages: TeraPipe is {race[1][1][-1]} as fast as GPipe."
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "report.html").write_text(report("terapipe demo", lead, runs, sections=sections), encoding="utf-8")
    (FOLDER / "timeline.json").write_text(measured["TeraPipe"].to_json(), encoding="utf-8")
    measured["GPipe"].to_svg(FOLDER / "timeline.svg", name="GPipe", others={"TeraPipe": measured["TeraPipe"]})


if __name__ == "__main__":
    main()
