"""Several hosts on one machine: network namespaces with names, addresses and cores of their own, and a wire between."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.wire import MTU, TUN, Wire

PORT = 29500
_SECONDS = {"ms": 1e-3, "s": 1.0}
_BYTES_PER_SECOND = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "unshare", "hostname", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"this needs {', '.join(missing)}; install iproute2 and util-linux"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"the wire needs {TUN}"
    name = f"terapipe-{uuid.uuid4().hex[:8]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@dataclass
class Host:
    name: str
    address: str
    cores: tuple[int, ...]
    wire: Wire
    namespace: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """The command on this host, on its cores."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        named = ['hostname "$0" && exec taskset -c "$@"', self.name, ",".join(map(str, self.cores))]
        process = subprocess.Popen(
            [*inside, *named, *command],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def cut(self) -> None:
        """From now on packets from and to this host are lost, and nobody is told."""
        self.wire.lost.add(self.address)

    def mend(self) -> None:
        self.wire.lost.discard(self.address)

    def close(self) -> None:
        """Ends what still runs here, and takes the namespace away."""
        if not Path("/run/netns", self.namespace).exists():
            return
        for pid in _ip("netns", "pids", self.namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self.started:
            process.communicate()
        _ip("netns", "del", self.namespace)
        shutil.rmtree(_files(self.namespace))
        with suppress(OSError):  # others have files there
            _files(self.namespace).parent.rmdir()


@contextmanager
def hosts(count: int, rate: str = "100gbit", delay: str = "0ms") -> Iterator[list[Host]]:
    """``rate`` is what each host sends, ``delay`` one way, both as tc writes them. All is gone at the end."""
    wire = Wire(_number(rate, _BYTES_PER_SECOND), _number(delay, _SECONDS))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    with ExitStack() as stack:
        made = []
        for i in range(count):
            mine = tuple(cores[(i * share + j) % len(cores)] for j in range(share))
            made.append(Host(f"node{i}", f"10.77.0.{i + 1}", mine, wire, f"terapipe-{uuid.uuid4().hex[:8]}"))
            stack.callback(made[i].close)
        stack.callback(wire.close)  # first of all, while its devices exist
        for host in made:
            _make(host, made)
        wire.start()
        yield made


def torchrun(hosts: Sequence[Host], *arguments: str, ranks: int = 1, **environment: str) -> list[subprocess.Popen[str]]:
    """Starts torchrun on every host, with so many ranks on each; ``arguments`` as for torchrun: a script, or -m."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", uuid.uuid4().hex]
    shape = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *shape, *meeting, *arguments]
    return [host.start(*command, **environment) for host in hosts]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = 300.0) -> list[str]:
    """What each printed; an error if one did not end well, or not in time."""

    def output(process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.communicate()

    with ThreadPoolExecutor(len(processes)) as pool:  # at the same time, so that none waits for its words to be read
        outputs = list(pool.map(output, processes))
    failed = [
        f"ended with {process.returncode}:\n{out}\n{err}"
        for process, (out, err) in zip(processes, outputs, strict=True)
        if process.returncode
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [out for out, _ in outputs]


def _make(host: Host, everyone: Sequence[Host]) -> None:
    # What lies in this folder covers /etc in the namespace. There every host knows all names, its own too: that is how
    # gloo and torchrun find their addresses.
    files = _files(host.namespace)
    files.mkdir(parents=True)
    names = [f"{other.address} {other.name}\n" for other in everyone]
    (files / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
    (files / "resolv.conf").touch()  # nobody else is asked: nobody would answer
    _ip("netns", "add", host.namespace)
    device = f"tp{host.namespace[-8:]}"
    host.wire.plug(device, host.address)
    _ip("link", "set", device, "netns", host.namespace, "name", "eth0")
    inside = ("-netns", host.namespace)
    _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "mtu", str(MTU), "up")
    _ip(*inside, "link", "set", "lo", "up")


def _files(namespace: str) -> Path:
    return Path("/etc/netns") / namespace


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _number(text: str, units: dict[str, float]) -> float:
    unit = text.lstrip("0123456789.")
    if unit not in units:
        raise ValueError(f"write a number and one of {', '.join(units)}, got {text!r}")
    return float(text.removesuffix(unit)) * units[unit]
