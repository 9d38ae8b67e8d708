"""Several hosts on one machine: what is measured of a slow link between them, and what the plan makes of it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from terapipe.planning.fitted import FittedCost
from terapipe.planning.profile import Profile
from terapipe.scheduling.simulator import measure
from terapipe.search.choose import choose
from terapipe.search.request import ProfileSource, Request
from tests.hosts import Host, finish, hosts, torchrun, why_not

TOKENS = 512
MEGABYTE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if reason := why_not():
        pytest.skip(reason)


def profiled(two: list[Host], out: Path) -> Profile:
    options = ["--model", "gpt-tiny", "--seq", str(TOKENS), "--ranks", "2", "--seconds", "2", "--out", str(out)]
    finish(torchrun(two, "-m", "terapipe", "profile", *options))
    return Profile.from_json(out.read_text())


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    with hosts(2, rate="100mbit", delay="5ms") as two:
        return profiled(two, tmp_path_factory.mktemp("slow") / "profile.json")


def least(profile: Profile, nbytes: int) -> float:
    """Seconds when nothing else held it up."""
    (found,) = [t for t in profile.transfers if t.nbytes == nbytes]
    return min(found.seconds)


def test_a_slow_link_is_measured(slow: Profile, tmp_path: Path) -> None:
    assert [name.split()[0] for name in slow.hosts] == ["node0", "node1"]
    assert all(t.between_hosts for t in slow.transfers)
    assert least(slow, MEGABYTE) == pytest.approx(8 * MEGABYTE / 100e6 + 5e-3, rel=0.25)
    assert FittedCost(slow).sending(0, 1).latency == pytest.approx(5e-3, rel=0.5)
    with hosts(2) as two:
        fast = profiled(two, tmp_path / "profile.json")
    assert least(fast, MEGABYTE) < least(slow, MEGABYTE) / 4


def test_the_plan_heeds_the_measured_link(slow: Profile) -> None:
    request = Request(1, TOKENS, data=1, pipe=2, tensor=1, recompute=False)
    with_link, as_if_free = (
        choose(ProfileSource(profile, 2), request).chosen.plan for profile in (slow, replace(slow, transfers=()))
    )
    assert with_link != as_if_free
    cost = FittedCost(slow)
    assert measure(with_link, cost)[0] < measure(as_if_free, cost)[0]


SERVER = "import socket; s = socket.create_server(('', 9)); print('ready', flush=True)\nwhile True: s.accept()"
CLIENT = "import socket; socket.create_connection(('node1', 9), timeout=0.5)"


def test_a_host_that_is_cut_off_is_silent() -> None:
    with hosts(2) as (here, there):
        names = Path("/run/netns") / here.namespace, Path("/etc/netns") / there.namespace
        assert all(name.exists() for name in names)
        serving = there.start(sys.executable, "-c", SERVER)
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        finish([here.start(sys.executable, "-c", CLIENT)])
        there.cut()
        with pytest.raises(RuntimeError, match="timed out"):
            finish([here.start(sys.executable, "-c", CLIENT)])
        there.mend()
        finish([here.start(sys.executable, "-c", CLIENT)])
    assert serving.poll() is not None
    assert not any(name.exists() for name in names)
