"""Kills ranks of training runs with SIGKILL at random moments, saves included, and sees whether anything is lost.

A try: the same run as the undisturbed one, a random rank killed at a random moment, started again. It survives if all
checkpoints that had been put in place open, if it goes on from one of them, and if the losses of all steps and the
parameters at the end are those of the undisturbed run: to the last bit, or in another layout to rounding.

Then damages checkpoints at random, see damage.py.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.chaos.damage import Damages
from benchmarks.chaos.long import endure
from benchmarks.chaos.runs import COMMAND, CONFIG, STEPS, children, opened
from benchmarks.harness import summary, table
from terapipe.training.config import load


class Chaos:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "run.toml"
        self.file.write_text(CONFIG)
        self.data = folder / "data"
        self.finish(self.start("straight"))
        self.truth = self.state("straight")

    def start(self, name: str, *more: str, command: tuple[str, ...] = COMMAND) -> subprocess.Popen[str]:
        where = (f"logging.folder={self.folder / name}", f"data.cache={self.data}")
        log = (self.folder / f"{name}.log").open("a")
        return subprocess.Popen([*command, str(self.file), *where, *more], stdout=log, stderr=log, text=True)

    def finish(self, process: subprocess.Popen[str]) -> None:
        if process.wait(300) != 0:
            logs = "\n".join(log.read_text() for log in self.folder.glob("*.log"))
            raise RuntimeError(f"ended with {process.returncode}:\n{logs}")

    def state(self, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The losses of all steps, and the parameters at the end."""
        rows = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
        return [losses[step] for step in range(1, STEPS + 1)], opened(self.checkpoint(name, STEPS))

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"step-{step:08d}"

    def whole(self, name: str) -> list[int]:
        found = (self.folder / name / "checkpoints").glob("step-????????")
        return sorted(int(f.name[5:]) for f in found)

    # One try

    def attempt(self, number: int, dice: random.Random) -> str:
        """What was lost, or nothing."""
        name = f"try{number}"
        process = self.start(name)
        self._wait_for_moment(name, process, dice, saving=number % 4 == 1)
        os.kill(dice.choice(children(process.pid)), signal.SIGKILL)
        process.wait(60)
        before = self.whole(name)
        for step in before:
            opened(self.checkpoint(name, step))
        elsewhere = {2: ("plan.pp=1",), 3: ("plan.pp=3", "plan.order=terapipe", "plan.num_slices=5")}.get(
            number % 4, ()
        )
        self.finish(self.start(name, *elsewhere))
        return self._lost(name, before, exact=not elsewhere)

    def _wait_for_moment(self, name: str, process: subprocess.Popen[str], dice: random.Random, *, saving: bool) -> None:
        """A random one, from before the first step to the last but two; or one in the middle of a save."""
        reached = dice.randint(-2, STEPS - 2)
        while process.poll() is None and (self.reached(name) < reached or not children(process.pid)):
            time.sleep(0.005)
        time.sleep(dice.uniform(0.0, 0.1 if reached >= 0 else 8.0))
        folder = self.folder / name / "checkpoints"
        while saving and process.poll() is None and not any(folder.glob("*.partial")):
            time.sleep(0.0005)

    def reached(self, name: str) -> int:
        """The last step of which there is a row."""
        path = self.folder / name / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=-1)

    def _lost(self, name: str, before: list[int], exact: bool) -> str:
        losses, parameters = self.state(name)
        wanted, truth = self.truth
        if exact:
            same = losses == wanted and all(torch.equal(parameters[k], truth[k]) for k in truth)
        else:
            near = all(abs(a - b) < 1e-5 * abs(b) for a, b in zip(losses, wanted, strict=True))
            same = near and all(torch.allclose(parameters[k], truth[k], rtol=1e-3, atol=1e-4) for k in truth)
        if not same:
            return f"{name}: another result"
        log = (self.folder / f"{name}.log").read_text()
        if before and f"step-{before[-1]:08d}" not in log.split("went on from")[-1]:
            return f"{name}: did not go on from step {before[-1]}"
        return ""

    # Restarts by torchrun

    def restarts(self, tried: int, dice: random.Random) -> int:
        """How often a run goes on by itself after one of its ranks was killed."""
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(tried), "-m")
        name = "restarts"
        process = self.start(name, "optimizer.steps=100000", command=(sys.executable, *torchrun, *COMMAND[-2:]))
        survived = 0
        while self._goes_on(name, process, survived) and survived < tried:
            time.sleep(dice.uniform(0.0, 1.0))
            os.kill(dice.choice(children(process.pid)), signal.SIGKILL)
            survived += 1
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        return survived

    def _goes_on(self, name: str, process: subprocess.Popen[str], restarts: int) -> bool:
        """Whether the run saves new checkpoints after so many restarts."""
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
            parts = log.read_text().split("went on from")
            if len(parts) > restarts and "saved" in parts[-1]:
                return True
        return False


def killed(folder: Path, *, quick: bool) -> dict[str, int]:
    tries, restarts = (4, 2) if quick else (20, 12)
    dice = random.Random(0)
    chaos = Chaos(folder)
    lost = [chaos.attempt(number, dice) for number in range(tries)]
    went_on = chaos.restarts(restarts, dice)
    rows = [(str(number), what or "nothing lost") for number, what in enumerate(lost)]
    table("Killed ranks", ("try", "outcome"), rows)
    return {"survived": lost.count(""), "tried": tries, "restarts_survived": went_on, "restarts_tried": restarts}


def damaged(folder: Path, *, quick: bool) -> dict[str, int]:
    """A small run of two ranks, and so of two shards in each of its checkpoints."""
    changes = ("model.preset=layers=2,hidden=16,heads=2", "data.seq_len=32", "plan.num_slices=2", "optimizer.steps=6",
               "checkpoints.keep=0", "evaluation.every=0")  # fmt: skip
    file, run = folder / "damaged.toml", folder / "undamaged"
    file.write_text(CONFIG)
    changes = (*changes, f"logging.folder={run}", f"data.cache={folder / 'damaged-data'}")
    subprocess.run([*COMMAND, str(file), *changes], check=True, stdout=subprocess.DEVNULL)
    damages, dice = Damages(load(file, (*changes, "plan.pp=1")), folder), random.Random(0)
    tries = 20 if quick else 100
    tried = [damages.attempt(number, dice) for number in range(tries)]
    table("Damaged checkpoints", ("damage", "outcome"), [(what, silent or "noticed") for what, silent in tried])
    return {"damaged": tries, "noticed": [silent for _, silent in tried].count("")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tries")
    parser.add_argument("--damage-only", action="store_true", help="damage checkpoints only, without killing ranks")
    parser.add_argument("--long", action="store_true", help="faults of all kinds, one after the other; see long.py")
    parser.add_argument("--seed", type=int, default=1, help="of the faults of --long")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault of --long")
    parser.add_argument("--count", type=int, default=1000, help="faults of --long; about ten seconds each")
    parser.add_argument("--out", type=Path, help="file of answers, so that --long can be resumed")
    told = parser.parse_args()
    if told.long:
        summary(endure(told.seed, told.first, told.count, told.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = {} if told.damage_only else killed(Path(folder), quick=told.quick)
        figures |= damaged(Path(folder), quick=told.quick)
    summary(figures)


if __name__ == "__main__":
    main()
