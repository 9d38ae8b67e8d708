"""``terapipe plan`` tells how to start what it chose."""

import json
from pathlib import Path

import pytest

from terapipe.cli import main
from tests.unit.cli.test_commands import FOUR, SMALL, printed
from tests.unit.cli.test_simulate import EIGHT, SHAPE, answer, refused
from tests.unit.planning.test_profile import made

TWO_HOSTS = [*SMALL[:3], "p3.16xlarge:2", *SMALL[4:], "--order", "gpipe"]
SIXTEEN = ["--dp", "1", "--pp", "8", "--tp", "2"]


def test_on_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *FOUR, "--order", "gpipe", "--script", "my.py"]) == 0
    assert "To start it:\n  torchrun --standalone --nproc-per-node 8 my.py\n" in capsys.readouterr().out


def test_on_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    assert main(["plan", *TWO_HOSTS, *SIXTEEN, "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "on each of the 2 hosts:\n  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d" in shown
    assert "HOST0 is a placeholder for one of the hosts" in shown
    assert f"-m terapipe train run.toml plan.file={saved} data.batch_size=" in shown
    assert main(["plan", *TWO_HOSTS, *SIXTEEN, "--save", str(saved), "--script", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert f"train.py loads {saved} with Plan.from_json" in shown
    assert "device_mesh(Layout(dp=1, pp=8, tp=2))" in shown
    assert (
        main(["plan", *TWO_HOSTS, *SIXTEEN, "--endpoint", "node1:1234", "--name", "big", "--script", "train.py"]) == 0
    )
    shown = capsys.readouterr().out
    assert "--rdzv-endpoint node1:1234 --rdzv-id big train.py" in shown
    assert "HOST0" not in shown


def test_the_longest_sequences_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt-tiny", "--cluster", "v100:1", "--memory", "64MiB", "--longest"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first.startswith("Longest sequences that fit: ")
    tokens = int(first.split()[4].replace(",", ""))
    assert tokens % 1024 == 0
    assert f"data.seq_len={tokens}" in rest


def test_json_has_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "plan", *TWO_HOSTS, "--dp", "1", "--pp", "6", "--tp", "2")["launch"]
    assert (found["hosts"], found["processes_per_host"]) == (2, 6)
    assert found["torchrun"] == [
        "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 "
        "--rdzv-id terapipe -m terapipe train run.toml plan.file=plan.json data.batch_size=1 data.seq_len=2048"
    ]
    profile = tmp_path / "profile.json"
    profile.write_text(made().to_json())
    found = printed(capsys, "plan", "--profile", str(profile), "--batch-size", "1", "--seq-len", "2048")["launch"]
    assert found["torchrun"] == [
        "torchrun --standalone --nproc-per-node 2 -m terapipe train run.toml plan.file=plan.json "
        "data.batch_size=1 data.seq_len=2048"
    ]


def test_a_cost_table_is_taken_to_be_of_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps([{"size": 1, "length": 64, "context": 0, "seconds": 1.0}]))
    common = ["plan", "--cost-table", str(table), "--batch-size", "1", "--seq-len", "64", "--pp", "3"]
    assert printed(capsys, *common)["launch"]["processes_per_host"] == 3


def test_jobs_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm, kubernetes = tmp_path / "new" / "job.sh", tmp_path / "job.yaml"
    files = ["--slurm", str(slurm), "--kubernetes", str(kubernetes)]
    assert main(["plan", *TWO_HOSTS, *SIXTEEN, *files, "--image", "mine:1", "--name", "big"]) == 0
    shown = capsys.readouterr().out
    assert f"sbatch {slurm}" in shown
    assert f"kubectl apply -f {kubernetes}" in shown
    assert "#SBATCH --gpus-per-node=8" in slurm.read_text()
    assert 'image: "mine:1"' in kubernetes.read_text()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["job.sh", "job.yaml"]  # nothing left beside


def test_on_cpus_no_job_asks_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm, kubernetes = tmp_path / "job.sh", tmp_path / "job.yaml"
    one = ["--dp", "1", "--pp", "1", "--tp", "1", "--order", "gpipe"]
    small = ["--model", "gpt-tiny", "--cluster", "cpu", "--batch-size", "1", "--seq-len", "64"]
    assert main(["plan", *small, *one, "--slurm", str(slurm), "--kubernetes", str(kubernetes)]) == 0
    assert "gpu" not in slurm.read_text() + kubernetes.read_text()


def test_a_plan_that_cannot_be_spread_is_shown_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uneven = ["plan", *TWO_HOSTS, "--batch-size", "3", "--dp", "3", "--pp", "5", "--tp", "1"]
    assert main(uneven) == 0
    assert "No launch: every host starts the same number of processes" in capsys.readouterr().out
    assert printed(capsys, *uneven)["launch"] is None
    assert main([*uneven, "--slurm", str(tmp_path / "job.sh")]) == 2
    assert "takes 3 hosts with 5 on each, there are 2" in capsys.readouterr().err
    assert not (tmp_path / "job.sh").exists()


@pytest.mark.parametrize(
    ("option", "said"), [("--endpoint", "an endpoint is HOST:PORT"), ("--name", "a name has at most")]
)
def test_bad_names_are_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *FOUR, "--order", "gpipe", option, "Not this"]) == 2
    assert said in capsys.readouterr().err


def test_a_cost_table_refuses_what_it_would_ignore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--num-slices, --chunks, --memory had no effect, and a default tile refused sequences below 8 tokens."""
    table = tmp_path / "table.json"
    rows = [(n, c, 1.0 + 0.1 * n * n + 0.2 * c) for c in range(4) for n in range(1, 5 - c)]
    table.write_text(json.dumps([{"size": 1, "length": n, "context": c, "seconds": s} for n, c, s in rows]))
    common = ["plan", "--cost-table", str(table), "--batch-size", "2", "--seq-len", "4", "--pp", "2"]
    assert answer(capsys, *common)["step_time"] > 0
    assert answer(capsys, *common, "--num-slices", "4")["lengths"] == [[1, 1, 1, 1]] * 2
    assert answer(capsys, *common, "--slice-lengths", "1,2,1")["lengths"] == [[1, 2, 1]] * 2
    for option in ("--chunks=1", "--recompute=full", "--distinct=1", "--memory=1GiB", "--shard", "--tile=1",
                   "--sensitivity", "--layers-only", "--model=gpt-tiny"):  # fmt: skip
        assert "would have no effect" in refused(capsys, *common, option)


def test_options_of_plan_count_or_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json left --sensitivity out; --num-slices 2048 was 2,048 slices, --num-slices 1024,1024 two lengths."""
    plan = ["plan", *SHAPE, *EIGHT, "--order", "gpipe", "--microbatch-size", "1", "--recompute", "none"]
    assert len(answer(capsys, *plan, "--sensitivity")["sensitivity"]) == 30
    profile = tmp_path / "profile.json"
    profile.write_text(made().to_json())
    measured = ["plan", "--profile", str(profile), "--batch-size", "1", "--seq-len", "2048"]
    assert "would have no effect" in refused(capsys, *measured, "--sensitivity")
    assert "would have no effect" in refused(capsys, *measured, "--layers-only")
    sliced = ["plan", *SHAPE, *EIGHT, "--order", "terapipe"]
    assert "--slice-lengths" in refused(capsys, *sliced, "--num-slices", "1024,1024")
    assert "would have no effect" in refused(capsys, *sliced, "--num-slices", "2", "--slice-lengths", "1024,1024")
    assert "sum to 2048" not in refused(capsys, *sliced, "--slice-lengths", "2048,1")
    assert answer(capsys, *sliced, "--slice-lengths", "2048")["lengths"][0] == [2048]
