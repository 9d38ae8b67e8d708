"""`make demo`: a small GPT on real text over two pipeline stages, each sequence cut along its tokens.

Proves that nothing changes but the speed, measures the model on this machine, plans with that, trains, sets the
plan against GPipe and against its own prediction, and writes a report to look at.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from terapipe import GPT, PRESETS, Pipeline, Plan, Timeline, next_token_labels, schedule
from terapipe.modeling.stage import IGNORE
from terapipe.planning.fitted import FittedCost
from terapipe.planning.memory import ShapeMemory
from terapipe.planning.profile import Profile
from terapipe.reporting import html, svg, text
from terapipe.reporting.report import Shown, report
from terapipe.runtime.launch import launch, take_cores
from terapipe.runtime.profiler import Profiler
from terapipe.scheduling.footprint import curves
from terapipe.scheduling.idle import idle_by_cause
from terapipe.scheduling.simulator import simulate
from terapipe.search.choose import choose
from terapipe.search.request import ProfileSource, Request

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
FOLDER = Path("build/demo")
STAGES, TOKENS, STEPS, ROUNDS, PROFILING = 2, 2048, 50, 6, 25.0
CONFIG = PRESETS["gpt-small"]
CUTS = (0, 3, 6)
GPIPE = Plan((1,), ((TOKENS,),), CUTS, "gpipe")
UNEVEN = Plan((1,), ((100, 1, 60, 95),), CUTS, "terapipe")


def main() -> None:
    """Starts the ranks as torchrun would."""
    began = time.monotonic()
    console = Console()
    console.rule("[bold]terapipe: one sequence, two stages")
    launch(rank_main, STAGES)
    console.print(f"\nReport: [bold]{FOLDER / 'report.html'}[/]  ({time.monotonic() - began:.0f} s in all)")


def rank_main() -> None:
    take_cores()
    Demo().run()


class Demo:
    """All ranks run it; only the first one has a console that prints."""

    def __init__(self) -> None:
        self.bytes = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.model = GPT(CONFIG)
        self.gpipe = Pipeline(self.model, GPIPE)
        self.console = Console(quiet=not self.gpipe.is_first)

    def run(self) -> None:
        million = CONFIG.parameters / 1e6
        self.console.print(
            f"A GPT of {million:.1f} million parameters, {CONFIG.layers} layers over {STAGES} processes;\n"
            f"each step one sequence of {TOKENS} tokens of Shakespeare.\n"
        )
        error = self.check()
        profile = self.profile()
        self.planned = Pipeline(self.model, self.plan(profile))
        losses = self.train()
        times = self.race()
        self.show(error, profile, losses, times)

    def sequence(self, step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
        start = (step * 7919 * 64) % (len(self.bytes) - tokens)
        ids = self.bytes[start : start + tokens].unsqueeze(0)
        return ids, next_token_labels(ids)

    def check(self) -> float:
        """The largest relative difference of any gradient from the plain model's, in float64, slices uneven."""
        ids, labels = self.sequence(0, UNEVEN.tokens)
        plain, other = GPT(CONFIG).double(), GPT(CONFIG).double()
        (plain.loss(plain(ids), labels) / (labels != IGNORE).sum()).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        wanted["head.weight"] = wanted["embedding.weight"]
        pipe = Pipeline(other, UNEVEN)
        pipe.step(ids, labels)
        worst = max(
            ((p.grad - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-6)).item()
            for name, p in pipe.named_parameters()
        )
        error = max(pipe.gather(worst))
        self.console.print(
            f"Exactness: largest relative gradient difference from the plain model: [bold]{error:.1e}[/]\n"
        )
        if error > 1e-10:
            raise SystemExit("the gradients differ from the plain model's: this is a bug, please report it")
        return error

    def profile(self) -> Profile:
        """What a stage costs on this machine, both ranks measuring at once; all get the first one's account."""
        profiler = Profiler(GPT(CONFIG), layers=CONFIG.layers // STAGES, tokens=TOKENS)
        with Progress(TextColumn("measuring"), BarColumn(), console=self.console, transient=True) as progress:
            task = progress.add_task("", total=1.0)
            measured = profiler.run(PROFILING, lambda share: progress.update(task, completed=share))
        profile = self.gpipe.gather(measured)[0]
        error = max(map(abs, FittedCost(profile).errors()))
        if self.gpipe.is_first:
            html.write(FOLDER / "profile.json", profile.to_json())
        self.console.print(f"Profile: {len(profile.samples)} points, at most {error:.1%} off on those held out")
        return profile

    def plan(self, profile: Profile) -> Plan:
        request = Request(batch=1, tokens=TOKENS, data=1, pipe=STAGES, tensor=1)
        plan = self.gpipe.gather(choose(ProfileSource(profile, STAGES), request).chosen.plan)[0]
        if self.gpipe.is_first:
            html.write(FOLDER / "plan.json", plan.to_json())
        chunks = f", {plan.chunks} chunks of layers per rank" if plan.chunks > 1 else ""
        self.console.print(f"Plan: order {plan.order}{chunks}, slices of {list(plan.lengths[0])}\n")
        return plan

    def train(self) -> list[float]:
        pipe = self.planned
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        losses: list[float] = []
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
        with Progress(*columns, TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task("", total=STEPS, loss="")
            for step in range(STEPS):
                losses.append(pipe.step(*self.sequence(step)).item())
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                warmup.step()
                optimizer.zero_grad()
                progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
                if not self.console.is_terminal and step % 10 == 9:
                    self.console.print(f"step {step + 1:3d}  loss {losses[-1]:.3f}")
        late = sum(losses[-10:]) / 10
        self.console.print(f"Loss: {losses[0]:.3f} -> [bold]{late:.3f}[/] in {STEPS} steps (mean of the last ten)\n")
        return losses

    def race(self) -> dict[str, tuple[float, Timeline]]:
        """Best step time of each, taking turns, with the timeline of that step."""
        batch = self.sequence(1)
        best: dict[str, tuple[float, Timeline]] = {}
        for turn in range(-1, ROUNDS):
            for name, pipe in (("GPipe", self.gpipe), ("TeraPipe", self.planned)):
                seconds = max(pipe.gather(_timed(lambda pipe=pipe: pipe.step(*batch))))
                pipe.zero_grad(set_to_none=False)
                timeline = pipe.timeline()
                if turn >= 0 and (name not in best or seconds < best[name][0]):
                    best[name] = (seconds, timeline)
        return best

    def show(
        self, error: float, profile: Profile, losses: list[float], times: dict[str, tuple[float, Timeline]]
    ) -> None:
        if not self.planned.is_first:
            return
        cost = FittedCost(profile)
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
        self.console.print(f"The same step, measured in turns, best of {ROUNDS}, and as the profile predicts it:")
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        drawn = {name: timeline for name, (_, timeline) in times.items()}
        scale = max(timeline.makespan for timeline in drawn.values())
        for name, timeline in drawn.items():
            self.console.print(f"\n{name}: forwards are digits, backwards letters, idle time dots", highlight=False)
            self.console.print(text.draw(timeline, min(100, self.console.width - 10), scale), highlight=False)
        self.write(error, losses, drawn, predicted, (header, rows))

    def write(
        self,
        error: float,
        losses: list[float],
        measured: dict[str, Timeline],
        predicted: dict[str, Timeline],
        table: tuple[tuple[str, ...], list[tuple[str, ...]]],
    ) -> None:
        memory = ShapeMemory(CONFIG)

        def shown(name: str, timeline: Timeline) -> Shown:
            causes = [cause._asdict() for cause in idle_by_cause(timeline)]
            return Shown(name, timeline, causes, curves(timeline, memory))

        runs = [shown("predicted", predicted["TeraPipe"]), shown("measured", measured["TeraPipe"])]
        proof = f"<p>Largest relative gradient difference from the plain model: <b>{error:.1e}</b> (float64).</p>"
        sections = [
            ("Measured in turns", html.table(*table)),
            ("GPipe and TeraPipe on one scale", svg.timelines(measured)),
            ("Training loss", svg.lines({"loss": losses}, "loss per step")),
            ("Exactness", proof),
        ]
        lead = f"One sequence of {TOKENS} tokens on {STAGES} stages: TeraPipe is {table[1][1][-1]} as fast as GPipe."
        html.write(FOLDER / "report.html", report("terapipe demo", lead, runs, sections=sections))
        html.write(FOLDER / "timeline.json", measured["TeraPipe"].to_json())
        html.write(FOLDER / "timeline.svg", svg.timelines(measured))


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
