"""From facts to findings: what is fine, what is wrong, and what to do about it.

A check is a function from an ``Examination`` to findings, one line of the report each::

    Examination  --_versions-->  ok       versions         python 3.11.7, torch 2.13.0+cpu, ...
                 --_port----->   problem  port             29500 cannot be used: address already in use
                                                           -> give torchrun another --master-port; ...
    of each host --_cores---->   warning  cores            2 ranks with 4 threads in all, on 2 cores

A problem is what keeps ranks from training or makes them wrong; a warning is what makes them slow or may do so. Every
finding that is not ok has a remedy, because the reader is somebody whose run does not start. Checks begin nothing and
measure nothing. To add one, write the function and put it into ``_CHECKS`` at the end, in the order of the report.

No torch here, and ``examination`` only for type checkers: the first finding may be that torch does not load.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from terapipe.reporting.style import count, digits, memory, seconds

if TYPE_CHECKING:
    from terapipe.doctor.examination import Examination, Facts, Link

    Check = Callable[[Examination], Iterator["Finding"]]
    HostCheck = Callable[[Sequence[Facts]], "Finding"]  # of the ranks of one host

SLOW = 3.0  # factor by which a slow link is slower than the others of its kind
JITTER = 2e-4  # seconds of latency that busy cores alone may add
SHARED_MEMORY, FREE_MEMORY = 64 * 2**20, 2**30  # least bytes: per host, per rank
FILES = 1024  # least limit on open files
CLOCK = 1.0  # most seconds between clocks


class Status(StrEnum):
    """How bad a finding is, from best to worst. Only a problem makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Args:
        check: the name of the check that speaks.
        status: how bad it is.
        message: what the check saw, with values.
        remedy: what the user can do about it; empty if all is well.
        details: further lines, such as one for each link.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""
    details: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as ``--json`` prints it, where the message is called ``found``."""
        return {"found" if name == "message" else name: value for name, value in asdict(self).items()}


def diagnose(examination: "Examination") -> list[Finding]:
    """Runs every check over the facts. It starts nothing and measures nothing, so tests can feed it any cluster.

    Args:
        examination: the facts of all ranks, and what happened when they met.

    Returns:
        The findings, in the order of the report.
    """
    return [finding for check in _CHECKS for finding in check(examination)]


def worst(findings: Sequence[Finding]) -> Status:
    """Returns the worst status of all findings; OK if there are none. It decides the exit code.

    Args:
        findings: In any order.
    """
    return max((f.status for f in findings), key=list(Status).index, default=Status.OK)


# Installation


def satisfies(version: str, wanted: str) -> bool:
    """Tells whether a version is within bounds. It parses them itself, because ``packaging`` does not come with torch.

    Args:
        version: of an installed package, for example "2.13.0+cpu".
        wanted: what the release requires, for example "<3,>=2.9".
    """
    compare: dict[str, Callable[[int], bool]] = {
        "<": lambda x: x < 0, "<=": lambda x: x <= 0, ">": lambda x: x > 0, ">=": lambda x: x >= 0,
        "==": lambda x: x == 0, "!=": lambda x: x != 0,
    }  # fmt: skip
    bounds = re.findall(r"(<=|>=|==|!=|<|>)\s*(\d+(?:\.\d+)*)", wanted)
    return all(compare[sign](_order(version, bound)) for sign, bound in bounds)


def _order(version: str, bound: str) -> int:
    """Compares versions by their leading numbers: 2.9 is equal to 2.9.0 and before 2.13, "2.13.0+cpu" is 2.13.0.

    Args:
        version: Of an installed package.
        bound: Of a requirement.

    Returns:
        -1, 0 or 1 if the version is before, equal to or after the bound.
    """
    mine = re.match(r"\d+(?:\.\d+)*", version)
    pairs = zip_longest(*([int(n) for n in text.split(".")] for text in (mine[0] if mine else "0", bound)), fillvalue=0)
    return next(((a > b) - (a < b) for a, b in pairs if a != b), 0)


def _versions(e: "Examination") -> Iterator[Finding]:
    """Compares python, torch and numpy with what this release requires. One finding for each wrong version, with
    all ranks that have it: an image that is wrong is wrong on many hosts."""
    wrong: dict[tuple[str, str, str], list[Facts]] = {}
    for facts in e.ranks:
        for name, wanted in facts.needs.items():
            version = facts.versions[name]
            if not satisfies(version, wanted):
                wrong.setdefault((name, version, wanted), []).append(facts)
    for (name, version, wanted), ranks in wrong.items():
        message = f"{name} {version} on {_names_of(ranks)}; this release needs {wanted}"
        remedy = "use such a Python" if name == "python" else f"pip install '{name}{wanted}'"
        yield Finding("versions", Status.PROBLEM, message, remedy)
    if not wrong:
        yield Finding("versions", Status.OK, ", ".join(f"{name} {v}" for name, v in e.ranks[0].versions.items()))


def _same_versions(e: "Examination") -> Iterator[Finding]:
    """Compares torch and terapipe of all ranks with each other. The version that most ranks have is called usual."""
    if len(e.ranks) < 2:
        return
    alike = True
    for name in ("torch", "terapipe"):
        by_version: dict[str, list[Facts]] = {}
        for facts in e.ranks:
            by_version.setdefault(facts.versions[name], []).append(facts)
        if len(by_version) > 1:
            alike = False
            usual = max(by_version, key=lambda v: len(by_version[v]))
            others = "; ".join(f"{v} on {_names_of(ranks)}" for v, ranks in by_version.items() if v != usual)
            # Ranks must derive the same schedule from a plan, and messages between versions of torch may differ.
            yield Finding(
                "same versions", Status.PROBLEM, f"{name} is {usual}, but {others}", f"use one {name} on all hosts"
            )
    if alike:
        yield Finding("same versions", Status.OK, f"on all {len(e.ranks)} ranks")


def _backends(e: "Examination") -> Iterator[Finding]:
    """Checks what ranks would communicate with. Hosts with and without GPUs cannot work together: some ranks would
    wait in NCCL, the others in gloo."""
    yield from _each_host(e, _backend)
    with_gpus = [host for host, ranks in e.hosts.items() if ranks[0].gpus]
    if 0 < len(with_gpus) < len(e.hosts):
        without = ", ".join(host for host in e.hosts if host not in with_gpus)
        message = f"{', '.join(with_gpus)} would use NCCL, {without} gloo: no GPU is visible there"
        remedy = "use hosts of one kind, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        yield Finding("backends", Status.PROBLEM, message, remedy)


def _backend(ranks: Sequence["Facts"]) -> Finding:
    """Checks gloo, NCCL and the number of GPUs of one host. gloo is needed also with GPUs, for messages of the host."""
    gpus = ranks[0].gpus
    if not all(facts.gloo for facts in ranks):
        return Finding("backends", Status.PROBLEM, "torch was built without gloo", "install a torch from pytorch.org")
    if not gpus:
        return Finding("backends", Status.OK, "gloo; no GPU, ranks compute on the CPU")
    if not all(facts.nccl for facts in ranks):
        remedy = "install a torch that was built for CUDA, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return Finding("backends", Status.PROBLEM, f"{count(gpus, 'GPU')}, but torch has no NCCL", remedy)
    message = f"gloo and NCCL; {count(gpus, 'GPU')} for {count(len(ranks), 'rank')}"
    if len(ranks) > gpus:
        return Finding(
            "backends", Status.PROBLEM, message, f"every rank needs a GPU of its own: at most {gpus} per host"
        )
    return Finding("backends", Status.OK, message)


def _kernel(ranks: Sequence["Facts"]) -> Finding:
    """Tells which attention kernels passed their self-test. A fallback is a warning: it is exact, but keeps a matrix
    of scores per slice."""
    fallbacks = list(dict.fromkeys(reason for facts in ranks for reason in facts.fallbacks))
    if fallbacks:
        remedy = "training is exact but slower and needs more memory; use a torch that this release was tested with"
        return Finding("attention kernel", Status.WARNING, "plain attention for " + "; ".join(fallbacks), remedy)
    return Finding("attention kernel", Status.OK, f"passed its self-test for {', '.join(ranks[0].kernels)}")


# Communication


def _port(e: "Examination") -> Iterator[Finding]:
    """Tells whether the port that torchrun will use is free. Under torchrun it is in use by this very run."""
    if e.port is None:
        return
    if not e.blocked:
        yield Finding("port", Status.OK, f"{e.port} is free")
        return
    remedy = f"give torchrun another --master-port; `ss -ltnp 'sport = :{e.port}'` shows who has this one"
    yield Finding("port", Status.PROBLEM, f"{e.port} cannot be used: {e.blocked}", remedy)


def _host_names(e: "Examination") -> Iterator[Finding]:
    """Checks what the hosts' names resolve to, because gloo listens on that address. A name that means 127.0.0.1,
    as /etc/hosts of many distributions has it, works on one host and hangs on two."""

    def check(ranks: Sequence["Facts"]) -> Finding:
        addresses = ranks[0].addresses
        remedy = (
            "set GLOO_SOCKET_IFNAME to the interface that the other hosts reach, such as eth0, or correct /etc/hosts"
        )
        in_doubt = e.several_hosts and not e.met  # if all ranks met, the interface is right
        if not addresses:
            status = Status.PROBLEM if in_doubt else Status.WARNING
            return Finding("host name", status, "resolves to no address", remedy)
        if in_doubt and all(a.startswith("127.") or a == "::1" for a in addresses):
            message = (
                f"resolves only to {', '.join(addresses)}: gloo would give other hosts an address they cannot reach"
            )
            return Finding("host name", Status.WARNING, message, remedy)
        return Finding("host name", Status.OK, f"resolves to {', '.join(addresses)}")

    return _each_host(e, check)


_REMEDIES = {
    "start": "see the messages above; exit code -9 mostly means that the system ran out of memory",
    "meet": "check whether rank 0 has started, its port was free, and this host reaches it: address, firewall",
    "work": "open all ports between the hosts, and set the network interface with GLOO_SOCKET_IFNAME, "
    "with GPUs also NCCL_SOCKET_IFNAME",
}


def _rendezvous(e: "Examination") -> Iterator[Finding]:
    """Tells whether all ranks came and could work together, and if not, which ones or why."""
    at = f" at {e.where}" if e.where else ""
    if e.failure:
        yield Finding("rendezvous", Status.PROBLEM, e.failure, _REMEDIES[e.failed_at])
    elif e.absent:
        late = f"{_numbers(e.absent)} of {e.size} did not arrive{at} within {digits(e.timeout)} s"
        remedy = "check whether every host has started its ranks and reaches that address; --timeout waits longer"
        yield Finding("rendezvous", Status.PROBLEM, f"{late}, only {_names_of(e.ranks)}", remedy)
    else:
        message = f"{count(e.size, 'rank')} on {count(len(e.hosts), 'host')} met{at}, and an all-reduce works"
        yield Finding("rendezvous", Status.OK, message)


def _links(e: "Examination") -> Iterator[Finding]:
    """Compares links with others of their kind: inside the host of rank 0, and from it to other hosts."""
    host = {facts.rank: facts.host for facts in e.ranks}
    inside = [link for link in e.links if host[link.rank] == host[0]]
    between = [link for link in e.links if host[link.rank] != host[0]]
    for check, links, remedy in (
        ("links in a host", inside, "check what else uses the cores or the memory of that host"),
        ("links of hosts", between, "check that host's network card, cable and switch, or leave the host out"),
    ):
        if links:
            yield _compare_links(check, links, host, remedy)


def _compare_links(check: str, links: Sequence["Link"], host: Mapping[int, str], remedy: str) -> Finding:
    """Names links that are far slower than the others. All links are in the details, for whoever wants numbers."""
    pairs = [f"rank 0 ({host[0]}) - rank {link.rank} ({host[link.rank]}): {_speed(link)}" for link in links]
    slow = [pair for link, pair in zip(links, pairs, strict=True) if _is_slow(link, links)]
    if slow:
        message = f"over {SLOW:g} times slower than others of its kind: " + "; ".join(slow)
        return Finding(check, Status.WARNING, message, remedy, tuple(pairs))
    latencies, rates = [link.latency for link in links], [link.rate for link in links]
    message = f"latency up to {seconds(max(latencies))}, at least {memory(min(rates))}/s"
    return Finding(check, Status.OK, message, details=tuple(pairs))


def _is_slow(link: "Link", links: Sequence["Link"]) -> bool:
    """Compares a link with the median of the others. Their own median, not a limit in bytes per second, because what is
    slow between hosts with InfiniBand is fast between hosts with Ethernet.

    Args:
        link: That may be slow: over SLOW times less bytes per second, or over SLOW times the latency and JITTER more.
            JITTER is for links inside a host, where 30 instead of 10 microseconds mean nothing.
        links: All of its kind, with it.
    """
    others = [other for other in links if other is not link]
    if not others:
        return False
    latency, rate = median(other.latency for other in others), median(other.rate for other in others)
    return link.rate * SLOW < rate or (link.latency > SLOW * latency and link.latency - latency > JITTER)


def _speed(link: "Link") -> str:
    """Writes a link's latency and rate: "90.9 µs, 862 MiB/s"."""
    return f"{seconds(link.latency)}, {memory(link.rate)}/s"


def _clocks(e: "Examination") -> Iterator[Finding]:
    """Checks that the clocks of hosts agree, from the links' measurement. Ranks note times by their own clock, and a
    timeline of several hosts puts these side by side."""
    ahead = {facts.host: link.clock for link in e.links for facts in e.ranks if facts.rank == link.rank}
    ahead.pop(e.ranks[0].host, None)
    wrong = [f"{host} by {digits(s)} s" for host, s in ahead.items() if abs(s) > CLOCK]
    if wrong:
        message = f"ahead of {e.ranks[0].host}: {', '.join(wrong)}"
        yield Finding(
            "clocks", Status.WARNING, message, "synchronize them with chrony or ntpd: timelines of ranks are compared"
        )
    elif ahead:
        yield Finding("clocks", Status.OK, f"differ by {seconds(max(map(abs, ahead.values())))} at most")


# Resources of each host


def _cores(ranks: Sequence["Facts"]) -> Finding:
    """Looks for ranks that compete for cores: two pinned to the same one, or more threads than cores."""
    alone = [facts for facts in ranks if len(facts.cores) == 1 < facts.all_cores]
    for core in dict.fromkeys(facts.cores for facts in alone):
        on_it = [facts.rank for facts in alone if facts.cores == core]
        if len(on_it) > 1:
            remedy = (
                "give each its own: terapipe.launch.processes.take_cores, taskset; or start fewer ranks on this host"
            )
            return Finding("cores", Status.PROBLEM, f"{_numbers(on_it)} share core {core[0]} and no other", remedy)
    # Ranks may be pinned to sets of cores that overlap. For each set that some rank has, count the threads of all ranks
    # that cannot leave it: these compete for its cores, whatever the ranks outside do.
    for cores in dict.fromkeys(facts.cores for facts in ranks):
        inside = [facts for facts in ranks if set(facts.cores) <= set(cores)]
        threads = sum(facts.threads for facts in inside)
        if threads > len(cores):
            message = f"{count(len(inside), 'rank')} with {threads} threads in all, on {count(len(cores), 'core')}"
            share = len(cores) // len(inside)
            remedy = f"start at most {count(len(cores), 'rank')} on this host"
            if share:
                remedy = f"set OMP_NUM_THREADS={share}, or call terapipe.launch.processes.take_cores on every rank"
            return Finding("cores", Status.WARNING, message, remedy)
    cores_of_all = {core for facts in ranks for core in facts.cores}
    each = " and ".join(str(n) for n in sorted({facts.threads for facts in ranks}))
    message = f"{count(len(cores_of_all), 'core')} for {count(len(ranks), 'rank')}; threads of each: {each}"
    return Finding("cores", Status.OK, message)


def _load(ranks: Sequence["Facts"]) -> Finding:
    """Warns of a busy host: over half of its cores were in use before ranks began."""
    load, cores = max(facts.load for facts in ranks), ranks[0].all_cores
    message = f"{digits(load)} in the last minute, on {count(cores, 'core')}"
    if load > cores / 2:
        remedy = "something else is running; measurements, here or by `terapipe profile`, will be off"
        return Finding("load", Status.WARNING, message, remedy)
    return Finding("load", Status.OK, message)


def _memory(ranks: Sequence["Facts"]) -> Finding:
    """Warns if a rank would have less than a GiB of the host: XX."""
    free = min(facts.memory for facts in ranks)
    message = f"{memory(free)} free for {count(len(ranks), 'rank')}"
    if free < FREE_MEMORY * len(ranks):
        remedy = "free memory, or start fewer ranks on this host"
        return Finding("memory", Status.WARNING, message, remedy)
    return Finding("memory", Status.OK, message)


def _shared_memory(ranks: Sequence["Facts"]) -> Finding:
    """Warns of a small /dev/shm. Containers have 64 MB by default, and NCCL ends with a bus error where it is full."""
    size = ranks[0].shared_memory
    if size is not None and size < SHARED_MEMORY:
        remedy = "make it larger, in a container with --shm-size=1g: NCCL and data loaders use it"
        return Finding("shared memory", Status.WARNING, f"/dev/shm has {memory(size)}", remedy)
    message = "this system has no /dev/shm" if size is None else f"/dev/shm has {memory(size)}"
    return Finding("shared memory", Status.OK, message)


def _files(ranks: Sequence["Facts"]) -> Finding:
    """Warns of a low limit on open files: every connection to another rank takes one."""
    limits = [facts.files for facts in ranks if facts.files is not None]
    if limits and min(limits) < FILES:
        remedy = f"raise it with `ulimit -n {16 * FILES}`: every connection to a rank is an open file"
        return Finding("open files", Status.WARNING, f"at most {min(limits)}", remedy)
    return Finding("open files", Status.OK, f"at most {min(limits)}" if limits else "any number")


def _each_host(e: "Examination", check: "HostCheck") -> Iterator[Finding]:
    """Runs a check on every host, and yields a finding for each host with something wrong and one for all others. A
    thousand hosts that are fine take one line, and the one that is not keeps a line of its own::

        warning  memory   node7: 512 MiB free for 8 ranks
        ok       memory   on 999 hosts

    Args:
        e: The examination.
        check: Of the ranks of one host.
    """
    findings = {host: check(ranks) for host, ranks in e.hosts.items()}
    if len(findings) == 1:
        yield from findings.values()
        return
    for host, finding in findings.items():
        if finding.status is not Status.OK:
            yield replace(finding, message=f"{host}: {finding.message}")
    fine = {host: finding for host, finding in findings.items() if finding.status is Status.OK}
    messages = {finding.message for finding in fine.values()}
    where = f"on {count(len(fine), 'host')}"
    for finding in list(fine.values())[:1]:
        if len(messages) == 1:
            yield replace(finding, message=f"{where}: {finding.message}")
        else:
            yield replace(finding, message=where, details=tuple(f"{host}: {f.message}" for host, f in fine.items()))


def _names_of(ranks: Sequence["Facts"]) -> str:
    """Returns ranks by host, for messages: ``ranks 0 and 1 on a, rank 2 on b``."""
    by_host: dict[str, list[int]] = {}
    for facts in ranks:
        by_host.setdefault(facts.host, []).append(facts.rank)
    return ", ".join(f"{_numbers(numbers)} on {host}" for host, numbers in by_host.items())


def _numbers(ranks: Sequence[int]) -> str:
    """Returns ``rank 3`` or ``ranks 0, 1 and 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _on_hosts(check: "HostCheck") -> "Check":
    """Makes a check of an examination from one that looks at the ranks of a single host."""
    return lambda e: _each_host(e, check)


_CHECKS: tuple["Check", ...] = (
    _versions,
    _same_versions,
    _backends,
    _on_hosts(_kernel),
    _port,
    _host_names,
    _rendezvous,
    _links,
    _clocks,
    *(_on_hosts(check) for check in (_cores, _load, _memory, _shared_memory, _files)),
)
