"""The job that starts a plan: a torchrun line for every host, a Slurm script, a Kubernetes job.

::

    Cluster, Profile --hosts_of--> Hosts --launch_of(layout)--> Launch --> torchrun_lines, slurm_script, kubernetes_job

All three run the same torchrun command on every host. torchrun needs to know how many hosts and processes there are and
where they meet; the scheduler knows the latter, so its variables stand in the command. Nothing is started here, and
torch is not loaded.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import join, split
from typing import Any

from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.profile import Profile

HOST0 = "HOST0:29500"  # a placeholder until --endpoint names one of the hosts
CORES = 8  # per GPU: the least of the known hosts (p3.16xlarge: 64 for 8 GPUs)
LABEL = 63  # most characters of a DNS label
JOIN_TIMEOUT = 900  # seconds that pods wait for each other: one may still pull its image


@dataclass(frozen=True)
class Hosts:
    """Hosts that are all alike.

    Args:
        count: how many.
        devices: of each host.
        cores: of each host.
        gpus: whether the devices are GPUs.
    """

    count: int
    devices: int
    cores: int
    gpus: bool


def hosts_of(source: Cluster | Profile | None, devices: int) -> Hosts:
    """Tells which hosts a cluster or a profile describes.

    A profile of several hosts says how many ranks each has. A profile of one host, or no profile (a cost table), is
    assumed to describe a host with room for all devices.

    Args:
        source: what the plan was made for; None for a cost table, which names no machine.
        devices: of the plan.
    """
    if isinstance(source, Cluster):
        gpus = not source.name.startswith("cpu:")
        return Hosts(source.hosts, source.host.devices, source.host.devices * (CORES if gpus else 1), gpus)
    machine: Mapping[str, Any] = {} if source is None else source.machine
    if source is not None and len(set(source.hosts)) > 1:
        each = source.ranks_per_host
        return Hosts(
            -(-devices // each), each, int(machine.get("cores") or each), machine.get("device", "cpu") != "cpu"
        )
    return Hosts(1, devices, int(machine.get("cores") or devices), machine.get("device", "cpu") != "cpu")


@dataclass(frozen=True)
class Launch:
    """A job that starts a plan. Every host runs the same torchrun command, so that one script serves all of them.

    Args:
        hosts: how many.
        processes: on each host.
        cores: on each host.
        gpus: whether each process has one.
        script: what torchrun starts, with its arguments, quoted as in a shell.
        endpoint: HOST:PORT where the hosts meet.
        name: of the job; Kubernetes makes host names of it.
        image: the container that Kubernetes runs.
    """

    hosts: int
    processes: int
    cores: int
    gpus: bool = False
    script: str = "train.py"
    endpoint: str = HOST0
    name: str = "terapipe"
    image: str = "YOUR_IMAGE"

    def __post_init__(self) -> None:
        """Refuses what a shell, DNS or YAML would read differently: these texts are pasted into scripts, and a mistake
        would show only when the job is started."""
        match = re.fullmatch(r"[\w.:-]+:([0-9]{1,5})", self.endpoint)
        if match is None or not 1 <= int(match[1]) <= 65535:
            raise ValueError(
                f"an endpoint is HOST:PORT with a port between 1 and 65535, got {self.endpoint!r}; try {HOST0}"
            )
        room = LABEL - len(f"-{self.hosts - 1}")  # Kubernetes adds the number of the host
        if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) is None or len(self.name) > room:
            raise ValueError(
                f"a name has at most {room} lower-case letters, digits and inner dashes and begins with a letter, "
                f"got {self.name!r}; try 'terapipe'"
            )
        if not self._words()[0]:
            raise ValueError("a script is what torchrun starts, for example train.py or '-m terapipe train run.toml'")

    def _words(self) -> list[str]:
        """Splits the script as a shell would. There is always one word, which may be empty."""
        try:
            return split(self.script) or [""]
        except ValueError as error:
            raise ValueError(f"a script is quoted as in a shell, got {self.script!r}: {error}") from None

    @property
    def port(self) -> str:
        """The port of the endpoint."""
        return self.endpoint.rpartition(":")[2]

    def torchrun_lines(self) -> list[str]:
        """Returns the commands to type, one for each kind of host."""
        return [self._torchrun(self.endpoint, self.name)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the job as ``terapipe plan --json`` prints it."""
        return {"torchrun": self.torchrun_lines(), "hosts": self.hosts, "processes_per_host": self.processes}

    def _torchrun(self, endpoint: str, job: str, more: str = "") -> str:
        """Returns the torchrun command. Endpoint and job are words of a shell, such as variables of a scheduler."""
        if self.hosts == 1:
            return f"torchrun --standalone --nproc-per-node {self.processes} {join(self._words())}"
        meet = f"--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {job}{more}"
        return f"torchrun --nnodes {self.hosts} --nproc-per-node {self.processes} {meet} {join(self._words())}"

    def slurm_script(self) -> str:
        """Returns a batch script for sbatch. It has one task per node, in which torchrun starts the processes: with a
        task per process, Slurm and torchrun would both number them."""
        gpus = f"#SBATCH --gpus-per-node={self.processes}\n" if self.gpus else ""
        # Not `scontrol | head`: under pipefail, a head that closes the pipe early would end the script.
        first = 'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")\nfirst=$(head -n1 <<< "$nodes")\n\n'
        return f"""\
#!/bin/bash
# Written by `terapipe plan`. Add what your site asks for, such as --partition, --account or --mem.
#SBATCH --job-name={self.name}
#SBATCH --nodes={self.hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={self.cores}
{gpus}#SBATCH --time=24:00:00
# SIGTERM two minutes before the time is up: torchrun passes it on, and kills what has not ended 30 seconds later.
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.out

set -euo pipefail

{first if self.hosts > 1 else ""}# srun does not take over --cpus-per-task by itself.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    {self._torchrun(f'"$first:{self.port}"', '"$SLURM_JOB_ID"')}
"""

    def kubernetes_job(self) -> str:
        """Returns a manifest for kubectl: a Service that gives pods names, and a Job with one pod per host.

        The pods are indexed, so pod 0 has a name that all others know in advance; its torchrun hosts the store.
        """
        commands = _scalar("\n".join(self._in_pod()) + "\n", 14)
        kind, resource = ("limits", "nvidia.com/gpu") if self.gpus else ("requests", "cpu")
        return f"""\
# Written by `terapipe plan`.
apiVersion: v1
kind: Service
metadata:
  name: {self.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {self.name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {self.name}
spec:
  completionMode: Indexed
  completions: {self.hosts}
  parallelism: {self.hosts}
  # Without one of its ranks a pipeline cannot go on, so the first failure ends the job.
  backoffLimit: 0
  template:
    spec:
      subdomain: {self.name}
      restartPolicy: Never
      # torchrun passes SIGTERM on, and kills what has not ended 30 seconds later.
      terminationGracePeriodSeconds: 60
      containers:
        - name: train
          image: {json.dumps(self.image)}
          command:
            - sh
            - -c
            - {commands}
          resources:
            {kind}:
              {resource}: {self.processes if self.gpus else self.cores}
          volumeMounts:
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shm
          emptyDir:
            medium: Memory
"""

    def _in_pod(self) -> list[str]:
        """Returns the commands of a pod. ``is_host`` tells which pod hosts the store: DNS may not know that yet."""
        waits = f"join_timeout={JOIN_TIMEOUT},read_timeout={JOIN_TIMEOUT}"
        more = f' --rdzv-conf "is_host=$host,{waits}"'
        pick = 'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then host=true; else host=false; fi'
        command = "exec " + self._torchrun(f"{self.name}-0.{self.name}:{self.port}", self.name, more)
        return [pick, command] if self.hosts > 1 else [command]


def _scalar(text: str, indent: int) -> str:
    """Writes a text in YAML: line by line, because people read it; between quotes if that would change a character. A
    word of the script may have line breaks, and those belong to the block, too.

    Args:
        text: With a line break at the end.
        indent: Of the lines below the key, in spaces.
    """
    lines = text.removesuffix("\n").split("\n")
    if all(line.isprintable() for line in lines):
        return "\n".join(["|", *(" " * indent + line if line else "" for line in lines)])
    safe = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(safe)}"'


def launch_of(layout: Layout, hosts: Hosts, **named: str) -> Launch | None:
    """Chooses a job for a layout, on as few hosts as divide its devices evenly.

    Args:
        layout: of the plan.
        hosts: that there are.
        **named: ``script``, ``endpoint``, ``name`` and ``image`` of the ``Launch``.

    Returns:
        The job; None if there are not enough hosts (``why_uneven`` says why).
    """
    processes = _processes(layout, hosts)
    needed = layout.devices // processes
    if needed > hosts.count:
        return None
    return Launch(needed, processes, hosts.cores * processes // hosts.devices, hosts.gpus, **named)


def why_uneven(layout: Layout, hosts: Hosts) -> str:
    """Says why `launch_of` returns None for the same arguments.

    Args:
        layout: of the plan.
        hosts: that there are.
    """
    processes = _processes(layout, hosts)
    return (
        f"every host starts the same number of processes, a multiple of tp: {layout} takes "
        f"{layout.devices // processes} hosts with {processes} on each, there are {hosts.count} with "
        f"{hosts.devices} devices; take more hosts, or a layout with another number of devices"
    )


def _processes(layout: Layout, hosts: Hosts) -> int:
    """Returns how many processes each host starts: the largest number that divides the layout's devices and keeps
    tensor-parallel ranks, which talk most, on one host."""
    assert layout.tp <= hosts.devices
    return max(n for n in range(layout.tp, hosts.devices + 1, layout.tp) if layout.devices % n == 0)


def instructions(launch: Launch, layout: Layout, saved: Path | None = None) -> list[str]:
    """Tells people how to start a plan, line by line.

    Args:
        launch: the job.
        layout: of the plan.
        saved: the plan's file, if it was written.
    """
    several = launch.hosts > 1
    out = [f"To start it, on each of the {launch.hosts} hosts:" if several else "To start it:"]
    out += [f"  {line}" for line in launch.torchrun_lines()]
    if several and launch.endpoint == HOST0:
        out.append("HOST0 is a placeholder for one of the hosts; --endpoint names it.")
    if saved and " train " in f" {launch.script} ":
        out.append(f"The run's file sets plan.file = {json.dumps(str(saved))}, which also sets the layout.")
    elif saved:
        mesh = f"terapipe.device_mesh(Layout(dp={layout.dp}, pp={layout.pp}, tp={layout.tp}))"
        shard = " Build the Pipeline with shard=True." if layout.shard else ""
        out.append(f"{launch.script} loads {saved} with Plan.from_json, and makes the mesh with {mesh}.{shard}")
    return out
