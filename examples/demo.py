"""`make demo`: a small GPT on real text over two pipeline stages, each sequence cut along its tokens.

Proves that nothing changes but the speed, trains, measures TeraPipe against GPipe, and writes a report to look at.
"""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from terapipe import GPT, PRESETS, Pipeline, Plan, Timeline, next_token_labels, split_layers
from terapipe.modeling.stage import IGNORE
from terapipe.reporting import html, svg, text

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
REPORT = Path("build/demo/report.html")
STAGES, TOKENS, STEPS, ROUNDS = 2, 2048, 60, 6
CONFIG = PRESETS["gpt-small"]
CUTS = split_layers(CONFIG, STAGES, TOKENS)
GPIPE = Plan((1,), ((TOKENS,),), CUTS, "gpipe")
TERAPIPE = Plan((1,), ((352, 304, 272, 256, 232, 224, 208, 200),), CUTS, "terapipe")
UNEVEN = Plan((1,), ((100, 1, 60, 95),), CUTS, "terapipe")


def main() -> None:
    """Starts the ranks as torchrun would."""
    began = time.monotonic()
    console = Console()
    console.rule("[bold]terapipe: one sequence, two stages")
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=STAGES,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    elastic_launch(launch, rank_main)()
    console.print(f"\nReport: [bold]{REPORT}[/]  ({time.monotonic() - began:.0f} s in all)")


def rank_main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    Demo(Console(quiet=rank != 0)).run()


class Demo:
    """All ranks run it; only the first one has a console that prints."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bytes = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.model = GPT(CONFIG)
        self.terapipe, self.gpipe = Pipeline(self.model, TERAPIPE), Pipeline(self.model, GPIPE)

    def run(self) -> None:
        million = CONFIG.parameters / 1e6
        self.console.print(
            f"A GPT of {million:.1f} million parameters, {CONFIG.layers} layers over {STAGES} processes;\n"
            f"each step one sequence of {TOKENS} tokens, in slices of {list(TERAPIPE.lengths[0])}.\n"
        )
        error = self.check()
        losses = self.train()
        times = self.race()
        timelines = {"GPipe": times["GPipe"][1], "TeraPipe": times["TeraPipe"][1]}
        seconds = {name: value for name, (value, _) in times.items()}
        self.show(error, losses, seconds, timelines)

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

    def train(self) -> list[float]:
        pipe = self.terapipe
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
            for name, pipe in (("GPipe", self.gpipe), ("TeraPipe", self.terapipe)):
                seconds = max(pipe.gather(_timed(lambda pipe=pipe: pipe.step(*batch))))
                pipe.zero_grad()
                timeline = pipe.timeline()
                if turn >= 0 and (name not in best or seconds < best[name][0]):
                    best[name] = (seconds, timeline)
        return best

    def show(
        self, error: float, losses: list[float], seconds: dict[str, float], timelines: dict[str, Timeline]
    ) -> None:
        speedup = seconds["GPipe"] / seconds["TeraPipe"]
        rows = [
            (name, f"{t:.3f} s", f"{timelines[name].idle:.0%}", f"{seconds['GPipe'] / t:.2f} x")
            for name, t in seconds.items()
        ]
        header = ("order", "best step", "idle", "speed-up")
        self.console.print(f"The same step, measured in turns, best of {ROUNDS}:")
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        scale = max(t.makespan for t in timelines.values())
        for name, timeline in timelines.items():
            self.console.print(f"\n{name}: forwards are digits, backwards letters, idle time dots", highlight=False)
            self.console.print(text.draw(timeline, min(100, self.console.width - 10), scale), highlight=False)
        if self.terapipe.is_first:
            lead = (
                f"One sequence of {TOKENS} tokens on {STAGES} stages: TeraPipe is {speedup:.2f} times as fast as GPipe."
            )
            proof = f"<p>Largest relative gradient difference from the plain model: <b>{error:.1e}</b> (float64).</p>"
            sections = [
                ("Measured step", html.table(header, rows)),
                ("Measured timelines", svg.timelines(timelines)),
                ("Training loss", svg.lines({"loss": losses}, "loss per step")),
                ("Exactness", proof),
            ]
            html.write(REPORT, html.page("terapipe demo", lead, sections))
            html.write(REPORT.with_name("timeline.svg"), svg.timelines(timelines))


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
