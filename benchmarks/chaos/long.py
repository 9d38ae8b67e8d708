"""Random faults, one after the other: every start of a run is both the recovery from one fault and the victim of the
next.

::

    start 1   steps 1 2 3 4 5 6 *kill*                        another layout and order each time
    start 2             went on from 4: 5 6 7 8 9 *disk full*
    start 3                               went on from 8: 9 10 ... 30    weights and export compared, folder removed

A fault is **lost** if the next start does not go on from the newest checkpoint that was in place and whole, or a run
does not come to its end; **silent** if the loss of any step, or a weight at the end, is not that of the undisturbed
run; **unnamed** if no message says who or what failed; **hung** if something still ran after `DEADLINE` seconds.

Fault n of a seed is the same in every run, so a run can be resumed (``--out``) and shared out (``--first``).
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks.chaos.damage import damage
from benchmarks.chaos.runs import COMMAND, CONFIG, children, opened
from tests.support.hosts import hosts, torchrun, why_not

STEPS, TIMEOUT, DEADLINE = 30, 20, 240
CHANGES = (f"optimizer.steps={STEPS}", f"failures.timeout={TIMEOUT}", "checkpoints.every=2")
ROOM = "48m"  # of the disk of a run; its checkpoints take a few megabytes

LAYOUTS = {
    "one rank": ("plan.pp=1", "plan.num_slices=3"),
    "terapipe": ("plan.pp=2", "plan.num_slices=5"),
    "gpipe": ("plan.pp=2", "plan.order=gpipe", "plan.num_slices=4"),
    "1f1b": ("plan.pp=2", "plan.order=1f1b", "plan.num_slices=1"),
    "terapipe-1f1b": ("plan.pp=3", "plan.order=terapipe-1f1b", "plan.num_slices=4", "plan.microbatch_size=1"),
    "terapipe-zb": ("plan.pp=2", "plan.order=terapipe-zb", "plan.num_slices=3", "plan.microbatch_size=1"),
    "terapipe-v": ("plan.pp=2", "plan.order=terapipe-v", "plan.chunks=2", "plan.num_slices=6"),
    "interleaved": ("plan.pp=2", "plan.order=interleaved", "plan.chunks=3", "plan.num_slices=2"),
    "replicas": ("plan.pp=1", "plan.dp=2", "plan.num_slices=2"),
    "recomputed": ("plan.pp=2", "model.recompute=full", "plan.num_slices=4"),
}


class Fault(NamedTuple):
    """What was done to a run, and what a message must say of it; nothing where nobody is left to speak."""

    what: str
    says: str


class Start:
    """One start of a run, with a log of its own.

    Args:
        run: The run.
        number: Of the fault.
        layout: Overrides of the configuration.
    """

    def __init__(self, run: "FaultyRun", number: int, *layout: str) -> None:
        self.run, self.log = run, run.folder / f"{number}.log"
        changes = (f"logging.folder={run.disk / 'run'}", f"data.cache={run.data}", *CHANGES, *layout)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, str(run.file), *changes], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def ranks(self) -> dict[int, int]:
        """Process numbers by rank."""
        numbers = {}
        with suppress(OSError):
            for pid in children(self.process.pid):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                numbers |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
        return numbers

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], seconds: float = DEADLINE) -> bool:
        """Waits until it holds or the process has ended. Returns whether it holds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        return False

    def end(self, seconds: float = DEADLINE) -> bool:
        """Waits for the end of all processes. Returns whether they came to it."""
        ranks = self.ranks().values()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in (*self.ranks().values(), self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            return False
        deadline = time.monotonic() + seconds
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class FaultyRun:
    """A training run that goes on from fault to fault, on a disk of its own, and the undisturbed one beside it.

    Args:
        folder: For all files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk, self.data = folder, folder / "disk", folder / "data"
        self.file = folder / "run.toml"
        self.file.write_text(CONFIG)
        self.disk.mkdir()
        straight = Start(self, -1, "plan.pp=2", f"checkpoints.export={self.disk / 'export'}")
        if not straight.end() or straight.process.returncode:
            raise RuntimeError(f"the undisturbed run failed:\n{straight.said()}")
        self.losses, self.weights = self.read_losses(), opened(self.checkpoint(STEPS))
        self.exported = load_file(self.disk / "export" / "model.safetensors")
        shutil.rmtree(self.disk)
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", str(self.disk)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.disk)], check=True)

    def forget(self) -> None:
        """The run begins anew."""
        for entry in self.disk.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def unlock(self) -> None:
        """Does what a run says when it finds the folder locked by a process of another host, which it cannot ask."""
        (self.disk / "run" / "run.lock").unlink(missing_ok=True)

    def checkpoint(self, step: int) -> Path:
        return self.disk / "run" / "checkpoints" / f"step-{step:08d}"

    def in_place(self) -> list[int]:
        """Steps of the checkpoints, in order."""
        names = (self.disk / "run" / "checkpoints").glob("step-????????")
        return sorted(int(name.name[5:]) for name in names)

    def read_losses(self) -> dict[int, float]:
        path = self.disk / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def reached(self) -> int:
        """The last step that has a row."""
        return max(self.read_losses(), default=0)

    # One fault

    def attempt(self, number: int, dice: random.Random) -> dict[str, str | float]:
        """Starts the run, or goes on with it, and lets something happen to it."""
        began = time.monotonic()
        kind = dice.choice(list(KINDS))
        layout = dice.choice(list(LAYOUTS))
        outcome = ""
        while True:
            before = self.in_place()
            if kind in ("damage", "export") and len(before) < 2:
                kind = "kill"
            fault, start, ended = KINDS[kind](self, number, LAYOUTS[layout], dice)
            before = before[:-1] if kind == "damage" else before
            outcome = self._judge(fault, start, ended, before)
            if outcome or fault.what:
                break  # otherwise it had come to its end before anything happened
        return {"n": number, "kind": kind, "layout": layout, "what": fault.what, "outcome": outcome,
                "seconds": round(time.monotonic() - began, 1)}  # fmt: skip

    def _judge(self, fault: Fault, start: Start, ended: bool, before: list[int]) -> str:
        said = start.said()
        if not ended:
            return f"hung: {said[-800:]}"
        if fault.says and not re.search(fault.says, said):
            return f"unnamed: no {fault.says!r} in: {said[-800:]}"
        resumed = re.findall(r"went on from \S*step-(\d{8})", said)
        if before and resumed and int(resumed[0]) != before[-1]:
            return f"lost: went on from {int(resumed[0])}, not from {before[-1]}"
        if before and not resumed and self.in_place()[:1] == []:
            return "lost: no checkpoint is left"
        wrong = [step for step, loss in self.read_losses().items() if not _near(loss, self.losses[step])]
        if wrong:
            return f"silent: another loss in step {wrong[0]}"
        if start.process.returncode == 0 and "finished at step" in said:
            return self._judge_end()
        return ""

    def _judge_end(self) -> str:
        """Compares all that a finished run leaves, and removes it."""
        weights = opened(self.checkpoint(STEPS))
        pairs = [(weights[name], value) for name, value in self.weights.items()]
        export = self.disk / "export" / "model.safetensors"
        if export.exists():
            saved = load_file(export)
            pairs += [(saved[name], value) for name, value in self.exported.items()]
        same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)
        missing = sorted(set(range(1, STEPS + 1)) - set(self.read_losses()))
        self.forget()
        if not same:
            return "silent: other weights at the end"
        return f"lost: no row for step {missing[0]}" if missing else ""

    def finish(self) -> str:
        """The last start, to which nothing happens."""
        before = self.in_place()
        start = Start(self, -2, *LAYOUTS["terapipe"])
        ended = start.end()
        outcome = self._judge(Fault("", "finished at step"), start, ended, before)
        return outcome or ("" if start.process.returncode == 0 else f"lost: {start.said()[-800:]}")


def _near(loss: float, wanted: float) -> bool:
    return abs(loss - wanted) <= 1e-5 * abs(wanted)


# What can happen. Each starts the run and returns what it did, the start, and whether that ended in time.

Result = tuple[Fault, Start, bool]


def _moment(start: Start, dice: random.Random) -> bool:
    """Waits for a random moment of the next steps. Returns whether the run still goes on."""
    first = start.run.reached()
    wanted = min(first + dice.randint(0, 8), STEPS - 1)
    wait = dice.uniform(0.0, 0.15) if wanted > first else dice.uniform(0.0, 6.0)
    return start.wait_for(lambda: start.run.reached() >= wanted) and not start.wait_for(lambda: False, wait) and (
        start.process.poll() is None
    )  # fmt: skip


def _strike(start: Start, dice: random.Random, number: int = signal.SIGKILL) -> Fault:
    """Sends a random rank a signal."""
    ranks = start.ranks()
    if not ranks:  # one rank is the process itself
        start.process.send_signal(number)
        return Fault("the only rank", "")
    rank = dice.choice(sorted(ranks))
    with suppress(ProcessLookupError):
        os.kill(ranks[rank], number)
    return Fault(f"rank {rank} of {len(ranks)}", rf"rank {rank}\b")


def _strike_when(start: Start, ready: bool, dice: random.Random) -> Result:
    fault = _strike(start, dice) if ready else Fault("", "")
    return fault, start, start.end()


def kill(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for a rank at a random moment."""
    start = Start(run, number, *layout)
    return _strike_when(start, _moment(start, dice), dice)


def stop(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGSTOP for a rank, which never goes on. A single rank would wait for ever, so there are several."""
    layout = layout if "plan.pp=1" not in layout else LAYOUTS["terapipe"]
    start = Start(run, number, *layout)
    resumes = bool(run.in_place())
    trains = start.wait_for(lambda: "went on from" in start.said() if resumes else run.reached() > 0)
    ready = trains and _moment(start, dice)
    fault = _strike(start, dice, signal.SIGSTOP) if ready else Fault("", "")
    return fault, start, start.end()


def kill_launcher(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for the process that started the ranks: they must not outlive it."""
    start = Start(run, number, *layout)
    ready = _moment(start, dice)
    ranks = start.ranks()
    if ready:
        start.process.kill()
    ended = start.end()
    ended = ended and _are_gone(ranks.values())
    return Fault("the launcher" if ready else "", ""), start, ended


def _are_gone(pids: object) -> bool:
    deadline = time.monotonic() + TIMEOUT + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def kill_all(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for all ranks at once."""
    start = Start(run, number, *layout)
    ready, ranks = _moment(start, dice), start.ranks()
    for pid in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL) if ready else None
    if ready and not ranks:
        start.process.kill()
    return Fault("all ranks" if ready else "", r"rank \d" if ready and ranks else ""), start, start.end()


def kill_in_save(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for a rank while a checkpoint is being written."""
    start = Start(run, number, *layout)
    folder = run.disk / "run" / "checkpoints"
    ready = _moment(start, dice) and start.wait_for(lambda: any(folder.glob("*.partial")))
    return _strike_when(start, ready, dice)


def kill_in_evaluation(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for a rank right after a step that is followed by an evaluation."""
    start = Start(run, number, *layout)
    due = (run.reached() // 5 + 1) * 5
    ready = due < STEPS and start.wait_for(lambda: run.reached() >= due)
    return _strike_when(start, ready, dice)


def kill_in_preparation(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for a rank while texts become token files; the next start finds what is left."""
    shutil.rmtree(run.data)
    start = Start(run, number, *layout)
    ready = start.wait_for(lambda: run.data.exists() and any(run.data.iterdir()))
    return _strike_when(start, ready, dice)


def kill_in_profiling(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for a rank while it is measured, or shortly after."""
    seconds = round(dice.uniform(1.0, 3.0), 3)  # another number: what was measured before is not used again
    start = Start(run, number, *(key for key in layout if not key.startswith("plan.num_slices")),
                  f"plan.seconds={seconds}")  # fmt: skip
    several = start.wait_for(lambda: bool(start.ranks()), 10)
    ready = several and not start.wait_for(lambda: False, dice.uniform(2.0, 8.0)) and start.process.poll() is None
    return _strike_when(start, ready, dice)


def kill_in_export(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """SIGKILL for a rank while the finished model is being exported; the next start exports it again."""
    export = f"checkpoints.export={run.disk / 'export'}"
    start = Start(run, number, *layout, export)
    ready = start.wait_for(lambda: "writing a Hugging Face model" in start.said())
    time.sleep(dice.uniform(0.0, 0.3))
    struck = _strike_when(start, ready and start.process.poll() is None, dice)
    if not struck[0].what or not struck[2]:
        return struck
    again = Start(run, number, *layout, export)
    ended = again.end()
    return Fault(struck[0].what, "finished at step"), again, ended


def damage_checkpoint(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """Bits flipped, files cut short, deleted, exchanged or edited in the newest checkpoint."""
    newest = run.checkpoint(run.in_place()[-1])
    what, _ = damage(newest, dice)
    start = Start(run, number, *layout)
    start.wait_for(lambda: "went on from" in start.said())
    _strike_when(start, start.process.poll() is None, dice)
    return Fault(what, f"{newest.name} is damaged: "), start, start.end()


def fill_disk(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """No room on the disk from a random moment to the end."""
    start = Start(run, number, *layout)
    ready = _moment(start, dice)
    filler = run.disk / "filler"
    if ready:
        with filler.open("wb") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), b"x" * 4096)
    ended = start.end()
    filler.unlink(missing_ok=True)
    return Fault("no room on the disk" if ready else "", "No space left on device" if ready else ""), start, ended


def forbid_writing(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """A file system that cannot be written to when the run starts."""
    with _read_only(run.disk):
        start = Start(run, number, *layout)
        ended = start.end()
    return Fault("nothing can be written", "Read-only file system"), start, ended


@contextmanager
def _read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def cut_link(run: FaultyRun, number: int, layout: tuple[str, ...], dice: random.Random) -> Result:
    """Two hosts, and packets between them that are lost from some moment on."""
    first = run.reached()
    run.unlock()
    with hosts(2, rate="1gbit", delay="0ms") as (near, far):
        start = Start.__new__(Start)
        start.run, start.log = run, run.folder / f"{number}.log"
        changes = (f"logging.folder={run.disk / 'run'}", f"data.cache={run.data}", *CHANGES, *LAYOUTS["terapipe"])
        running = torchrun([near, far], "-m", "terapipe", "train", str(run.file), *changes)
        start.process = running[0]  # type: ignore[assignment]
        wanted = min(first + dice.randint(1, 6), STEPS - 1)
        ready = start.wait_for(lambda: run.reached() >= wanted) and running[0].poll() is None
        if ready:
            far.cut()
        try:
            out, err = running[0].communicate(timeout=DEADLINE)
            ended = True
        except subprocess.TimeoutExpired:
            running[0].kill()
            out, err = running[0].communicate()
            ended = False
        start.log.write_text(f"{out}\n{err}")
    run.unlock()
    return Fault("the link" if ready else "", r"rank \d on node\d" if ready else ""), start, ended


Kind = Callable[[FaultyRun, int, tuple[str, ...], random.Random], Result]
KINDS: dict[str, Kind] = {
    "kill": kill, "stop": stop, "launcher": kill_launcher, "all": kill_all, "save": kill_in_save,
    "evaluation": kill_in_evaluation, "preparation": kill_in_preparation, "profiling": kill_in_profiling,
    "export": kill_in_export, "damage": damage_checkpoint, "full": fill_disk, "read-only": forbid_writing,
    "cut": cut_link,
}  # fmt: skip


def endure(seed: int, first: int, count: int, out: Path | None) -> dict[str, int]:
    """Lets so many faults happen. Returns how many were lost, silent, unnamed and hung.

    Args:
        seed: Of the faults.
        first: Number of the first fault.
        count: How many.
        out: A file of answers, one a line; those that are in it are not asked again.
    """
    answers = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    done = {answer["n"] for answer in answers}
    if why_not():
        KINDS.pop("cut", None)
    with tempfile.TemporaryDirectory() as folder:
        run = FaultyRun(Path(folder))
        try:
            for number in range(first, first + count):
                if number in done:
                    continue
                answer = run.attempt(number, random.Random(f"{seed}.{number}"))
                answers.append(answer)
                print(json.dumps(answer), file=sys.stderr, flush=True)
                if out:
                    with out.open("a") as file:
                        file.write(json.dumps(answer) + "\n")
                if answer["outcome"]:
                    run.forget()
            last = run.finish()
        finally:
            run.close()
    outcomes = Counter(str(answer["outcome"]).partition(":")[0] for answer in [*answers, {"outcome": last}])
    kinds = Counter(str(answer["kind"]) for answer in answers)
    print("  ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    return {"faults": len(answers), **{name: outcomes[name] for name in ("lost", "silent", "unnamed", "hung")}}
