"""`terapipe train`: the same curve in every layout, exact going on, stopping, failing."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terapipe import GPT
from terapipe.cli import main
from terapipe.modeling.stage import IGNORE
from terapipe.planning.presets import gpt_config
from terapipe.training.config import RunConfig, parse
from terapipe.training.data.loader import Batches
from terapipe.training.data.token_file import open_data
from terapipe.training.logging.metrics import read
from tests import pretend
from tests.support.commands import Command, started
from tests.support.ranks import Ranks
from tests.unit.training.loop import curve

TEXT = Path(__file__).parents[3] / "examples" / "data" / "shakespeare.txt"
SHAPE = "layers=3,hidden=16,heads=2"


def config(folder: Path, text: str, *replaced: str) -> RunConfig:
    return parse(
        f"""
[model]
preset = "{SHAPE}"
dtype = "float64"
[data]
train = "{folder.parent / "text.txt"}"
cache = "{folder.parent / "data"}"
seq_len = 24
batch_size = 2
eval_share = 0.1
[plan]
seconds = 0
[optimizer]
steps = 50
accumulate = 2
max_grad_norm = 0.5
lr = 0.01
eps = 1e-4
[lr]
warmup = 5
[checkpoints]
every = 0
[evaluation]
every = 10
batches = 3
[logging]
folder = "{folder}"
tensorboard = false
[failures]
timeout = 300
{text}""",
        replaced,
    )


class After:
    """A stop request after this number of steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def received(self) -> str:
        self.left -= 1
        return "" if self.left else "a test"


def train(told: RunConfig, until: int = 0) -> None:
    from terapipe.runtime.comm.environment import local_device
    from terapipe.runtime.comm.transport import Transport
    from terapipe.training.run import Run

    Run(told, Transport.join(local_device(), timeout=300.0), After(until)).run()  # type: ignore[arg-type]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read(folder) if "loss" in row]


def evaluations(folder: Path) -> list[float]:
    return [row["eval_loss"] for row in read(folder) if "eval_loss" in row]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT.read_text()[:6000])
    return folder


# The same curve


def plainly(told: RunConfig, steps: int) -> list[float]:
    """The losses of a plain loop."""
    data = open_data(told.data, Path(told.data.cache))
    gpt = GPT(replace(gpt_config(SHAPE), vocab=data.tokenizer.vocab)).double()
    rows = Batches(data.train, told.data.seq_len, told.data.packing, True, 0)
    return curve(told, gpt, rows, steps, lambda m, r: m.loss(m(r.ids), r.labels) / (r.labels != IGNORE).sum())


LAYOUTS = {
    "one process": (1, ()),
    "2 stages": (2, ("plan.order=1f1b",)),
    "3 stages sliced": (3, ("plan.order=terapipe", "plan.slice_lengths=[9,1,14]")),
    "2 replicas x 2 stages": (4, ("plan.dp=2", "plan.num_slices=3")),
    "2 replicas x 2 stages, sharded": (4, ("plan.dp=2", "plan.shard=true", "plan.order=terapipe-1f1b")),
}
if pretend.is_active():  # slower there
    LAYOUTS = {name: LAYOUTS[name] for name in ("one process", "2 replicas x 2 stages, sharded")}


@pytest.mark.parametrize(
    ("packing", "steps"),
    [("concat", 10), *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in (("padded", 10), ("concat", 50)))],
)
def test_the_curve_is_that_of_a_plain_loop(
    ranks: Callable[[int], Ranks], place: Path, packing: str, steps: int
) -> None:
    text = "\n".join(TEXT.read_text()[i : i + 37 + i % 29] for i in range(0, 6000, 60))
    (place / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in text.split("\n") if line))
    found = {}
    for number, (name, (size, more)) in enumerate(LAYOUTS.items()):
        source = (f"data.train={place / 'lines.jsonl'}", f"data.cache={place / 'lines'}", f"data.packing={packing}")
        told = config(place / f"{packing}{steps}-{number}", "", f"optimizer.steps={steps}", *more, *source)
        ranks(size)(train, told)
        found[name] = losses(told.folder)
        assert evaluations(told.folder) == pytest.approx(evaluations(place / f"{packing}{steps}-0"), rel=1e-9)
    wanted = plainly(told, steps)
    assert len(evaluations(told.folder)) == steps // 10
    for name, values in found.items():
        assert values == pytest.approx(wanted, rel=1e-9), name
    assert wanted[-1] < 0.9 * wanted[0]


# Going on


def command(folder: Path, told: RunConfig) -> AbstractContextManager[Command]:
    path = folder.with_suffix(".toml")
    path.write_text(told.to_toml())
    return started(["train", str(path)], folder.with_suffix(".txt"))


def reached(folder: Path, step: int) -> bool:
    return any(row["step"] >= step for row in read(folder) if "loss" in row)


ENDLESS = ("lr.kind=constant", "optimizer.steps=1000000")  # over only when a test says so


def straight(ranks: Callable[[int], Ranks], folder: Path, steps: int) -> list[float]:
    """The curve of as many steps, undisturbed."""
    told = config(folder.with_name(f"{folder.name}-straight"), "", "lr.kind=constant", f"optimizer.steps={steps}")
    ranks(2)(train, told)
    return losses(told.folder)


@pytest.mark.gpu_seldom
def test_a_killed_rank_is_survived(ranks: Callable[[int], Ranks], place: Path) -> None:
    """By itself, from the last checkpoint, to the last bit."""
    folder = place / "killed"
    told = config(folder, "", *ENDLESS, "checkpoints.every=5", "plan.pp=2", "failures.restarts=1")
    with command(folder, told) as run:
        run.until(lambda: reached(folder, 12))
        os.kill(run.workers()[1], signal.SIGKILL)
        run.until(lambda: any("loss" in row for row in _after_resuming(folder)))
        run.signal(signal.SIGINT)
        assert run.end() == 0, run.said
        assert "went on from" in run.said
        assert "rank 1 is gone" in run.said
    assert losses(folder) == straight(ranks, folder, len(losses(folder)))


def _after_resuming(folder: Path) -> list[dict[str, Any]]:
    rows = read(folder)
    return rows[next((at for at, row in enumerate(rows) if row.get("event") == "resumed"), len(rows)) :]


@pytest.mark.gpu_seldom
@pytest.mark.exhaustive
def test_going_on_in_another_layout(ranks: Callable[[int], Ranks], place: Path) -> None:
    folder, steps = place / "moved", ("lr.kind=constant", "optimizer.steps=40")
    ranks(2)(train, config(folder, "", *steps), 11)
    ranks(3)(train, config(folder, "", *steps, "plan.order=terapipe", "plan.slice_lengths=[5,12,7]"), 9)
    ranks(4)(train, config(folder, "", *steps, "plan.dp=2", "plan.shard=true"), 8)
    assert len(losses(folder)) == 28
    ranks(1)(train, config(folder, "", *steps))
    assert losses(folder) == pytest.approx(straight(ranks, folder, 40), rel=1e-9)


@pytest.mark.gpu_seldom
@pytest.mark.exhaustive_ids("^1$")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_asked_to_stop_it_saves_and_ends_well(ranks: Callable[[int], Ranks], place: Path, size: int) -> None:
    folder = place / f"stopped{size}"
    told = config(folder, "", *ENDLESS, f"plan.pp={size}")
    with command(folder, told) as run:
        run.until(lambda: reached(folder, 3))
        run.signal(signal.SIGINT)
        assert run.end() == 0, run.said
        assert "SIGINT" in run.said
    steps = len(losses(folder)) + 4
    ranks(size)(train, config(folder, "", ENDLESS[0], f"optimizer.steps={steps}", f"plan.pp={size}"))
    found = losses(folder)
    assert len(found) == steps
    wanted = straight(ranks, folder, steps)
    assert found == (wanted if size == 2 else pytest.approx(wanted, rel=1e-9))


@pytest.mark.gpu_seldom
def test_beginning_anew_and_from_another_run(ranks: Callable[[int], Ranks], place: Path) -> None:
    first, second = place / "first", place / "second"
    ranks(2)(train, config(first, "", "optimizer.steps=3", "checkpoints.resume=off"))
    with pytest.raises(ValueError, match="holds checkpoints of a run before"):
        ranks(1)(train, config(first, "", "optimizer.steps=4", "checkpoints.resume=off"))
    start = first / "checkpoints" / "step-00000003"
    more = ("optimizer.steps=5", f"checkpoints.resume={start}")
    ranks(1)(train, config(second, "", *more), 1)
    assert [row["step"] for row in read(second) if "loss" in row] == [4]
    ranks(1)(train, config(second, "", *more))
    assert [row["step"] for row in read(second) if "loss" in row] == [4, 5], "its own latest comes first"


# Failing


@pytest.mark.gpu_seldom
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_what_is_not_finite_is_not_learned(ranks: Callable[[int], Ranks], place: Path, policy: str) -> None:
    folder = place / f"nan-{policy}"
    told = config(
        folder, "", "optimizer.steps=6", f"failures.on_nan={policy}", "failures.max_skipped=3", "optimizer.lr=1e300"
    )
    with pytest.raises(ArithmeticError, match="not finite"):
        ranks(2)(train, told)
    rows = [row for row in read(folder) if "loss" in row]
    assert [row.get("skipped", False) for row in rows] == [False] + [True] * (3 if policy == "skip" else 1)
    assert rows[-1]["loss"] is None


@pytest.mark.gpu_seldom
def test_bad_input_is_one_message(place: Path) -> None:
    folder = place / "bad"
    told = config(folder, "", "plan.pp=2", f"data.train={place / 'nothing.txt'}")
    with command(folder, told) as run:
        assert run.end() == 2
        assert run.said.count("nothing.txt") == run.said.count("\n") == 1


@pytest.mark.gpu_seldom
def test_a_finished_run_says_so_and_starts_no_ranks(
    ranks: Callable[[int], Ranks], place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks met, loaded the last checkpoint, and ended."""
    folder = place / "finished"
    told = config(folder, "", "optimizer.steps=2", "plan.pp=2", "optimizer.accumulate=1", "evaluation.every=0")
    ranks(2)(train, told)
    file = place / "finished.toml"
    file.write_text(told.to_toml())
    started_ranks: list[object] = []
    monkeypatch.setattr("terapipe.launch.processes.launch_module", lambda *given: started_ranks.append(given) or "")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["train", str(file)]) == 0
    assert f"this run has finished, at step 2: {folder}" in capsys.readouterr().out
    assert not started_ranks
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"} == before
    for more in ("optimizer.steps=3", f"checkpoints.export={place / 'exported'}", "model.seed=1"):
        main(["train", str(file), more])
        assert started_ranks.pop(), f"with {more} there is something to do, or to refuse"
    shutil.rmtree(folder / "checkpoints")
    main(["train", str(file)])
    assert started_ranks
