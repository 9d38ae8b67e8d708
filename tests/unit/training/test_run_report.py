"""The page of a run: what it says of rows and timelines, of many and of none."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from terapipe import Plan
from terapipe.training.logging.run_report import thin, write_report
from tests.unit.reporting.runs import stages, stepped

GIB = 2**30
PLAN = Plan((1, 1), ((4, 2), (4, 2)), stages(2))


def row(step: int, **more: Any) -> dict[str, Any]:
    numbers = {"loss": 2 + 8 / step, "lr": 3e-4, "grad_norm": 0.9, "seconds": 0.5, "tokens_per_second": 4096.0}
    return {"step": step, **numbers, "tokens": step * 2048, "predicted": 0.4, **more}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(given) + "\n" for given in rows))


def page(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text()


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def text(page: str) -> str:
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def curve(page: str, label: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a chart."""
    found = re.search(rf"<svg [^>]*aria-label='{label}'.*?</svg>", page, re.DOTALL)
    assert found, label
    lines = ET.fromstring(found[0]).iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


def test_a_run_with_everything(tmp_path: Path) -> None:
    folder = tmp_path / "bard"
    rows = [row(step, **({"idle": 0.08, "memory": [GIB, 2 * GIB]} if step % 10 == 0 else {})) for step in range(1, 101)]
    rows += [{"step": 50, "eval_loss": 2.5, "perplexity": 12.2}, {"step": 100, "eval_loss": 2.75, "perplexity": 15.6}]
    rows += [{"step": 100, "sample": "To be\n<or> not"}, {"step": 77, "event": "drift", "message": "25% slower"}]
    write(folder, rows)
    (folder / "predicted.json").write_text(stepped(PLAN).to_json())
    (folder / "timeline.json").write_text(stepped(PLAN, 1.25).to_json())
    (folder / "config.toml").write_text("[model]\npreset = '<gpt>'\n")
    made = page(folder)
    assert headings(made) == [
        "Loss", "Optimizer", "Speed", "Memory of each rank", "Generated text",
        "Timeline", "Predicted against measured", "Idle time by cause", "Slices", "Events", "Settings",
    ]  # fmt: skip
    words = text(made)
    assert "Training run bard 100 steps: the loss went from 10 to 2.11, in evaluation to 2.75." in words
    for fact in ("tokens 204,800", "best evaluation loss 2.5 at step 50", "predicted 400 ms (1.25 x)", "idle 8.0%"):
        assert fact in words
    assert "memory, fullest rank 2 GiB" in words
    assert "77 drift 25% slower" in words
    assert "<pre>To be\n&lt;or&gt; not</pre>" in made
    assert "preset = &#x27;&lt;gpt&gt;&#x27;" in made
    training, evaluation = curve(made, "loss")
    assert (len(training), len(evaluation)) == (100, 2)
    assert evaluation[1][0] == training[-1][0]  # at step 100, both on one scale of steps
    assert evaluation[0][0] == pytest.approx(training[49][0], abs=0.1)
    assert len(curve(made, "step time")) == 2
    assert not re.search(r"(src|href)=|url\((?!#)|https?://(?!www\.w3\.org)", made)
    assert sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]


def test_a_folder_with_nothing_has_no_page(tmp_path: Path) -> None:
    assert write_report(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("x = 1")
    assert "No step has been written down yet." in page(tmp_path)
    write(tmp_path, [row(1)])
    made = page(tmp_path)
    assert headings(made) == ["Loss", "Optimizer", "Speed", "Settings"]
    assert made.count("<circle") == 6  # a point alone is a dot
    write(tmp_path, [{"step": 1, "loss": None, "grad_norm": None, "skipped": True}])
    assert headings(page(tmp_path)) == ["Settings"]


@pytest.mark.parametrize(("file", "name"), [("predicted.json", "predicted"), ("timeline.json", "measured")])
def test_one_timeline_is_enough(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text(stepped(PLAN).to_json())
    made = page(tmp_path)
    assert headings(made) == ["Timeline", "The step", "Idle time by cause", "Slices"]
    assert f'"name":"{name}"' in made


@pytest.mark.parametrize("broken", ["{", "{}", json.dumps({"plan": PLAN.to_dict(), "events": []})])
def test_a_timeline_that_cannot_be_read_is_named(tmp_path: Path, broken: str) -> None:
    write(tmp_path, [row(1), row(2)])
    (tmp_path / "timeline.json").write_text(broken)
    made = page(tmp_path)
    assert "Timeline" not in headings(made)
    assert "timeline.json is not shown: " in made


def test_tens_of_thousands_of_steps_stay_small_and_honest(tmp_path: Path) -> None:
    rows = [row(step, memory=[GIB] * 64 if step % 10 == 0 else None) for step in range(1, 20001)]
    rows[12344] |= {"loss": 9.0, "grad_norm": 70.0}
    rows[0]["seconds"] = 30.0
    write(tmp_path, rows)
    made = page(tmp_path)
    assert len(made) < 500_000
    (training,) = curve(made, "loss")
    assert 400 < len(training) <= 1500
    words = text(made)
    assert "a point is the mean of several neighboring steps" in words
    assert "Off the scale: 1 of 20,000 values, the highest 30 s at step 1." in words
    assert "Off the scale: 1 of 20,000 values, the highest 70 at step 12,345." in words
    (band,) = re.findall(r"aria-label='loss'.*?<polygon points='(.*?)'", made, re.DOTALL)
    x, top = min((tuple(map(float, p.split(","))) for p in band.split() if p), key=lambda p: (p[0] < 100, p[1]))
    assert x == pytest.approx(64 + (946 - 64) * 12345 / 20000, abs=2)  # the one bad step is seen where it was
    assert top < min(y for at, y in training if at > 100)


def test_means_of_steps_keep_their_extremes() -> None:
    points = thin([(step, float(step % 7)) for step in range(1, 101)], 10)
    assert len(points) == 10
    assert points[0] == (10, pytest.approx(2.7), 0.0, 6.0)
    assert points[-1].x == 100
    assert [point.y for point in thin([(1, 2.0), (5, 3.0)], 10)] == [2.0, 3.0]
    assert thin([], 10) == []


def test_what_is_not_a_finite_number_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [row(1), row(2, loss=float("nan"), memory=[None, GIB]), row(3, loss=None, grad_norm=float("inf"))])
    made = page(tmp_path)
    assert [len(line) for line in curve(made, "loss")] == [1]
    assert [len(line) for line in curve(made, "norm of the gradients")] == [2]
    assert "Memory of each rank" not in headings(made)


def test_memory_of_many_ranks_is_told_by_three(tmp_path: Path) -> None:
    write(tmp_path, [row(step, memory=[GIB + rank * GIB // 8 for rank in range(9)]) for step in (1, 2)])
    words = text(page(tmp_path))
    for told in ("rank 8, fullest 2 GiB", "rank 4, middle 1.5 GiB", "rank 0, emptiest 1 GiB"):
        assert told in words
    write(tmp_path, [row(step, memory=[GIB, 2 * GIB]) for step in (1, 2)])
    words = text(page(tmp_path))
    assert "rank 0 1 GiB" in words
    assert "rank 1 2 GiB" in words


def test_of_many_events_and_samples_the_last_ones_are_shown(tmp_path: Path) -> None:
    rows = [{"step": step, "event": "drift", "message": f"<no {step}>"} for step in range(1, 151)]
    rows += [{"step": step, "event": "checkpoint", "message": f"saved {step}"} for step in (100, 200, 300)]
    rows += [{"step": step, "sample": f"text {step}"} for step in range(1, 6)]
    write(tmp_path, rows)
    words = text(page(tmp_path))
    assert "The last 100 of 151 are listed. 2 earlier checkpoints are not listed." in words
    assert "&lt;no 51&gt;" not in words
    assert "&lt;no 150&gt;" in words
    assert "saved 300" in words
    assert "saved 200" not in words
    assert re.findall(r"text (\d)", words) == ["5", "4", "3"]


def test_a_page_can_be_made_while_a_row_is_being_written(tmp_path: Path) -> None:
    write(tmp_path, [row(1), row(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert "2 steps: the loss" in page(tmp_path)
