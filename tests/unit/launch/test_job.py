"""How a plan is started: by hand, by Slurm, by Kubernetes. None of the clusters is there: syntax, and stand-ins."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terapipe.launch.job import Hosts, Launch, hosts_of, instructions, launch_of, why_uneven
from terapipe.launch.job import instructions as told_lines
from terapipe.planning.hardware import HOSTS, Cluster
from terapipe.planning.layout import Layout
from tests.unit.planning.test_profile import made

EIGHT = Hosts(count=4, devices=8, cores=64, gpus=True)
MANY = Launch(hosts=48, processes=8, cores=64, gpus=True)
ONE = Launch(hosts=1, processes=4, cores=4)


def test_on_one_host_torchrun_stands_alone() -> None:
    assert ONE.torchrun_lines() == ["torchrun --standalone --nproc-per-node 4 train.py"]


def test_on_several_hosts_all_type_the_same() -> None:
    assert MANY.torchrun_lines() == [
        "torchrun --nnodes 48 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 "
        "--rdzv-id terapipe train.py"
    ]
    named = Launch(2, 8, 64, script="'my train.py'", endpoint="node1.lan:1234", name="big-1")
    assert named.torchrun_lines()[0].endswith("--rdzv-endpoint node1.lan:1234 --rdzv-id big-1 'my train.py'")


@pytest.mark.parametrize("launch", [ONE, MANY])
def test_torchrun_takes_the_line(launch: Launch) -> None:
    from torch.distributed.run import parse_args

    read = parse_args(shlex.split(launch.torchrun_lines()[0])[1:])
    assert (read.nproc_per_node, read.training_script) == (str(launch.processes), "train.py")
    assert read.standalone == (launch.hosts == 1)
    assert read.nnodes == ("48" if launch.hosts > 1 else "1:1")


@pytest.mark.parametrize(
    ("layout", "hosts", "processes"),
    [
        (Layout(1, 4, 8), 4, 8),  # all devices
        (Layout(2, 1, 8), 2, 8),  # fewer: as many hosts as needed
        (Layout(1, 5, 1), 1, 5),
        (Layout(1, 12, 1), 2, 6),  # 12 do not fill hosts of 8
        (Layout(1, 3, 4), 3, 4),  # 4 tensor-parallel ranks stay together, so 6 will not do
        (Layout(1, 6, 2), 2, 6),
    ],
)
def test_processes_are_spread_evenly(layout: Layout, hosts: int, processes: int) -> None:
    launch = launch_of(layout, EIGHT)
    assert launch is not None
    assert (launch.hosts, launch.processes) == (hosts, processes)
    assert launch.hosts * launch.processes == layout.devices
    assert launch.processes % layout.tp == 0
    assert launch.cores == 8 * processes


def test_what_cannot_be_spread_says_why() -> None:
    layout = Layout(1, 13, 1)
    assert launch_of(layout, EIGHT) is None
    assert "takes 13 hosts with 1 on each, there are 4 with 8 devices; take more hosts" in why_uneven(layout, EIGHT)


def test_what_sources_say_of_hosts() -> None:
    assert hosts_of(Cluster("dgx-a100:3"), 24) == Hosts(3, 8, 64, gpus=True)
    assert hosts_of(Cluster("cpu:2", HOSTS["dgx-a100"], 2), 16) == Hosts(2, 8, 8, gpus=False)
    assert hosts_of(made(), 5) == Hosts(1, 5, 5, gpus=False)
    assert hosts_of(None, 3) == Hosts(1, 3, 3, gpus=False)
    several = replace(made(), ranks=4, hosts=("a", "a", "b", "b"))
    assert hosts_of(several, 6) == Hosts(3, 2, 2, gpus=False)


@pytest.mark.parametrize("endpoint", ["node1", "node1:", ":29500", "node1:0", "node1:99999", "a b:1", "a:1; rm"])
def test_an_endpoint_is_host_and_port(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"an endpoint is HOST:PORT .* try HOST0:29500"):
        Launch(2, 8, 64, endpoint=endpoint)


@pytest.mark.parametrize("name", ["", "Big", "1st", "a_b", "-a", "a-", "a.b", "x" * 62])
def test_a_name_is_a_dns_label(name: str) -> None:
    with pytest.raises(ValueError, match="a name has at most 61 lower-case letters"):
        Launch(2, 8, 64, name=name)


def test_people_are_told_where_and_how() -> None:
    lines = instructions(MANY, Layout(1, 48, 8), Path("plan.json"))
    assert lines[0] == "To start it, on each of the 48 hosts:"
    assert lines[1].startswith("  torchrun --nnodes 48")
    assert lines[2] == "HOST0 is a placeholder for one of the hosts; --endpoint names it."
    assert "train.py loads plan.json with Plan.from_json" in lines[3]
    assert "terapipe.device_mesh(Layout(dp=1, pp=48, tp=8))" in lines[3]
    assert instructions(ONE, Layout(1, 4, 1)) == ["To start it:", "  torchrun --standalone --nproc-per-node 4 train.py"]
    assert "HOST0" not in "".join(instructions(Launch(2, 8, 64, endpoint="node1:29500"), Layout(1, 16, 1)))


def test_terapipe_train_is_started_as_a_module(tmp_path: Path) -> None:
    """By torchrun itself, by the batch script and by the pods: the same words."""
    from torch.distributed.run import parse_args

    script = "-m terapipe train run.toml 'plan.file=my plan.json'"
    words = ["-m", "terapipe", "train", "run.toml", "plan.file=my plan.json"]
    stand_in(tmp_path, "torchrun", 'printf "%s\\n" "$@"')
    stand_in(tmp_path, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    stand_in(tmp_path, "scontrol", "echo node7")
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "64"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "0", **slurm}
    for launch in (replace(ONE, script=script), replace(MANY, script=script)):
        read = parse_args(shlex.split(launch.torchrun_lines()[0])[1:])
        assert (read.module, read.training_script, read.training_script_args) == (True, "terapipe", words[2:])
        commands = [["bash", "-c", launch.slurm_script()], container(parsed(launch)[1])["command"]]
        for command in commands:
            ran = subprocess.run(command, env=environment, text=True, capture_output=True)
            assert ran.stdout.splitlines()[-5:] == words, ran.stderr
    assert instructions(launch, Layout(1, 48, 8), Path("plan.json"))[-1] == (
        'The run\'s file sets plan.file = "plan.json", which also sets the layout.'
    )


# Slurm


@pytest.mark.parametrize("launch", [ONE, MANY, Launch(2, 8, 64, script='"it\'s $HOME.py"')])
def test_bash_reads_the_batch_script(launch: Launch) -> None:
    assert subprocess.run(["bash", "-n"], input=launch.slurm_script(), text=True, capture_output=True).stderr == ""


def test_the_batch_script_asks_for_what_the_layout_takes() -> None:
    script = MANY.slurm_script()
    head, body = script.split("set -euo pipefail")
    for line in ("nodes=48", "ntasks-per-node=1", "cpus-per-task=64", "gpus-per-node=8", "signal=TERM@120"):
        assert f"#SBATCH --{line}\n" in head
    assert script.startswith("#!/bin/bash\n")
    assert all(line.startswith("#") for line in head.strip().splitlines())  # sbatch stops reading at a command
    assert "#SBATCH" not in body
    assert "gpu" not in ONE.slurm_script()


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run_batch(launch: Launch, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The batch script for real, with stand-ins for Slurm's commands and for torchrun."""
    stand_in(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    stand_in(folder, "torchrun", 'echo "$@"')
    slurm = {"SLURM_JOB_NODELIST": "node[7-9]", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "64"}
    return subprocess.run(
        ["bash"],
        input=launch.slurm_script(),
        text=True,
        capture_output=True,
        env={"PATH": f"{folder}:/usr/bin:/bin", **slurm},
    )


def test_nodes_meet_at_the_first(tmp_path: Path) -> None:
    stand_in(tmp_path, "scontrol", '[[ $* == "show hostnames node[7-9]" ]] && printf "node7\\nnode8\\nnode9\\n"')
    done = run_batch(MANY, tmp_path)
    assert done.stdout == (
        "--nnodes 48 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node7:29500 --rdzv-id 42 train.py\n"
    )
    assert run_batch(ONE, tmp_path).stdout == "--standalone --nproc-per-node 4 train.py\n"


def test_a_long_list_of_nodes_does_not_break_the_pipe(tmp_path: Path) -> None:
    stand_in(tmp_path, "scontrol", "printf 'node%06d\\n' {1..20000}")
    done = run_batch(MANY, tmp_path)
    assert done.returncode == 0
    assert "--rdzv-endpoint node000001:29500" in done.stdout


def test_without_names_of_nodes_nothing_starts(tmp_path: Path) -> None:
    stand_in(tmp_path, "scontrol", "exit 1")
    done = run_batch(MANY, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")


# Kubernetes


def parsed(launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(launch.kubernetes_job())
    return service, job


@pytest.mark.parametrize("word", ["a\nb", "a\n  b\n\nc: [", "\n", "tab\there", "next\x85line", "#x\n- y\n"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_word_of_the_script_may_have_line_breaks(word: str, hosts: int, tmp_path: Path) -> None:
    """It ended the block of the YAML, which kubectl refused."""
    launch = Launch(hosts, 2, 2, script=shlex.join(["train.py", word]))
    *_, command = container(parsed(launch)[1])["command"]
    assert shlex.split(command)[-2:] == ["train.py", word]
    bash = subprocess.run(["bash", "-n"], input=launch.slurm_script(), text=True, capture_output=True)
    assert bash.stderr == ""


def test_pods_find_each_other_by_name() -> None:
    service, job = parsed(Launch(3, 8, 64, gpus=True, name="big"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "big"
    assert "--rdzv-endpoint big-0.big:29500 " in container(job)["command"][-1]


def test_one_pod_to_a_host() -> None:
    _, job = parsed(MANY)
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 48
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_pods_have_devices_and_shared_memory() -> None:
    _, job = parsed(Launch(2, 8, 64, gpus=True, image='registry:5000/a"b:1'))
    pod = job["spec"]["template"]["spec"]
    assert container(job)["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container(job)["image"] == 'registry:5000/a"b:1'
    assert container(job)["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    _, on_cpus = parsed(ONE)
    assert container(on_cpus)["resources"] == {"requests": {"cpu": 4}}
    assert "gpu" not in ONE.kubernetes_job()


@pytest.mark.parametrize(("index", "host"), [("0", "true"), ("1", "false")])
def test_only_the_first_pod_hosts_the_store(index: str, host: str, tmp_path: Path) -> None:
    stand_in(tmp_path, "torchrun", 'echo "$@"')
    surroundings = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": index}
    command = container(parsed(Launch(2, 8, 64))[1])["command"]
    ran = subprocess.run(command, env=surroundings, text=True, capture_output=True).stdout
    assert f"--rdzv-conf is_host={host},join_timeout=900,read_timeout=900 train.py" in ran


def test_without_a_parser_the_job_is_still_plain() -> None:
    """Two documents, indented by pairs of blanks; holds where no YAML parser is installed."""
    for launch in (ONE, MANY):
        text = launch.kubernetes_job()
        assert text.count("\n---\n") == 1
        assert "\t" not in text
        assert all((len(line) - len(line.lstrip())) % 2 == 0 for line in text.splitlines())
        assert f"  completions: {launch.hosts}\n" in text


def test_torchrun_can_start_terapipes_own_trainer() -> None:
    """--script "-m terapipe train run.toml" became the name of a file."""
    launch = Launch(1, 2, 2, script="-m terapipe train 'my run.toml'")
    assert launch.torchrun_lines()[0].endswith("--nproc-per-node 2 -m terapipe train 'my run.toml'")
    assert "plan.file" in told_lines(launch, Layout(pp=2), Path("plan.json"))[-1]
    with pytest.raises(ValueError, match="quoted as in a shell"):
        Launch(1, 2, 2, script="'open")
