"""Rows on their way to files and trackers: nothing twice, nothing torn, and no reason to stop training."""

import json
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from terapipe.training.config import LoggingConfig
from terapipe.training.logging.metrics import FILE, Metrics, check, read

PLAIN = LoggingConfig(tensorboard=False)
STEP = {
    "loss": 3.5,
    "lr": 3e-4,
    "grad_norm": 0.9,
    "seconds": 0.5,
    "tokens": 64,
    "tokens_per_second": 128.0,
    "predicted": 0.4,
    "idle": 0.08,
    "memory": [2**30, 2**29],
}
NAMES = {
    "train/loss": 3.5,
    "train/lr": 3e-4,
    "train/grad_norm": 0.9,
    "speed/seconds": 0.5,
    "speed/tokens_per_second": 128.0,
    "speed/predicted": 0.4,
    "speed/idle": 0.08,
    "memory/rank0": 2**30,
    "memory/rank1": 2**29,
}


def write(folder: Path, steps: range, config: LoggingConfig = PLAIN, **more: Any) -> list[str]:
    """A run over these steps, the first of them the first that is done; what was complained about."""
    said: list[str] = []
    metrics = Metrics(folder, config, step=steps.start - 1, settings={"lr": 3e-4}, complain=said.append)
    for step in steps:
        metrics.write({"step": step, **STEP, **more})
    metrics.close()
    return said


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read(folder)]


def test_rows_are_read_back_as_soon_as_they_are_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "new" / "run", PLAIN, step=0, settings={})
    rows: list[dict[str, Any]] = [{"step": 1, **STEP}, {"step": 1, "sample": 'a\n"b"\u2028 ü'}]
    for row in rows:
        metrics.write(row)
    assert read(tmp_path / "new" / "run") == rows
    assert read(tmp_path / "elsewhere") == []


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2), loss=math.nan, grad_norm=-math.inf, memory=[1.0, math.inf], skipped=True)
    (line,) = (tmp_path / FILE).read_text().splitlines()
    row = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (row["loss"], row["grad_norm"], row["memory"], row["skipped"]) == (None, None, [1.0, None], True)


def test_a_resumed_run_has_no_row_twice(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(7, 9), loss=1.0)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["loss"] for row in read(tmp_path)][5:7] == [3.5, 1.0]
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 0, "eval_loss": 9.0}\n')
    write(tmp_path, range(1, 3))  # from the beginning: what was there is another run's
    assert steps(tmp_path) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4}', "{", '"', "12"])
def test_a_torn_last_line_is_passed_over_and_dropped(tmp_path: Path, torn: str) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / FILE).open("a") as file:
        file.write(torn)
    assert [step for step in steps(tmp_path) if step < 4] == [1, 2, 3]
    write(tmp_path, range(4, 5))
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def full_disk(limit: int) -> Callable[[], None]:
    """From now on no file grows beyond so many bytes; what is returned makes room again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_once_and_leaves_no_torn_line(tmp_path: Path) -> None:
    """A real one, as far as the kernel can play it: the third row fits only in part."""
    said: list[str] = []
    metrics = Metrics(tmp_path, PLAIN, step=0, settings={}, complain=said.append)
    line = len(json.dumps({"step": 1, **STEP})) + 1
    make_room = full_disk(2 * line + line // 2)
    try:
        for step in range(1, 6):
            metrics.write({"step": step, **STEP})
    finally:
        make_room()
    assert steps(tmp_path) == [1, 2]
    for step in (6, 7):
        metrics.write({"step": step, **STEP})
    metrics.close()
    assert [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()] == [*range(1, 8)], (
        "rows that were refused are written later"
    )
    assert len(said) == 1
    assert said[0].startswith(f"{FILE} could not be written: ")
    assert str(tmp_path / FILE) in said[0]


def test_a_row_that_was_refused_at_the_very_end_is_written_when_the_run_ends(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, PLAIN, step=0, settings={}, complain=lambda message: None)
    metrics.write({"step": 1})
    make_room = full_disk((tmp_path / FILE).stat().st_size + 4)
    try:
        metrics.write({"step": 2})
    finally:
        make_room()
    metrics.close()
    assert (tmp_path / FILE).read_text() == '{"step": 1}\n{"step": 2}\n'


def test_no_part_of_a_row_is_left_on_a_disk_that_stays_full(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, PLAIN, step=0, settings={}, complain=lambda message: None)
    metrics.write({"step": 1})
    make_room = full_disk((tmp_path / FILE).stat().st_size + 4)
    try:
        metrics.write({"step": 2})
        metrics.close()
    finally:
        make_room()
    assert (tmp_path / FILE).read_text() == '{"step": 1}\n'


def test_a_run_on_a_disk_that_is_full_already_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(1, 6))

    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("terapipe.training.logging.metrics.files.write", fail)
    (said,) = write(tmp_path, range(4, 6))
    assert "No space left on device" in said
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 4, 5]


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return found


def test_tensorboard_has_every_number_under_its_name(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, LoggingConfig(), step=0, settings={})
    metrics.write({"step": 1, **STEP})
    metrics.write({"step": 2, "loss": math.nan, "seconds": 0.5, "skipped": True})
    metrics.write({"step": 2, "eval_loss": 3.0, "perplexity": 20.1})
    metrics.write({"step": 2, "sample": "To be\n* or not"})
    metrics.write({"step": 2, "event": "checkpoint", "message": "saved"})
    metrics.close()
    found = events(tmp_path)
    first = {name: found.Scalars(name)[0].value for name in found.Tags()["scalars"]}
    assert first == pytest.approx({**NAMES, "eval/loss": 3.0, "eval/perplexity": 20.1}, rel=1e-6)
    assert [event.step for event in found.Scalars("train/loss")] == [1]
    assert [event.step for event in found.Scalars("speed/seconds")] == [1, 2]
    texts = {name: found.Tensors(name)[0].tensor_proto.string_val[0] for name in found.Tags()["tensors"]}
    assert texts == {
        "samples/text_summary": b"    To be\n    * or not",
        "events/text_summary": b"**checkpoint** saved",
    }


def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11), LoggingConfig())
    write(tmp_path, range(7, 9), LoggingConfig(), loss=1.0)
    found = [(event.step, event.value) for event in events(tmp_path).Scalars("train/loss")]
    assert found == [(step, 1.0 if step > 6 else 3.5) for step in range(1, 9)]


def test_without_tensorboard_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (said,) = write(tmp_path, range(1, 4), LoggingConfig())
    assert "pip install tensorboard" in said
    assert steps(tmp_path) == [1, 2, 3]


def test_a_failed_event_file_is_followed_by_another_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, full, rows = [], [True], []

    class Writer:
        def __init__(self, folder: Path, purge_step: int | None, flush_secs: int) -> None:
            made.append(purge_step)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if full[0]:
                raise OSError("full")
            rows.append((name, step))

        def close(self) -> None: ...

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    said: list[str] = []
    metrics = Metrics(tmp_path, LoggingConfig(), step=0, settings={}, complain=said.append)
    for step in range(1, 101):
        metrics.write({"step": step, **STEP})
    assert len(made) == 4  # at rows 1, 12, 33 and 74
    full[0] = False
    for step in range(101, 301):
        metrics.write({"step": step, **STEP})
    metrics.close()
    assert made == [0, None, None, None, None]
    assert [step for name, step in rows if name == "train/loss"] == list(range(1, 301)), "those that waited, too"
    assert len(said) == 1
    assert steps(tmp_path) == list(range(1, 301))


class Tracker(ModuleType):
    """As far as wandb and trackio are alike."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.broken = False

    def init(self, **given: Any) -> "Tracker":
        self.begun.append(given)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.broken:
            raise RuntimeError("no network")
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.rows.append((-1, {}))


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    module = Tracker(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def wanted(tracker: str) -> LoggingConfig:
    return LoggingConfig(tensorboard=False, **{tracker: "project"})  # type: ignore[arg-type]


def test_trackers_get_settings_and_numbers(tracker: Tracker, tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run", wanted(tracker.__name__), step=0, settings={"lr": 3e-4})
    metrics.write({"step": 1, **STEP})
    metrics.write({"step": 1, "event": "checkpoint", "message": "saved"})
    metrics.write({"step": 1, "eval_loss": math.inf, "perplexity": 2.0})
    metrics.close()
    assert tracker.rows == [(1, NAMES), (1, {"eval/perplexity": 2.0}), (-1, {})]
    (begun,) = tracker.begun
    assert (begun["project"], begun["config"], begun["group"]) == ("project", {"lr": 3e-4}, "run")


def test_a_tracked_run_is_continued_only_where_it_ended(tracker: Tracker, tmp_path: Path) -> None:
    for span in (range(1, 6), range(6, 9), range(7, 9), range(1, 3)):
        write(tmp_path, span, wanted(tracker.__name__))
    names = [begun["name"] for begun in tracker.begun]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert len({begun["group"] for begun in tracker.begun}) == 1
    assert {begun["resume"] for begun in tracker.begun} == {"allow"}


def test_a_tracker_that_fails_does_not_stop_training(tracker: Tracker, tmp_path: Path) -> None:
    tracker.broken = True
    (said,) = write(tmp_path, range(1, 4), wanted(tracker.__name__))
    assert f"{tracker.__name__} could not be written: RuntimeError: no network" in said
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("there", [None, ModuleType("empty")])  # not installed, or only a folder of that name
def test_a_tracker_that_is_not_installed_is_refused(
    name: str, there: ModuleType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, there)
    with pytest.raises(ValueError, match=f"logging.{name} = 'project' needs the package {name}.*pip install {name}"):
        check(wanted(name))
    with pytest.raises(ValueError, match=f"leave logging.{name} empty"):
        Metrics(tmp_path / "run", wanted(name), step=0, settings={})
    assert not (tmp_path / "run").exists()
