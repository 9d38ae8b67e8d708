"""Every check of the doctor both ways, on made-up facts."""

from dataclasses import replace
from typing import Any

import pytest

from terapipe.doctor.diagnosis import Finding, Status, diagnose, satisfies, worst
from terapipe.doctor.examination import Examination, Facts, Link

ONE = Facts(
    rank=0,
    host="a",
    addresses=("10.0.0.1",),
    local_ranks=2,
    versions={"python": "3.12.1", "torch": "2.9.0+cpu", "numpy": "2.1.0", "terapipe": "0.1.0"},
    needs={"python": ">=3.11", "torch": "<3,>=2.9", "numpy": ">=1.26"},
    gloo=True,
    nccl=False,
    gpus=0,
    kernels=("float32", "bfloat16"),
    fallbacks=(),
    cores=(0, 1),
    all_cores=4,
    threads=2,
    load=0.3,
    memory=8 * 2**30,
    shared_memory=2**30,
    files=4096,
)
GPUS: dict[str, Any] = {"gpus": 2, "nccl": True}


def two(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **whole: Any) -> Examination:
    """Two ranks of one host that have nothing wrong, but for what is given."""
    ranks = (replace(ONE, **(first or {})), replace(ONE, **{"rank": 1, "cores": (2, 3), **(second or {})}))
    return Examination(**{"size": 2, "ranks": ranks, "links": (Link(1, 5e-5, 1e9, 0.0),), **whole})


def apart(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **whole: Any) -> Examination:
    """Likewise, on two hosts."""
    other = {"host": "b", "addresses": ("10.0.0.2",), "local_ranks": 1, **(second or {})}
    return two({"local_ranks": 1, **(first or {})}, other, **whole)


def both(**changes: Any) -> Examination:
    return two(changes, changes)


def found(examination: Examination, check: str) -> list[Finding]:
    return [finding for finding in diagnose(examination) if finding.check == check]


@pytest.mark.parametrize("examination", [two(), apart(), both(**GPUS), Examination(1, (replace(ONE, local_ranks=1),))])
def test_nothing_wrong_is_all_ok(examination: Examination) -> None:
    findings = diagnose(examination)
    assert {f.status for f in findings} == {Status.OK}
    assert not any(f.remedy for f in findings)
    assert worst(findings) is Status.OK


OLD = {"versions": {**ONE.versions, "torch": "2.8.1"}}
NEW_TERAPIPE = {"versions": {**ONE.versions, "terapipe": "0.2.0"}}
LOOPBACK = {"addresses": ("127.0.1.1", "::1")}
LATE = "rank 1 of 2 did not arrive at a:29500 within 30 s, only rank 0 on a"


@pytest.mark.parametrize(
    ("examination", "check", "status", "said", "remedy"),
    [
        (both(**OLD), "versions", Status.PROBLEM, "torch 2.8.1 on ranks 0 and 1 on a", "pip install 'torch<3,>=2.9'"),
        (both(needs={"python": ">=3.13"}), "versions", Status.PROBLEM, "python 3.12.1", "use such a Python"),
        (apart({}, NEW_TERAPIPE), "same versions", Status.PROBLEM, "but 0.2.0 on rank 1 on b", "use one terapipe"),
        (both(gloo=False), "backends", Status.PROBLEM, "without gloo", "install a torch"),
        (both(gpus=2), "backends", Status.PROBLEM, "2 GPUs, but torch has no NCCL", "built for CUDA"),
        (both(gpus=1, nccl=True), "backends", Status.PROBLEM, "1 GPU for 2 ranks", "at most 1 per host"),
        (apart(GPUS), "backends", Status.PROBLEM, "a would use NCCL, b gloo", "hosts of one kind"),
        (two({"fallbacks": ("bfloat16: changed",)}), "attention kernel", Status.WARNING, "bfloat16: changed", "exact"),
        (two(port=29500, blocked="in use"), "port", Status.PROBLEM, "29500 cannot be used: in use", "--master-port"),
        (both(addresses=()), "host name", Status.WARNING, "resolves to no address", "/etc/hosts"),
        (apart({"addresses": ()}, failure="x"), "host name", Status.PROBLEM, "a: resolves to no address", "/etc/hosts"),
        (apart({}, LOOPBACK, failure="x"), "host name", Status.WARNING, "b: resolves only to 127.0.1.1, ::1", "IFNAME"),
        (two(ranks=(ONE,), links=(), where="a:29500"), "rendezvous", Status.PROBLEM, LATE, "--timeout"),
        (two(failure="no route"), "rendezvous", Status.PROBLEM, "no route", "GLOO_SOCKET_IFNAME"),
        (two(failure="no", failed_at="meet"), "rendezvous", Status.PROBLEM, "no", "whether rank 0 has started"),
        (two(failure="no", failed_at="start"), "rendezvous", Status.PROBLEM, "no", "out of memory"),
        (two({"cores": (2,)}, {"cores": (2,)}), "cores", Status.PROBLEM, "ranks 0 and 1 share core 2", "take_cores"),
        (both(cores=(0, 1)), "cores", Status.WARNING, "4 threads in all, on 2 cores", "OMP_NUM_THREADS=1,"),
        (both(cores=(0,), all_cores=1, threads=1), "cores", Status.WARNING, "2 threads in all, on 1 core", "at most 1"),
        (both(load=2.1), "load", Status.WARNING, "2.1 in the last minute, on 4 cores", "will be off"),
        (both(memory=2**30), "memory", Status.WARNING, "1 GiB free for 2 ranks", "fewer ranks"),
        (both(shared_memory=2**25), "shared memory", Status.WARNING, "/dev/shm has 32 MiB", "--shm-size"),
        (both(files=256), "open files", Status.WARNING, "at most 256", "ulimit -n"),
        (apart(links=(Link(1, 5e-5, 1e9, -7.5),)), "clocks", Status.WARNING, "ahead of a: b by -7.5 s", "chrony"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    examination: Examination, check: str, status: Status, said: str, remedy: str
) -> None:
    (finding,) = [f for f in found(examination, check) if f.status is not Status.OK]
    assert finding.status is status
    assert said in finding.message
    assert remedy in finding.remedy
    assert worst(diagnose(examination)) is not Status.OK


@pytest.mark.parametrize(
    ("examination", "check", "said"),
    [
        (two(port=29500), "port", "29500 is free"),
        (both(**LOOPBACK), "host name", "resolves to 127.0.1.1, ::1"),  # one host alone needs no other address
        (apart({}, LOOPBACK), "host name", "on 2 hosts"),  # they met: the interface was named
        (both(gpus=8, nccl=True), "backends", "8 GPUs for 2 ranks"),
        (both(cores=(0, 1), threads=1), "cores", "2 cores for 2 ranks; threads of each: 1"),
        (apart({"cores": (2,), "threads": 1}, {"cores": (2,), "threads": 1}), "cores", "on 2 hosts"),
        (both(shared_memory=None), "shared memory", "no /dev/shm"),
        (both(files=None), "open files", "any number"),
        (both(needs={}), "versions", "torch 2.9.0+cpu"),  # not installed: nothing is asked for
    ],
)
def test_what_only_looks_wrong_is_ok(examination: Examination, check: str, said: str) -> None:
    (finding,) = found(examination, check)
    assert finding.status is Status.OK
    assert said in finding.message


def far(*links: tuple[float, float]) -> Examination:
    """The first two ranks on one host, the others each on its own; with latencies and rates."""
    ranks = [replace(ONE, local_ranks=1), replace(ONE, rank=1, local_ranks=1, cores=(2, 3))]
    ranks += [replace(ONE, rank=n, host=f"h{n}", local_ranks=1) for n in range(2, len(links) + 1)]
    return Examination(len(ranks), tuple(ranks), tuple(Link(n + 1, *link, 0.0) for n, link in enumerate(links)))


def test_links_are_judged_among_their_kind() -> None:
    near, slower = (2e-5, 9e9), (5e-4, 1e9)
    (inside,), (between,) = (found(far(near, slower, slower), check) for check in ("links in a host", "links of hosts"))
    assert inside.status is between.status is Status.OK
    assert inside.details == ("rank 0 (a) - rank 1 (a): 20 µs, 8.38 GiB/s",)
    assert len(between.details) == 2
    for slow in ((5e-4, 3e8), (2e-3, 1e9)):
        (between,) = found(far(near, slower, slower, slow), "links of hosts")
        assert between.status is Status.WARNING
        assert between.message.count("rank 0 (a)") == 1
        assert "rank 4 (h4)" in between.message
        assert "network card" in between.remedy


@pytest.mark.parametrize("link", [(5e-4, 4e8), (1.4e-3, 1e9)])
def test_a_link_a_little_slower_is_ok(link: tuple[float, float]) -> None:
    (between,) = found(far((2e-5, 9e9), (5e-4, 1e9), (5e-4, 1e9), link), "links of hosts")
    assert between.status is Status.OK


def test_one_fast_link_does_not_make_the_others_slow() -> None:
    usual, fast = (5e-4, 1e9), (5e-5, 9e9)
    (between,) = found(far(fast, usual, usual, usual, fast), "links of hosts")
    assert between.status is Status.OK


def test_a_few_microseconds_are_no_reason_to_worry() -> None:
    ranks = tuple(replace(ONE, rank=n, local_ranks=3, cores=(n,), threads=1) for n in range(3))
    (inside,) = found(Examination(3, ranks, (Link(1, 2e-5, 1e9, 0.0), Link(2, 1e-4, 1e9, 0.0))), "links in a host")
    assert inside.status is Status.OK


def test_of_several_hosts_only_the_bad_ones_are_named() -> None:
    bad, good = found(apart({}, {"files": 100}), "open files")
    assert (bad.status, bad.message) == (Status.WARNING, "b: at most 100")
    assert (good.status, good.message) == (Status.OK, "on 1 host: at most 4096")


def test_what_is_the_same_on_all_hosts_is_said_once() -> None:
    (alike,) = found(apart(), "open files")
    assert (alike.message, alike.details) == ("on 2 hosts: at most 4096", ())
    (unlike,) = found(apart({}, {"files": 8192}), "open files")
    assert (unlike.message, unlike.details) == ("on 2 hosts", ("a: at most 4096", "b: at most 8192"))


@pytest.mark.parametrize(
    ("version", "wanted", "answer"),
    [
        ("2.13.0+cpu", "<3,>=2.9", True),
        ("2.9", ">=2.9.0", True),
        ("2.8.1", "<3,>=2.9", False),
        ("3.0.0", "<3,>=2.9", False),
        ("3.0.0a0+git123", "<3", False),
        ("2.10.1", "!=2.10.1", False),
        ("2.10.1", "==2.10.1", True),
        ("2.10.1", ">2.10,<=2.10.1", True),
        ("anything", "", True),
    ],
)
def test_versions_compare_by_their_numbers(version: str, wanted: str, answer: bool) -> None:
    assert satisfies(version, wanted) is answer


def test_the_worst_counts() -> None:
    findings = [Finding("x", status, "") for status in (Status.PROBLEM, Status.OK, Status.WARNING)]
    assert worst(findings) is Status.PROBLEM
    assert worst(findings[1:]) is Status.WARNING
    assert worst([]) is Status.OK
