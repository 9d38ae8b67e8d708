"""What is said on a terminal, and where there is none."""

import fcntl
import io
import math
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from terapipe.training.checkpoint_folder import CheckpointFolder
from terapipe.training.config import CheckpointConfig
from terapipe.training.logging.display import Display

GIB = 2**30


def row(step: int, **more: Any) -> dict[str, Any]:
    numbers = {"loss": 4.0 - step / 100, "lr": 3e-4, "grad_norm": 0.9, "seconds": 0.5, "tokens_per_second": 4096.0}
    return {"step": step, **numbers, **more}


def seen(step: int, ranks: int = 2) -> dict[str, Any]:
    sizes = [GIB * (rank + 2) // 2 for rank in range(ranks)]
    return row(step, idle=0.083, memory=sizes, predicted=0.4)


class Clock:
    """A second for each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def plain(rows: Iterable[dict[str, Any]], every: int = 10, start: int = 0, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with Display(Console(file=file, width=80), 100, start, every, "run: gpt-tiny", Clock()) as display:
        for given in rows:
            display.row(given)
    file.seek(0)
    return file.read().splitlines()


def frame(rows: Iterable[dict[str, Any]], width: int) -> str:
    """The panel as it is at the end."""
    console = Console(force_terminal=True, width=width, height=40, file=io.StringIO(), record=True)
    with Display(console, 100, 0, 10, "run: gpt-tiny", Clock()) as display:
        for given in rows:
            display.row(given)
        console.export_text()
    drawn = console.export_text()
    return drawn[drawn.rindex("╭") :]


def test_without_a_terminal_there_is_a_line_every_so_many_steps() -> None:
    title, *lines = plain(seen(step) if step % 10 == 0 else row(step) for step in range(1, 31))
    assert title == "run: gpt-tiny"
    assert lines[0] == (
        "step  10/100  loss 3.900  lr 3.00e-04  grad norm 0.900  4,096 tokens/s  500 ms  (predicted 400 ms)  "
        "idle 8.3%  memory 1 GiB to 1.5 GiB  0:01:30 left"
    )
    assert [line.split("/")[0] for line in lines] == ["step  10", "step  20", "step  30"]


def test_the_last_step_has_a_line_too() -> None:
    lines = plain((row(step) for step in range(96, 101)), every=30, start=95)
    assert len(lines) == 2
    assert lines[1].endswith("0:00:00 left")


def test_columns_stay_where_they_are() -> None:
    lines = plain([seen(1), row(2, loss=None), row(3, loss=123.4), seen(4)], every=1)[1:]
    for word in ("lr", "grad norm", "tokens/s", "left"):
        assert len({line.index(word) for line in lines[2:]}) == 1
    assert lines[0].index("lr") == lines[1].index("lr")
    assert "loss" not in lines[1]
    assert "idle" not in lines[1]


def test_values_that_are_missing_or_not_finite_are_left_out() -> None:
    lines = plain([{"step": 1, "loss": math.nan, "lr": None, "grad_norm": math.inf, "seconds": 0.5, "memory": []}], 1)
    assert lines[1] == "step   1/100  500 ms  0:01:39 left"


def test_evaluations_events_and_samples_come_as_they_are() -> None:
    lines = plain(
        [
            {"step": 5, "eval_loss": 3.0, "perplexity": 20.1},
            {"step": 5, "event": "drift", "message": "31% [slower] than predicted " + "x" * 80},
            {"step": 5, "event": "stopped"},
            {"step": 5, "sample": "[bold]To be[/]\n\x1b[2J\x07or\tnot\x00"},
        ]
    )
    replaced = "\N{REPLACEMENT CHARACTER}"
    assert lines[1:] == [
        "step 5  evaluation: loss 3.000, perplexity 20.1",
        "step 5  drift: 31% [slower] than predicted " + "x" * 80,  # not wrapped
        "step 5  stopped",
        "step 5  sample:",
        "  | [bold]To be[/]",
        f"  | {replaced}[2J{replaced}or not{replaced}",
    ]


def test_no_control_characters_without_a_terminal() -> None:
    text = "\n".join(plain([seen(10), {"step": 10, "event": "nan", "message": "loss"}]))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_an_output_of_few_characters_is_enough() -> None:
    lines = plain([{"step": 1, "sample": "ü…\ud800"}, row(10, seconds=5e-5)], encoding="ascii")
    assert lines[2] == "  | ???"
    assert "50 ?s" in lines[3]


def test_a_log_file_on_a_full_disk_does_not_stop_training() -> None:
    tried = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(28, "No space left on device")

    with Display(Console(file=Full()), 100, 0, 1, "run") as display:
        display.row(row(1))
        display.row(row(2))
    assert "step  2/100" in re.sub(r"step +2", "step  2", tried[-1]), "the disk may have room again"


ALL = [
    *(seen(step) for step in range(1, 41)),
    row(41, loss=None, skipped=True),
    {"step": 40, "eval_loss": 3.25, "perplexity": 25.8},
    {"step": 40, "event": "drift", "message": "slower than predicted"},
    {"step": 40, "event": "checkpoint", "message": "saved"},
]


@pytest.mark.parametrize("width", [40, 60, 100, 160])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 512])
def test_the_panel_shows_everything_at_any_width(width: int, ranks: int) -> None:
    panel = frame([*ALL, seen(42, ranks)], width)
    assert {len(line) for line in panel.splitlines()} == {width}
    words = re.sub(r"[\s│]+", " ", panel)
    found = [
        "run: gpt-tiny", "step 42/100", "left", "loss 3.580", "recent mean 3.790", "eval loss 3.250", "perplexity 25.8",
        "evaluated step 40", "checkpoint step 40", "left out 1 step ", "lr 3.00e-04", "grad norm 0.900",
        "tokens/s 4,096", "step time 500 ms", "predicted 400 ms (1.25 x)", "idle 8.3%", "step 40, drift: slower",
    ]  # fmt: skip
    if ranks > 8:
        found += ["memory 1 GiB to", f"fullest rank {ranks - 1}"]
    else:
        found += [f"rank {rank}" for rank in range(ranks)] + ["1 GiB"]
    assert [phrase for phrase in found if phrase not in words] == []
    assert len(panel.splitlines()) < 36


def test_the_panel_begins_with_what_there_is() -> None:
    assert "left" not in frame([], 60)
    assert "loss" not in frame([{"step": 1, "event": "resumed"}], 60)
    early = frame([row(1, loss=math.nan, predicted=0.0)], 60)
    assert "tokens/s" in early
    assert not re.search(r"loss|nan|predicted|idle|rank", early)


def test_messages_scroll_by_above_the_panel() -> None:
    console = Console(force_terminal=True, width=60, file=io.StringIO(), record=True)
    with Display(console, 100, 0, 10, "run", Clock()) as display:
        for given in ALL:
            display.row(given)
        display.say("metrics.jsonl [1] could not be written")
    drawn = console.export_text()
    assert "metrics.jsonl [1] could not be written\n" in drawn
    assert "step 40  evaluation: loss 3.250, perplexity 25.8\n" in drawn
    assert "step 40  drift: slower than predicted\n" in drawn
    assert "checkpoint: saved" not in drawn  # the panel has it


def test_time_left_is_by_the_wall_clock() -> None:
    """Two seconds a step, of which a training step takes a half: evaluations count."""
    clock = Clock()
    file = io.StringIO()
    with Display(Console(file=file), 100, 90, 1, "run", clock) as display:
        for step in (91, 92, 93):
            clock()
            display.row(row(step))
    assert file.getvalue().endswith("0:00:14 left\n")


def test_the_panel_is_right(tmp_path: Path) -> None:
    """A checkpoint written in the background was shown as of the step at which it was done, and the speed of the last
    step stood beside the time of all recent ones."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    display = Display(console, 100, 0, 10, "a run")
    said = []
    saves = CheckpointFolder(tmp_path, CheckpointConfig(), False, lambda *row: said.append(row))
    saves._note_saved({"step": 7, "best": None})
    display.row({"step": said[0][2], "event": "checkpoint", "message": ""})
    for step, seconds in enumerate((1.0, 1.0, 4.0), 8):
        display.row({"step": step, "seconds": seconds, "tokens_per_second": 100 / seconds})
    assert display._latest["saved"] == 7
    assert (display._latest["median"], display._latest["tokens_per_second"]) == (1.0, 100.0)


WATCHED = """
import os, signal, sys, termios
from terapipe.training.trainer import StopSignal
from terapipe.training.logging.display import Terminal

with Terminal() as terminal:
    stop = StopSignal(terminal.restore)
    print("^C is printed:", bool(termios.tcgetattr(0)[3] & termios.ECHOCTL), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    """A second Ctrl-C left the cursor hidden, and the first one's ^C pushed the panel out of its place."""
    ours, theirs = os.openpty()

    def take() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    line = [sys.executable, "-c", WATCHED]
    code = subprocess.run(line, stdin=theirs, stdout=theirs, start_new_session=True, preexec_fn=take).returncode
    said = os.read(ours, 4096).decode()
    left = termios.tcgetattr(theirs)[3] & termios.ECHOCTL
    os.close(ours)
    os.close(theirs)
    assert code == 128 + signal.SIGINT
    assert "^C is printed: False" in said
    assert said.endswith("\x1b[?25h"), "the cursor is shown"
    assert left
